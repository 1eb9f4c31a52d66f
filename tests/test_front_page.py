"""The front page says what is: its diffs are real, its pictures new, its output what is printed."""

import contextlib
import difflib
import io
import os
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import commgrid
from commgrid.cli import main
from commgrid.collectives.group_ref import GroupRef
from commgrid.parameters import own_slice
from commgrid.testing import run_on_ranks
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


def full_weights(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name) + sum(shape))
    return torch.randn(shape, generator=generator) / 8


FULL = {"up.weight": (128, 32), "up.bias": (128,), "down.weight": (32, 128), "down.bias": (32,)}


def losses(name: str) -> Any:
    """What an example's main returns, here of a world of its own."""
    example = load(f"before_after/{name}")
    if name.startswith("ddp"):
        grown = example.MLP

        def with_weights() -> torch.nn.Module:
            model = grown()
            for parameter_name, parameter in model.named_parameters():
                full = full_weights(parameter_name, FULL[parameter_name])
                for dim, size in enumerate(parameter.shape):
                    if size != full.shape[dim]:
                        full = own_slice(full, dim, GroupRef("tp"), size)
                parameter.data.copy_(full)
            return model

        example.MLP = with_weights
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's and Megatron's own, the same before and after
        return example.main()


@pytest.mark.full("device_mesh", "megatron")
@pytest.mark.parametrize("pair", PAIRS)
def test_both_sides_of_a_diff_train_alike(pair: str) -> None:
    """To the last bit where the layers are the same; else in another order of sums, in fp32."""
    if pair == "megatron":
        pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra test)")
    before, after = (
        run_on_ranks(losses, 4, f"{pair}_{side}", backend=None, launcher="torchrun")
        for side in ("before", "after")
    )
    assert len(before[0]) == 10
    assert before[0][-1] < 0.8 * before[0][0]
    for one, other in zip(before, after, strict=True):
        assert other == (pytest.approx(one, rel=1e-5) if pair == "ddp" else one)


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

DRAWN = re.findall(r"^(commgrid show .*-o (docs/images/\S+))$", README, re.MULTILINE)


def test_each_picture_has_its_command() -> None:
    assert {path for _, path in DRAWN} == set(re.findall(r"!\[.*?\]\((.*?)\)", README))
    assert len(DRAWN) == 3


def texts(picture: str) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", picture, re.DOTALL)


@pytest.mark.parametrize(("command", "path"), DRAWN, ids=[Path(path).stem for _, path in DRAWN])
def test_pictures_are_up_to_date(command: str, path: str, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra viz)")
    new = tmp_path / "new.svg"
    main([str(new) if word == path else word for word in shlex.split(command)[1:]])
    ours, drawn = (ROOT / path).read_text(), new.read_text()
    assert texts(drawn)
    assert texts(drawn) == texts(ours)
    if f"Matplotlib v{matplotlib.__version__}," in ours:  # another version may draw otherwise
        assert drawn == ours
