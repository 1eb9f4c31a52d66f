"""What is private to torch: every use is in the table, and the running torch has what it names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from commgrid.testing import run_on_ranks
from tests.torch_private import CHECKED, ROWS, as_markdown, live

ROOT = Path(__file__).parents[1]
FILES = sorted(p for room in ("commgrid", "megatron_adapter") for p in (ROOT / room).rglob("*.py"))
OWNERS = (torch, c10d, dist.ProcessGroup, c10d.ProcessGroupGloo, c10d.ProcessGroupGloo._Options,
          DeviceMesh, nn.Module, torch.Tensor)  # fmt: skip


@cache
def trees() -> dict[str, ast.Module]:
    """The source, by file; not where tests are only collected."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}


def running() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def missing() -> list[str]:
    """Rows that the running torch does not bear out."""
    names = live()
    found = []
    for row in ROWS:
        expected = running() >= tuple(map(int, row.first.split(".")))
        if row.nccl and not dist.is_nccl_available():
            continue
        try:
            eval(row.name, dict(names))
        except AttributeError:
            found += [f"{row.name} is gone: {row.then}"] if expected else []
        else:
            found += [] if expected else [f"{row.name} is older than {row.first}"]
    return found


def test_the_running_torch_has_every_private_name() -> None:
    assert run_on_ranks(missing, 1)[0] == []


def test_the_running_torch_is_one_of_those_that_were_checked() -> None:
    version = ".".join(map(str, running()))
    assert version in CHECKED, (
        f"torch {version} is not in tests/torch_private.py; run tests/versions.py on it, read what "
        "its notes say of each row, and add it to CHECKED"
    )


def own_names() -> set[str]:
    """What is defined in these packages: functions, classes, variables, attributes of self."""
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
    "_asdict",
    "_exit",
    "_replace",
    "_current_frames",
    "_getframe",
    "_set_global_memory_buffer",
    "_commgrid_mark",
    "_C",
}


def test_every_private_call_is_in_the_table() -> None:
    own = own_names()
    listed = {(name, file) for row in ROWS for name in (row.attribute, row.name)
              for file in row.files}  # fmt: skip
    lacking = [
        f"{file} uses {name}, which is private to torch: tests/torch_private.py has no line for it"
        for file, tree in trees().items()
        for name in sorted(uses(tree, own) - NOT_TORCHS)
        if (name, file) not in listed
    ]
    assert lacking == []


def test_every_line_of_the_table_is_used() -> None:
    for row in ROWS:
        for file in row.files:
            last = row.name.rpartition(".")[2]
            assert re.search(rf"\b{last}\b", (ROOT / file).read_text()), (
                f"{file} no longer uses {row.name}: take it out of that line of torch_private.py"
            )


def test_the_documentation_has_the_table() -> None:
    page = (ROOT / "docs" / "torch_versions.md").read_text()
    assert as_markdown() in page, "print it with python -m tests.torch_private"
