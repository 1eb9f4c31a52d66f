"""The pages of the documentation, and what of them can be run.

A page is plain Markdown. What its fenced blocks mean is said by their language and first line:

    python     all blocks of a page are one program, in order, in one process
               `# on 4 ranks`: all blocks with this line are one program, run by so many ranks
               `# train.py on 4 ranks`: saved under that name, and run by itself
               `# train.py`: saved under that name for what comes after it
               `# not run: why`: as it says
    yaml       a grid, or with `levels` a cluster; `# grid.yaml` saves it under that name
    console    `$ commgrid …` and `$ python -m megatron_adapter …` print the lines below; a line
               `…` stands for any lines. Other commands with output need a comment, as `text` does
    text       has a comment on the line before it:
               `<!-- printed -->`: lines that the page's Python prints on rank 0
               `<!-- run -->`: lines that the commands above it print, in a shell
               `<!-- checked: FILE::TEST -->`: this test compares it
               `<!-- drawing -->`: nothing prints it
               `<!-- not run: why -->`: cannot be printed by a test
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import yaml

from commgrid.runtime.registry import _registry
from commgrid.testing import run_on_ranks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BESIDE = [ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]  # run as pages are
FRONT = [ROOT / "README.md", *BESIDE]

_FENCE = re.compile(
    r"^(?:<!-- (?P<comment>[^\n]+) -->\n)?"
    r"(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)
_RANKS = re.compile(r"# (?:(?P<file>\w+\.py) )?on (?P<ranks>\d+) ranks\n")
_FILE = re.compile(r"# (?P<file>\w+\.(?:py|yaml))\n")
_NOT_RUN = re.compile(r"# not run: (?P<why>.+)\n")
_LAUNCHED = re.compile(r"(?:python -m )?(commgrid|megatron_adapter) ")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text, the text's first line on the page, and its comment."""

    language: str
    text: str
    line: int
    comment: str = ""


@dataclass
class Program:
    """Code of a page that is run in one go.

    Args:
        ranks: how many run it, as under torchrun; 0: one process that no launcher has started.
        source: its blocks, each on the lines that it has on the page.
    """

    ranks: int
    source: str = ""

    def add(self, block: Block) -> None:
        self.source += "\n" * (block.line - 1 - self.source.count("\n")) + block.text


def name_of(page: Path) -> str:
    """The page as a test's id."""
    return str(page.relative_to(DOCS if DOCS in page.parents else ROOT))


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page in these languages; without any, all of them."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            found["language"],
            textwrap.dedent(found["text"]),
            text[: found.start("text")].count("\n") + 1,
            found["comment"] or "",
        )
        for found in _FENCE.finditer(text)
        if not languages or found["language"] in languages
    ]


def programs(page: Path) -> list[Program]:
    """What the Python blocks of a page make; those that are only saved, or not run, left out."""
    found: dict[str, Program] = {}
    for block in blocks(page, "python"):
        marked = _RANKS.match(block.text)
        if marked:
            program = Program(int(marked["ranks"]))
            if marked["file"] is None:
                program = found.setdefault(marked[0], program)
            else:
                found[marked[0]] = program
            program.add(block)
        elif not _FILE.match(block.text) and not _NOT_RUN.match(block.text):
            found.setdefault("", Program(0)).add(block)
    return list(found.values())


def not_run(page: Path) -> list[str]:
    """The reason of each block that no test runs or compares."""
    marks = [_NOT_RUN.match(block.text) for block in blocks(page, "python")]
    said = [block.comment.removeprefix("not run: ") for block in outputs(page, "not run")]
    return [*(mark["why"] for mark in marks if mark), *said]


def grids(page: Path) -> list[object]:
    """What the YAML blocks of a page hold."""
    return [yaml.safe_load(block.text) for block in blocks(page, "yaml")]


def save_files(page: Path, folder: Path) -> None:
    """The blocks with a file's name as their first line; grid.yaml is the first without one."""
    for block in reversed(blocks(page, "yaml", "python")):
        named = _FILE.match(block.text) or _RANKS.match(block.text)
        name = named["file"] if named else None
        if name is None and block.language == "yaml":
            name = "grid.yaml"
        if name is not None:
            (folder / name).write_text(block.text, encoding="utf-8")


def outputs(page: Path, kind: str = "") -> list[Block]:
    """The blocks with output that nothing on the page says how to get; those of a kind, or all."""
    found = blocks(page, "text")
    for block in blocks(page, "console"):
        lines = block.text.splitlines()
        printed = any(not line.startswith(("$ ", "> ")) for line in lines)
        if printed and not _LAUNCHED.match(lines[0].removeprefix("$ ")):
            found.append(block)
    return [block for block in found if block.comment.partition(":")[0] == kind or not kind]


