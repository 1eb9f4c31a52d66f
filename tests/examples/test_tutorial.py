"""The tutorial: every step trains to the same losses, and the page shows the files' own diffs."""

import difflib
import re

import pytest

import commgrid
from commgrid import GridSpec, GroupPlan
from commgrid.testing import run_on_ranks
from tests.examples.curves import ROOT, load

STEPS = range(6)
PAGE = (ROOT / "docs" / "tutorial.md").read_text()


def text_of(step: int) -> str:
    return (ROOT / "examples" / "tutorial" / f"step_{step}.py").read_text()


def run(*steps: int) -> list[list[float]]:
    """The losses of some steps, in one process after the other."""
    down, commgrid.shutdown = commgrid.shutdown, commgrid.destroy
    found = [load(f"tutorial/step_{step}").main() for step in steps]
    down()
    return found


def run_changed(text: str) -> str:
    """What a changed script ends with."""
    script: dict[str, object] = {"__name__": "changed"}
    exec(compile(text, "changed", "exec"), script)
    try:
        script["main"]()  # type: ignore[operator]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """The losses of the script that the tutorial begins with, on 4 ranks."""
    first, *others = run_on_ranks(run, 4, 0, backend=None, launcher="torchrun", check=False)
    assert all(other == first for other in others)
    return first[0]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [4, 8])
def test_every_step_has_the_losses_of_the_first(plain: list[float], ranks: int) -> None:
    assert plain[-1] < 0.8 * plain[0]  # it learns
    for found in run_on_ranks(
        run, ranks, *STEPS[1:], backend=None, launcher="torchrun", check=False
    ):
        for step, losses in zip(STEPS[1:], found, strict=True):
            # In fp64. Products are the same; sums over ranks, slices and microbatches have another
            # order, which ten steps of AdamW amplify by a few orders of magnitude and no more.
            assert losses == pytest.approx(plain, rel=1e-10), f"step_{step}.py on {ranks} ranks"


def diff_of(step: int) -> str:
    """How a step differs from the one before, with a line around each change."""
    lines = difflib.unified_diff(
        text_of(step - 1).splitlines(), text_of(step).splitlines(), lineterm="", n=1
    )
    return "\n".join("@@" if line.startswith("@@") else line for line in list(lines)[2:])


@pytest.mark.parametrize("step", STEPS[1:])
def test_the_page_shows_each_steps_diff(step: int) -> None:
    shown = re.findall(r"```diff\n(.*?)\n```", PAGE, re.DOTALL)
    assert len(shown) == len(STEPS) - 1
    assert shown[step - 1] == diff_of(step), f"docs/tutorial.md should show:\n{diff_of(step)}"


def test_the_page_shows_the_whole_first_script() -> None:
    blocks = re.findall(r"```python\n# on 4 ranks\n(.*?)```", PAGE, re.DOTALL)
    assert blocks[0] == text_of(0)


def test_the_page_shows_what_is_printed(plain: list[float]) -> None:
    printed = dict(re.findall(r"^step (\d+)  loss (\S+)$", PAGE, re.MULTILINE))
    assert printed
    for step, loss in printed.items():
        assert f"{plain[int(step)]:.6f}" == f"{float(loss):.6f}"


def test_the_page_shows_the_groups_of_every_rank() -> None:
    shown = re.findall(r"```text\n((?:rank \d: .*\n)+)", PAGE)
    sizes: list[dict[str, int]] = [{}, {"tp": 2}, {"tp": 2, "pp": 2}]
    for lines, given in zip(shown, sizes, strict=True):
        spec = GridSpec.build(**given).resolve(4)
        groups = [GroupPlan.for_rank(spec, rank).groups for rank in range(4)]
        assert lines.splitlines() == [
            f"rank {rank}: " + "  ".join(f"{axis} {of[axis]}" for axis in ("tp", "dp", "pp"))
            for rank, of in enumerate(groups)
        ]


MISTAKES = {
    "another_seed_on_every_rank": (2, "manual_seed(0)", "manual_seed(grid.rank)"),
    "sizes_that_do_not_fit": (3, "initialize(tp=2)", "initialize(tp=3)"),
    "a_width_that_cannot_be_shared": (3, "32, 16, 32, 4, 4", "32, 16, 33, 3, 4"),
    "one_rank_has_other_sizes": (
        3, "initialize(tp=2)", "initialize(tp=1 if __import__('os').environ['RANK'] == '3' else 2)",
    ),
    "no_finish": (2, "reducer.finish()", "pass"),
    "data_by_global_rank": (
        3, 'chunk(grid.size("dp"))[grid.get_local_rank("dp")]', "chunk(grid.world_size)[grid.rank]",
    ),
    "torchs_clipping": (
        4, "reducer.clip_gradients(1.0)", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    ),
    "a_plain_optimizer_over_shards": (
        4, "ShardedOptimizer(reducer, torch.optim.AdamW, lr=5e-3)",
        "torch.optim.AdamW(model.parameters(), lr=5e-3)",
    ),
    "another_number_of_microbatches": (5, "num_microbatches=MICROBATCHES", "num_microbatches=8"),
    "a_stage_that_fails": (5, "return F.cross_entropy(", "raise ValueError('boom')  # "),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_goes_wrong_says_what_the_page_says(mistake: str) -> None:
    step, right, wrong = MISTAKES[mistake]
    assert text_of(step).count(right) == 1
    changed = text_of(step).replace(right, wrong)
    said = run_on_ranks(run_changed, 4, changed, backend=None, launcher="torchrun", check=False)[0]
    assert told(said) in told(re.sub(r"\s+", " ", PAGE))


def told(text: str) -> str:
    """Without what is another one in every run: which copy of a stage was the first to fail, how
    far rank 0 had come when it heard of it, and whether it waited or was about to send."""
    text = re.sub(r"rank [23] failed in", "rank 2 failed in", text)
    text = re.sub(
        r"\(rank 0 was in (the exchange after )?the \w+ of microbatch \d", "(rank 0 was there", text
    )
    return re.sub(r", in start_transfers on group 'pp'( \(changed:\d+ in train\))?", "", text)


@pytest.mark.full
def test_without_a_launcher() -> None:
    said = run_on_ranks(run_changed, 1, text_of(3), backend=None, check=False)[0]
    assert said in re.sub(r"\s+", " ", PAGE)
    assert "run it under torchrun" in said
