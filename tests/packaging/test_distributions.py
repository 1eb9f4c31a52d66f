"""What is published: an sdist whose tests run, and a wheel that works in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from importlib.util import find_spec
from pathlib import Path

import pytest

import commgrid

build_util = pytest.importorskip(
    "build.util", reason="build is not installed: pip install --group checks"
)
pytestmark = pytest.mark.nightly  # and a job of its own in .ci/run

ROOT = Path(__file__).parents[2]
MADE = shutil.ignore_patterns(
    ".git", "__pycache__", "*.egg-info", "build", "dist", "runs", "site", ".venv*", ".*_cache",
    ".versions", ".hypothesis", "PKG-INFO", "setup.cfg",
)  # fmt: skip
APPENDED = """
![a drawing](docs/drawing.svg)
<picture><source srcset="docs/dark.svg"><img src="docs/light.svg"></picture>
[![badge](docs/badge.svg)](docs/badge.md)
[a page](docs/page.md#part), [below](#here), [torch](https://pytorch.org)
![shown](https://example.org/shown.svg)

```python
table[0](row)
```
"""
SHOWN = """
{page}, [below](#here), [torch](https://pytorch.org)
![shown](https://example.org/shown.svg)

```python
table[0](row)
```
"""
SOURCE = "https://example.org/commgrid"


@dataclass(frozen=True)
class Built:
    """Args: source, sdist: folders; wheel: the file; bare: long description without URLs."""

    source: Path
    sdist: Path
    wheel: Path
    bare: str

    @property
    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as file:
            name = next(n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
            return message_from_bytes(file.read(name))


def run(*command: str | Path, cwd: Path, **environ: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=280,
        env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=MADE)
    with (source / "README.md").open("a", encoding="utf-8") as readme:
        readme.write(APPENDED)
    bare = build_util.project_wheel_metadata(source, isolated=False)["Description"]
    with (source / "pyproject.toml").open("a", encoding="utf-8") as project:
        project.write(f'\n[project.urls]\nsource = "{SOURCE}"\n')
    run(sys.executable, "-m", "build", "--no-isolation", "-o", folder / "out", ".", cwd=source)
    wheel, packed = next((folder / "out").glob("*.whl")), next((folder / "out").glob("*.tar.gz"))
    with tarfile.open(packed) as file:
        file.extractall(folder, filter="data")
    return Built(source, folder / packed.name.removesuffix(".tar.gz"), wheel, bare)


def files(folder: Path, *below: str) -> set[str]:
    """Every file, but what building leaves behind."""
    return {
        path.relative_to(folder).as_posix()
        for root in below
        for path in ([folder / root] if (folder / root).is_file() else (folder / root).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_sdist_holds_what_the_repository_has(built: Built) -> None:
    rooms = ["commgrid", "megatron_adapter", "tests", "examples", "docs", ".ci"]
    tops = [path.name for path in built.source.iterdir() if path.is_file()]
    assert {"README.md", "CHANGELOG.md", "LICENSE", "setup.py", "pyproject.toml"} <= set(tops)
    assert {"SECURITY.md", "MANIFEST.in", "mkdocs.yml"} <= set(tops)
    expected = files(built.source, *rooms, *tops)
    tested = (
        "published", "draw", "report", "benchmark_picture", "curves_picture", "race", "transfer",
        "transfer_model", "transfer_programs", "json_file",
    )  # fmt: skip
    benchmarks = files(built.source, "tests/benchmarks") - {
        f"tests/benchmarks/{name}.py" for name in tested
    }
    assert expected - files(built.sdist, *rooms, *tops) == benchmarks
    assert ".ci/constraints.txt" in expected


def test_the_wheel_holds_the_packages_alone(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as file:
        held = {name for name in file.namelist() if ".dist-info/" not in name}
    assert held == files(built.source, "commgrid", "megatron_adapter")
    assert {
        "commgrid/viz/page.html",
        "commgrid/viz/trace.html",
        "commgrid/py.typed",
        "megatron_adapter/py.typed",
    } <= held


def test_the_metadata_says_what_it_is(built: Built) -> None:
    said = built.metadata
    assert (said["Name"], said["Version"]) == ("commgrid", commgrid.__version__)
    assert said["Author"] == "The commgrid authors"
    assert (said["License-Expression"], said["License-File"]) == ("Apache-2.0", "LICENSE")
    assert "Typing :: Typed" in said.get_all("Classifier", [])
    assert "tensor parallelism" in said["Keywords"]
    needed = said.get_all("Requires-Dist", [])
    assert sorted(re.split(r"[<>=]", each)[0] for each in needed) == ["pyyaml", "torch"]
    assert said["Provides-Extra"] is None
    assert said["Project-URL"] == f"source, {SOURCE}"


def test_an_index_shows_absolute_links_alone(built: Built) -> None:
    payload = built.metadata.get_payload(decode=True)
    assert isinstance(payload, bytes)
    text = payload.decode()
    page = f"[a page]({SOURCE}/blob/HEAD/docs/page.md#part)"
    assert text.rstrip().endswith(SHOWN.format(page=page).strip())
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)]*)\)", prose) + re.findall(r'(?:src|srcset)="([^"]*)"', prose)
    assert [each for each in targets if not each.startswith(("http", "#"))] == []
    assert (ROOT / "README.md").read_text().splitlines()[0] == text.lstrip().splitlines()[0]


def test_without_a_url_of_the_source_a_link_is_its_path(built: Built) -> None:
    assert built.bare.rstrip().endswith(SHOWN.format(page="a page (`docs/page.md`)").strip())


def test_the_wheel_works_in_an_empty_folder(built: Built, tmp_path: Path) -> None:
    """With PyYAML alone: no torch, no matplotlib, and nothing of the repository."""
    home, empty = tmp_path / "venv", tmp_path / "empty"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    run(*pip, built.wheel, cwd=empty)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))",
                    cwd=empty).strip())  # fmt: skip
    yaml = find_spec("yaml")
    assert yaml is not None
    assert yaml.origin is not None
    (site / "yaml").symlink_to(Path(yaml.origin).parent)
    command = home / "bin" / "commgrid"
    assert run(command, "--version", cwd=empty).startswith(f"commgrid {commgrid.__version__} (no t")
    grid = ["--tp", "2", "--pp", "2", "--world-size", "8"]
    assert run(command, "plan", *grid, cwd=empty).startswith("8 ranks\n  dense   tp 2 · ")
    assert run(command, "show", *grid, cwd=empty).startswith("8 ranks on 1 node\n")
    run(command, "show", *grid, "-o", "grid.html", cwd=empty)
    assert [path.name for path in empty.iterdir()] == ["grid.html"]
    (empty / "grid.yaml").write_text("axes: {tp: 2}")
    assert "[5]" in run(python, "-m", "commgrid", "explain", "grid.yaml", "--world-size", "8",
                        "--rank", "5", cwd=empty)  # fmt: skip


def test_tests_run_from_the_sdist(built: Built) -> None:
    some = ["tests/test_layering.py", "tests/layout/test_rank_layout.py", "tests/viz/test_view.py"]
    some += ["tests/cli/test_json.py", "commgrid/planning"]
    told = run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some,
        cwd=built.sdist, PYTHONDONTWRITEBYTECODE="1",
    )  # fmt: skip
    assert " failed" not in told
    where = run(sys.executable, "-c", "import commgrid; print(commgrid.__file__)", cwd=built.sdist)
    assert Path(where.strip()).is_relative_to(built.sdist)