def run_python(page: Path, folder: Path) -> list[str]:
    """Runs a page's programs in `folder`, and returns what each prints on rank 0.

    Raises:
        RanksFailed: one failed; the traceback has the page's lines.
    """
    save_files(page, folder)
    printed = []
    for number, program in enumerate(programs(page)):
        script = folder / f"{page.stem}_{number}.py"
        script.write_text(program.source, encoding="utf-8")
        launcher = "torchrun" if program.ranks else None
        ran = run_on_ranks(
            _run, program.ranks or 1, script, backend=None, launcher=launcher, check=False
        )
        printed.append(ran[0])
    return printed


def _run(script: Path) -> str:
    os.chdir(script.parent)
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said):
        warnings.simplefilter("default")  # as in a program of one's own
        runpy.run_path(str(script), run_name="__main__")
        # What a program's end does, and a forked process does not: the first rank stays until all
        # have read from its store.
        _registry.leave()
    return said.getvalue()


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Each command of a page that is run, and what the page says that it prints."""
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
            command, _, printed = part.partition("\n")
            if _LAUNCHED.match(command):
                yield command, printed.rstrip()


def output(command: str, folder: Path) -> str:
    """What a command prints into a file, errors too, run in `folder`."""
    import commgrid.cli
    import megatron_adapter.__main__ as adapter

    launched = _LAUNCHED.match(command)
    assert launched, command
    main = {"commgrid": commgrid.cli.main, "megatron_adapter": adapter.main}[launched[1]]
    argv = command[launched.end() :].split()
    said = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        contextlib.suppress(SystemExit),
        mock.patch("sys.argv", [launched[1], *argv]),
    ):
        os.environ.pop("COLUMNS", None)  # as wide as it is
        main()
    return said.getvalue().rstrip()


def prints(printed: str, said: str) -> bool:
    """Whether `said` is what `printed` shows, in which a line `…` stands for any lines.

    >>> prints("a\\n…\\nd", "a\\nb\\nc\\nd"), prints("a\\n…", "a"), prints("a", "a\\nb")
    (True, True, False)
    """
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == "…" else re.escape(line) + r"\n"
        for line in printed.splitlines()
    )
    return re.fullmatch(pattern, said + "\n") is not None


_SHELL = """
commgrid() {{ {python} -m commgrid "$@"; }}
torchrun() {{ {python} -m torch.distributed.run "$@"; }}
python() {{ {python} "$@"; }}
pytest() {{ PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {python} -m pytest -p commgrid.testing.plugin "$@"; }}
"""
"""What a page's commands are in a checkout that is not installed."""


def run_in_shell(page: Path, block: Block, folder: Path) -> tuple[str, str, str]:
    """Run the commands of a block, or of the one above it: output, errors, and the page's text."""
    if block.language == "console":
        commands = "\n".join(re.findall(r"^[$>] (.*)$", block.text, re.M))
        shown = "\n".join(re.findall(r"^(?![$>] ).*$", block.text, re.M))
    else:
        commands = [above for above in blocks(page, "bash") if above.line < block.line][-1].text
        shown = block.text
    save_files(page, folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    said, errors = in_shell(commands, folder)
    return said, errors, shown


def in_shell(commands: str, folder: Path) -> tuple[str, str]:
    """Output and errors of commands, run in `folder` with the packages of this checkout."""
    done = subprocess.run(
        ["bash", "-c", _SHELL.format(python=sys.executable) + commands],
        cwd=folder, capture_output=True, text=True, timeout=600, errors="replace",
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"},
    )  # fmt: skip
    return done.stdout, done.stderr


def normal(text: str) -> str:
    """Output without what differs in every run: times, rates, and runs of spaces.

    >>> normal("step  1  loss 5.5628  3,492 tokens/s  11 s left, in 128 ms")
    'step 1 loss 5.5628 N tokens/s N s left, in N ms'
    """
    text = re.sub(r"\b\d[\d,.]*(?= ?(?:s|ms|tokens/s)\b)", "N", text)
    return re.sub(r" +", " ", text).strip()


@cache
def sections(page: Path) -> dict[str, str]:
    """The text under each heading of a page, up to the next one."""
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(r"^##+ (.+?)\n(.*?)(?=^##|\Z)", text, re.M | re.S))


def entries(page: Path, pattern: str, section: str | None = None) -> list[str]:
    """What a pattern finds on a page, or in one of its sections; `^` and `$` are of a line."""
    text = page.read_text(encoding="utf-8") if section is None else sections(page)[section]
    return re.findall(pattern, text, re.M)


def anchor(heading: str) -> str:
    """What a heading is linked to as: what GitHub makes of it, and the site is set to make.

    >>> anchor("The `tp` axis: what it *is*, and isn't")
    'the-tp-axis-what-it-is-and-isnt'
    """
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"(?<!\w)[*_]+|[*_]+(?!\w)|`", "", plain).strip())
    return kept.lower().replace(" ", "-")


def anchors(page: Path) -> list[str]:
    """All that can be linked to on a page."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [anchor(found) for found in re.findall(r"^#+ (.+)$", text, re.M)]


def links(page: Path) -> list[str]:
    """The targets of a page's links that stay in the repository."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    text = re.sub(r"`[^`\n]*`", "", text)
    return [
        target
        for target in re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", text)
        if not re.match(r"[a-z]+:", target)
    ]
