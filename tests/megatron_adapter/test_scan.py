"""What `scan` finds in a user's code."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from commgrid import SpecError
from megatron_adapter import scan
from megatron_adapter.__main__ import main
from tests.peers import parallel_state as theirs

CODE = """
import megatron.core.parallel_state
import megatron.core as mc
from megatron.core import mpu, parallel_state as ps
from megatron.core.parallel_state import get_data_parallel_rank as rank, RankGenerator
from megatron_adapter import parallel_state

def step(model, pg_collection):
    a = mpu.get_tensor_model_parallel_group()
    b = ps.get_data_parallel_world_size(with_context_parallel=True)
    c = rank()
    d = megatron.core.parallel_state.is_pipeline_first_stage()
    e = mc.mpu.get_context_parallel_rank()
    f = ps._TENSOR_MODEL_PARALLEL_GROUP
    g = parallel_state.get_pipeline_model_parallel_rank()
    handed = [mpu.get_embedding_group]
    ps.set_virtual_pipeline_model_parallel_rank(0)
    # none of these:
    pg_collection.tp.size(); model.get_data_parallel_group(); RankGenerator; ps.RankGenerator
    ps.initialize_model_parallel(2); ps.create_group([0]); mpu.get_nccl_options("tp", {})
"""
EXPECTED = [
    (9, "get_tensor_model_parallel_group"),
    (10, "get_data_parallel_world_size"),
    (11, "get_data_parallel_rank"),
    (12, "is_pipeline_first_stage"),
    (13, "get_context_parallel_rank"),
    (14, "_TENSOR_MODEL_PARALLEL_GROUP"),
    (15, "get_pipeline_model_parallel_rank"),
    (16, "get_embedding_group"),
    (17, "set_virtual_pipeline_model_parallel_rank"),
]


def test_every_way_to_read_is_found_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(CODE)
    assert [(read.line, read.name) for read in scan(path)] == EXPECTED
    star = tmp_path / "star.py"
    star.write_text(
        "from megatron.core.parallel_state import *\n"
        "a = get_data_parallel_rank() + get_data_parallel_rank()\n"
        "destroy_model_parallel()\n"
    )
    assert [(read.line, read.name) for read in scan(star)] == [(2, "get_data_parallel_rank")] * 2
    star.unlink()
    (tmp_path / "clean.py").write_text("import torch\nprint(torch.get_default_dtype())\n")
    assert [(read.line, read.name) for read in scan(tmp_path)] == EXPECTED


def test_megatrons_own_reads_are_found() -> None:
    """megatron-core's layers take their group from the state where none is given."""
    root = Path(str(theirs.__file__)).parent
    found = scan(root / "tensor_parallel")
    assert {read.name for read in found} >= {"get_tensor_model_parallel_group"}
    assert all(read.name in read.path.read_text().splitlines()[read.line - 1] for read in found)


@dataclass
class Done:
    """What a command ended with, and said."""

    returncode: int | str | None
    stdout: str
    stderr: str


def command(*given: str) -> Done:
    """`python -m megatron_adapter`, without a new process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["megatron_adapter", *given]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return Done(ended.value.code, out.getvalue(), err.getvalue())


def test_command_line(tmp_path: Path) -> None:
    assert command("name").returncode == 2
    path = tmp_path / "code.py"
    path.write_text(CODE)
    done = command("scan", str(path))
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == f"{path}:9: get_tensor_model_parallel_group"
    assert "9 reads of Megatron's global parallel state" in done.stdout
    rows = json.loads(command("scan", str(path), "--json").stdout)
    assert rows[0] == {"path": str(path), "line": 9, "name": "get_tensor_model_parallel_group"}
    path.write_text("")
    assert command("scan", str(path)).returncode == 0
    assert json.loads(command("names", "--json").stdout)[0]["name"] == "tp"
    path.write_text("def broken(:")
    for bad, said in ((path, "cannot be read as Python"), (tmp_path / "none", "no such file")):
        done = command("scan", str(bad))
        assert done.returncode == 2
        assert said in done.stderr
        with pytest.raises(SpecError, match=said):
            scan(bad)
