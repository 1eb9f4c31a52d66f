"""Names private to torch: VERSIONS.md lists each one, and the running torch has it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._subclasses
import torch.distributed as dist
import torch.distributed.checkpoint.filesystem
import torch.distributed.tensor._redistribute
import torch.distributed.tensor.debug
import torch.testing._internal.distributed.fake_pg
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from commgrid.testing import run_on_ranks

ROOT = Path(__file__).parents[2]
FILES = sorted(p for room in ("commgrid", "megatron_adapter") for p in (ROOT / room).rglob("*.py"))
OWNERS = (torch, c10d, dist.ProcessGroup, c10d.ProcessGroupGloo, c10d.ProcessGroupGloo._Options,
          DeviceMesh, nn.Module, torch.Tensor)  # fmt: skip
DOOR = ("commgrid/store/", "commgrid/torch_compat/")
MOST_BESIDE_THE_DOOR = 46
"""Private names in files other than `torch_compat/`, once a file; lower it when some go."""


class Row(NamedTuple):
    """One line of the page's table: an expression over the names of `live`, and its notes."""

    name: str
    notes: str
    when_it_goes: str

    @property
    def attribute(self) -> str:
        """The private part of the name, as code spells it."""
        return next(part for part in reversed(self.name.split(".")) if part.startswith("_"))

    @property
    def expected(self) -> bool:
        """Whether the running torch should have it."""
        first = re.search(r"from (\d+)\.(\d+) on", self.notes)
        return first is None or running() >= tuple(map(int, first.groups()))


@cache
def page() -> str:
    text = Path(__file__).with_name("VERSIONS.md").read_text(encoding="utf-8")
    return text[text.index("## What is private to torch") :]


@cache
def rows() -> list[Row]:
    return [Row(*found) for found in re.findall(r"(?m)^\| `([^`]+)`(.*?) \| (.+) \|$", page())]


@cache
def trees() -> dict[str, ast.Module]:
    """The source, by file; not where tests are only collected."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}


def running() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def live() -> dict[str, Any]:
    """The first parts of the table's names; torch.distributed is up, with gloo."""
    group = dist.group.WORLD
    assert group is not None
    sharded = fully_shard(nn.Linear(1, 1))
    sharded(torch.ones(1, 1))
    return {
        "torch": torch, "nn": nn, "c10d": c10d, "group": group,
        "gloo": group._get_backend(torch.device("cpu")), "Gloo": c10d.ProcessGroupGloo,
        "DeviceMesh": DeviceMesh, "fsdp": sharded._get_fsdp_state(),
        "mesh": init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")),
    }  # fmt: skip


def surprises() -> list[str]:
    """Rows that the running torch does not bear out."""
    names, found = live(), []
    for row in rows():
        if "NCCL" in row.notes and not dist.is_nccl_available():
            continue
        try:
            eval(row.name, dict(names))
        except AttributeError:
            found += [f"{row.name} is gone: {row.when_it_goes}"] if row.expected else []
        else:
            found += [] if row.expected else [f"{row.name} is there, but not{row.notes}"]
    return found


def test_the_running_torch_has_every_private_name() -> None:
    assert len(rows()) > 50
    assert run_on_ranks(surprises, 1)[0] == []


def test_the_running_torch_is_one_of_those_that_were_checked() -> None:
    checked = re.search(r"looked up on ([^.]*\.[^a-z]*and \d\.\d+)", page())
    assert checked is not None
    version = ".".join(map(str, running()))
    assert version in re.findall(r"\d+\.\d+", checked[1]), (
        f"torch {version} is not in tests/torch_compat/VERSIONS.md; run tests/versions.py on it, "
        "read what its notes say of each name, and add it"
    )


def own_names() -> set[str]:
    """Names these packages define: functions, classes, variables, attributes of self."""
    found: set[str] = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if of_self(node) else set()
    return found


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def uses(tree: ast.Module, own: set[str]) -> set[str]:
    """Private names of others that a file reads, sets, imports, or looks up by a string."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not of_self(node):
            if node.attr not in own or any(hasattr(owner, node.attr) for owner in OWNERS):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                if any(map(is_private, path.split("."))):
                    found.add(path)
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if re.match(r"torch\b.*\._", a.name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            known = is_private(node.value) and any(hasattr(o, node.value) for o in OWNERS)
            if known or re.fullmatch(r"torch[\w.]*\._\w+", node.value):
                found.add(node.value)
    return found


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


# Private to others than torch; and `_C`, of which the table has what is used.
NOT_TORCHS = {
    "_actions",  # argparse's
    "_clear",  # atexit's
    "_fixtureinfo",  # pytest's
    "_run_exitfuncs",  # atexit's
    "_asdict",
    "_exit",
    "_replace",
    "_current_frames",
    "_getframe",
    "_threads",  # an executor's
    # pytest's
    # atexit's
    # atexit's
    "_set_global_memory_buffer",
    "_commgrid_mark",
    "_commgrid_buffers",
    "_C",
}


def found() -> set[tuple[str, str]]:
    own = own_names()
    return {(file, name) for file, tree in trees().items() for name in uses(tree, own) - NOT_TORCHS}


def test_every_use_has_a_line() -> None:
    listed = {name for row in rows() for name in (row.attribute, row.name)}
    assert sorted(use for use in found() if use[1] not in listed) == []


def test_most_uses_are_behind_the_door() -> None:
    beside = sorted(use for use in found() if not use[0].startswith(DOOR))
    assert len(beside) <= MOST_BESIDE_THE_DOOR, beside


def test_every_line_is_used() -> None:
    source = "\n".join(path.read_text() for path in FILES)
    last = {row.name.rpartition(".")[2] for row in rows()}
    assert sorted(name for name in last if not re.search(rf"\b{name}\b", source)) == []
