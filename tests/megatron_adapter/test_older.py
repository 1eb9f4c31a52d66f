"""megatron-core 0.15.3, installed into a folder of its own: the same functions, the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
OLDER = "0.15.3"


def install(folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder),
         f"megatron-core=={OLDER}"],
        check=True, timeout=240,
    )  # fmt: skip


def test_the_older_version(tmp_path: Path) -> None:
    install(tmp_path)
    done = subprocess.run(
        [sys.executable, __file__],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith("all the same\n")


def newer_state() -> list[object]:
    """What the older version has no variables for, asked through the adapter's own module."""
    import megatron_adapter
    import megatron_adapter.parallel_state as mpu
    from tests.peers import parallel_state as theirs

    before = set(vars(theirs))
    megatron_adapter.install()
    mpu.initialize_model_parallel(
        create_all_gather_group=True, hybrid_context_parallel=True, expert_model_parallel_size=2
    )
    found: list[object] = [mpu.has_separate_all_gather_group()]
    found.append(mpu.get_expert_model_parallel_src_rank())
    found.append(mpu.get_hybrid_data_context_parallel_groups(group_size=2).size())
    mpu.destroy_global_symmetric_memory_buffer()
    megatron_adapter.uninstall()
    mpu.destroy_model_parallel()
    assert set(vars(theirs)) == before
    return found


def main() -> None:
    """Runs in a process whose megatron-core is the older one."""
    warnings.simplefilter("ignore")
    from tests.megatron_adapter import test_functions, test_gpt
    from tests.ranks import run_on_ranks

    assert version("megatron-core") == OLDER
    new = {"hybrid_context_parallel", "create_all_gather_group"}
    configs = [given for given in test_functions.CONFIGS[4] if not new & given.keys()]
    assert len(configs) > 10

    def every() -> list[str]:
        return [line for given in configs for line in test_functions.compare(given)]

    for found in run_on_ranks(every, 4, timeout=200):
        assert not found, "\n".join(found[:20])
    for rank, state in enumerate(run_on_ranks(newer_state, 4, timeout=100)):
        assert state == [True, rank // 2 * 2, 2], (rank, state)
    for given in ("--tp 2", "--pp 2 --vpp 2", "--experts 4 --ep 2"):
        for losses in run_on_ranks(test_gpt.two_losses, 2, given, timeout=200):
            assert losses["commgrid"] == losses["megatron"], given
            assert len(losses["megatron"]) == 5
    print("all the same")


if __name__ == "__main__":
    main()
