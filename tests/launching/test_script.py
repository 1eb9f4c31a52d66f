"""A script as `python script` would run it."""

from __future__ import annotations

import json
import multiprocessing
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
