"""The front page says what is: its diffs are real, its pictures new, its output what is printed."""

import contextlib
import difflib
import io
import os
import re
import shlex
import warnings
from pathlib import Path

import pytest

import commgrid
from commgrid.cli import main
from commgrid.testing import run_on_ranks
from tests.benchmarks.draw import main as draw
from tests.docs.pages import in_shell
from tests.examples.curves import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAIRS = ("ddp", "device_mesh", "megatron")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_it_is_a_page() -> None:
    assert len(README.splitlines()) <= 180


# -- the diffs ----------------------------------------------------------------------------


def code(name: str) -> list[str]:
    """An example's lines after its docstring."""
    text = (ROOT / "examples" / "before_after" / f"{name}.py").read_text()
    return text.split('"""', 2)[2].strip().splitlines()


@pytest.mark.parametrize("pair", PAIRS)
def test_the_diffs_are_those_of_the_examples(pair: str) -> None:
    """All that is added and removed, in order; of what stays, lines to find one's way."""
    shown = blocks("diff")[PAIRS.index(pair)].splitlines()
    before, after = code(f"{pair}_before"), code(f"{pair}_after")
    changed = [
        line for line in difflib.unified_diff(before, after, n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("+++", "---") and line[1:].strip()
    ]  # fmt: skip
    assert sorted(line for line in shown if line[0] in "+-") == sorted(changed)
    kept = [line[1:] for line in shown if line[0] == " "]
    assert kept
    assert all(line in before and line in after for line in kept)


def trained(name: str) -> tuple[list[float], str]:
    """The losses that an example's main returns, and what it prints; in a world of its own."""
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore")  # torch's and Megatron's own, the same before and after
        losses: list[float] = load(f"before_after/{name}").main()
    return losses, printed.getvalue()


@pytest.mark.full("device_mesh", "megatron")
@pytest.mark.parametrize("pair", PAIRS)
def test_both_sides_of_a_diff_train_alike(pair: str) -> None:
    """To the last bit where the layers are the same; else in another order of sums, in fp32."""
    if pair == "megatron":
        pytest.importorskip("megatron.core", reason="megatron-core is not installed (group test)")
    before, after = (
        run_on_ranks(trained, 4, f"{pair}_{side}", backend=None, launcher="torchrun")
        for side in ("before", "after")
    )
    first, printed = before[0]
    assert len(first) == 10
    assert first[-1] < 0.8 * first[0]
    assert printed.startswith("loss ")
    assert after[0][1] == printed
    for (one, _), (other, _) in zip(before, after, strict=True):
        assert other == (pytest.approx(one, rel=1e-5) if pair == "ddp" else one)


# -- the first command ----------------------------------------------------------------------


@pytest.mark.nightly
def test_the_first_command_trains(tmp_path: Path) -> None:
    """As it stands behind the installation, with fewer steps."""
    installs, _, trains = blocks("bash")[1].partition(" && ")
    assert installs.startswith("pip install -e . ")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed, errors = in_shell(f"{trains.strip()} --steps 3", tmp_path)
    assert re.search(r"^done: 3 steps in ", printed, re.MULTILINE), printed + errors


# -- what is printed ------------------------------------------------------------------------


def say_hello(tp: dict[int, int]) -> str:
    """Runs the first block, asking for another tp on some ranks."""
    asked = tp.get(int(os.environ["RANK"]), 2)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(blocks("python")[0].replace("tp=2", f"tp={asked}"), {})
    except commgrid.CommGridError as error:
        return f"{type(error).__name__}: {error}"
    return printed.getvalue().strip()


def test_what_4_ranks_print() -> None:
    expected = next(block for block in blocks("console") if "hello.py" in block).splitlines()
    assert expected[0] == "$ torchrun --standalone --nproc-per-node 4 hello.py"
    assert run_on_ranks(say_hello, 4, {}, backend=None, launcher="torchrun") == expected[1:]


def test_what_a_rank_that_differs_prints() -> None:
    said = run_on_ranks(say_hello, 4, {3: 4}, backend=None, launcher="torchrun")
    assert set(said) == {blocks("text")[0].strip()}


# -- the pictures ---------------------------------------------------------------------------

DRAWN = {
    "docs/images/grid.svg": "commgrid show --tp 2 --pp 2 --world-size 16 --rank 5",
    "docs/images/schedule.svg": "commgrid show --schedule zb-h1 --stages 4 --microbatches 8",
    "docs/images/startup.svg": "python tests/benchmarks/draw.py --benchmark "
    "docs/images/startup.json --rows 'creation calls, all'",
}
"""Each picture, and the command that draws it anew with -o."""


def test_each_picture_has_its_command() -> None:
    assert set(DRAWN) == set(re.findall(r"!\[.*?\]\((.*?)\)", README))


def texts(picture: str) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", picture, re.DOTALL)


@pytest.mark.parametrize("path", DRAWN, ids=[Path(path).stem for path in DRAWN])
def test_pictures_are_up_to_date(path: str, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed (group viz)")
    new = tmp_path / "new.svg"
    program, *words = [*shlex.split(DRAWN[path]), "-o", str(new)]
    if program == "python":
        assert draw(words[1:]) == 0
    else:
        main(words)
    ours, drawn = (ROOT / path).read_text(), new.read_text()
    assert texts(drawn)
    assert texts(drawn) == texts(ours)
    if f"Matplotlib v{matplotlib.__version__}," in ours:  # another version may draw otherwise
        assert drawn == ours
