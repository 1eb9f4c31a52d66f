"""Habits of command lines: pipes, exit codes, and what they load."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import commgrid
from commgrid.cli import main
from commgrid.cli.grid_options import RARE
from commgrid.cli.output import guarded
from commgrid.cli.parser import COMMANDS, parsers

ROOT = Path(__file__).parents[2]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2
    return capsys.readouterr().err


def test_the_version_is_told_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"commgrid {commgrid.__version__} (torch ")


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """It said that COMMAND is required, and not what that may be."""
    assert main([]) == 2
    said = capsys.readouterr().err
    assert "plan      groups, sizes" in said
    assert "audit" in said


def test_what_was_meant_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'plna' (choose from" in (said := refused(capsys, "plna"))
    assert said.endswith("; did you mean 'plan'?\n")
    said = refused(capsys, "plan", "--tp", "2", "--wrld-size", "8")
    assert said.endswith("unrecognized arguments: --wrld-size; did you mean '--world-size'?\n")
    said = refused(capsys, "show", "--schedul=1f1b", "--outptu", "a.svg")
    assert "--outptu; did you mean '--output'?" in said


def bare(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m commgrid plan --tp 8 --world-size 4096 --json | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=ROOT, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # 0 where all was written before the pipe closed


def test_sigterm_ends_what_a_command_has_started() -> None:
    """As an exception does, through every `finally`, where Python by itself would just be gone."""
    ended = []

    def run() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # until the signal ends it
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # once is enough
            ended.append("all")
        return 0

    with pytest.raises(SystemExit) as exit:
        guarded(run)
    assert (exit.value.code, ended) == (143, ["all"])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_without_torch_what_needs_it_says_so() -> None:
    done = bare(
        "import sys; sys.modules['torch'] = None\n"
        "from commgrid.cli import main\n"
        "assert main(['plan', '--tp', '2', '--world-size', '4']) == 0\n"
        "sys.exit(main(['check', '--tp', '1']))"
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("commgrid check: needs torch, which is not installed here")
    assert done.stderr.count("\n") == 1


def test_without_matplotlib_a_picture_says_what_to_install(tmp_path: Path) -> None:
    flags = f"['show', '--tp', '2', '--world-size', '4', '-o', {str(tmp_path / 'grid')!r} + "
    done = bare(
        "import sys; sys.modules['matplotlib'] = None\n"
        "from commgrid.cli import main\n"
        f"assert main({flags}'.html']) == 0\n"
        f"sys.exit(main({flags}'.svg']))"
    )
    assert done.returncode == 2
    assert "pip install matplotlib" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["grid.html"]


def test_an_import_changes_no_filter_of_warnings() -> None:
    """Even without NumPy: torch warns of it at import, and the program decides what to do."""
    done = bare(
        "import sys; sys.modules['numpy'] = None\n"
        "import warnings\n"
        "before = list(warnings.filters)\n"
        "import commgrid, commgrid.cli\n"
        "assert warnings.filters == before\n"
        "import torch\n"
        "after = list(warnings.filters)\n"
        "print(commgrid.initialize())\n"
        "commgrid.shutdown()\n"
        "assert warnings.filters == after"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("HyperCommGrid('default', tp=1 ")
    assert done.stderr.count("Warning: ") == 1
    assert "UserWarning: Failed to initialize NumPy" in done.stderr


def test_shells_complete_commands_and_flags() -> None:
    pytest.importorskip("argcomplete", reason="argcomplete is not installed, which is optional")
    answers = []
    for line in ("commgrid pl", "commgrid plan --worl", "commgrid show --sched"):
        asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)),
                 "_ARGCOMPLETE_IFS": " ", "_ARGCOMPLETE_SHELL": "bash"}  # fmt: skip
        script = f"exec 8>&1; exec {sys.executable} -m commgrid"
        done = subprocess.run(
            ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300,
            env={**os.environ, **asked},
        )  # fmt: skip
        answers.append(done.stdout.split())
    assert answers == [["plan"], ["--world-size"], ["--schedule"]]


def test_without_argcomplete_nothing_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["plan", "--tp", "2", "--world-size", "4"]) == 0


def test_who_forgot_the_launcher_is_told() -> None:
    done = bare("from commgrid.cli import main; import sys; sys.exit(main(['check', '--tp', '2']))")
    assert done.returncode == 2
    assert "no launcher has started this process" in done.stderr
    assert "torchrun --nproc-per-node" in done.stderr


def test_dir_shows_what_is_public() -> None:
    done = bare("import commgrid; print(*dir(commgrid))")
    assert done.stdout.split() == sorted([*commgrid.__all__, "__version__"])
    assert "Any" not in done.stdout.split()


def test_look_ups_stand_beside_get_group() -> None:
    commgrid.initialize(name="habits")
    try:
        assert commgrid.get_ranks("tp", grid="habits") == (0,)
        assert commgrid.get_local_rank("dp_cp", grid="habits") == 0
        assert commgrid.size("tp", "dp", grid="habits") == 1
        with pytest.raises(commgrid.UnknownGroupError, match="did you mean 'tp'"):
            commgrid.size("tpp", grid="habits")
    finally:
        commgrid.shutdown()


def status(argv: list[str]) -> int | str | None:
    """How a command ends, by returning or as argparse does."""
    try:
        return main(argv)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("plna", "commgrid: argument COMMAND: invalid choice: 'plna' "),
        ("plan --tpp 2", "commgrid plan: unrecognized arguments: --tpp; did you mean '--tp'?"),
        ("check grid.yaml --timeout", "commgrid check: --timeout expected one argument"),
        ("plan --tp", "commgrid plan: --tp expected one argument"),
    ],
)
def test_an_error_is_one_line(argv: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse printed its usage before it."""
    assert status(argv.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert error.count("\n") == 1


LOADED = """
import sys
from commgrid.cli import main
assert main(sys.argv[1:]) == 0
print(*sys.modules)
"""


@pytest.mark.parametrize(
    ("argv", "without"),
    [
        (
            "plan --tp 8 --world-size 64",
            "commgrid.cost_model.cluster commgrid.cost_model.step yaml",
        ),
        ("plan --tp 8 --world-size 64 --cluster h100", "commgrid.cost_model.step"),
        ("explain --tp 8 --world-size 64 --rank 3", "commgrid.cost_model.step yaml"),
        ("presets", "commgrid.cost_model.cluster"),
    ],
)
def test_a_command_loads_what_it_uses(argv: str, without: str) -> None:
    """Files that a command loads are most of the time it takes."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *argv.split()], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"torch", *without.split()}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_flag_is_abbreviated(command: str) -> None:
    _, found = parsers([command])
    assert not found[command].allow_abbrev


def test_a_flag_of_another_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan --rank 3` planned a grid of one rank, whose number is 3."""
    assert "--rank; did you mean '--ranks'?" in refused(capsys, "plan", "--tp", "1", "--rank", "3")


def test_few_flags_are_on_the_first_page(capsys: pytest.CaptureFixture[str]) -> None:
    for page, shown in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as ended:
            main(["plan", page])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert {f"  --{flag} " in text for flag in RARE} == {shown}
    sizes = re.findall(r"^  --(\w+) N ", text, re.M)
    assert sizes[:6] == ["tp", "pp", "dp", "cp", "ep", "etp"]


def test_a_key_is_set_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--tp", "2", "--world-size", "8"]
    for change, flags in (("axes.pp=2", ["--pp", "2"]), ("share=region", ["--share", "region"])):
        assert main([*argv, "--set", change]) == 0
        said = capsys.readouterr().out
        assert main([*argv, *flags]) == 0
        assert capsys.readouterr().out == said
