"""A script as `python script` would run it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commgrid.launching.script import run_script
from commgrid.testing import run_on_ranks

SCRIPT = """
import beside, json, multiprocessing, sys
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")  # an error where one is set already
    process = multiprocessing.Process(target=beside.ends, args=(4,))
    process.start()
    process.join()
    open(sys.argv[1], "w").write(json.dumps([__file__, sys.argv, process.exitcode]))
    sys.exit(int(sys.argv[2]))
"""


def run(script: Path, out: Path, code: str) -> None:
    multiprocessing.set_start_method("fork", force=True)
    run_script(script, [str(out), code])


@pytest.mark.parametrize("code", ["0", "3"])
def test_a_script_has_its_arguments_its_folder_and_its_exit_code(code: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import sys\ndef ends(x): sys.exit(2 * x)")
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    if code == "0":
        run_on_ranks(run, 1, script, out, code, backend=None, check=False)
    else:
        with pytest.raises(AssertionError, match=r"rank 0 \(exit code 3\)"):
            run_on_ranks(run, 1, script, out, code, backend=None, check=False)
    assert json.loads(out.read_text()) == [str(script), [str(script), str(out), code], 8]


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_safe_path_keeps_its_first_entry(safe: str, tmp_path: Path) -> None:
    """With PYTHONSAFEPATH=1 Python adds no script's folder, and the first entry is PYTHONPATH's."""
    script, library = tmp_path / "script.py", tmp_path / "library"
    script.write_text("import sys; print(sys.path[0])")
    library.mkdir()
    path = os.pathsep.join([str(library), *filter(None, [os.environ.get("PYTHONPATH")]), *sys.path])
    environ = {**os.environ, "PYTHONSAFEPATH": safe, "PYTHONPATH": path}
    ours = (
        "from pathlib import Path; from commgrid.launching.script import run_script; "
        f"run_script(Path({str(script)!r}), [])"
    )
    printed = [
        subprocess.run(
            [sys.executable, *how], env=environ, capture_output=True, text=True, check=True
        )
        for how in (["-c", ours], [str(script)])
    ]
    assert printed[0].stdout == printed[1].stdout
