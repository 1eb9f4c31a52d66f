"""matplotlib as all pictures use it: found or asked for, quiet, and the same file every time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from commgrid.errors import CommGridError, SpecError, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")

# Okabe and Ito's colours, which colour-blind readers tell apart, and lighter ones between them.
COLOURS = (
    "#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#0072B2",
    "#A6DBF7", "#F7CF80", "#80CFB9", "#EBC2D9", "#D55E00", "#80B9D9",
)  # fmt: skip
INK, PAPER, FAINT, ALERT = "#1b1f24", "#ffffff", "#d6dbe1", "#b3261e"


def colour(number: int) -> str:
    """A group's colour; groups that stand side by side differ."""
    return COLOURS[number % len(COLOURS)]


def ink_on(background: str) -> str:
    """The more readable text colour on a background, dark or light."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else PAPER


@contextmanager
def drawing() -> Iterator[None]:
    """Within it, matplotlib draws without a screen, and equal pictures are equal files.

    Raises:
        CommGridError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise CommGridError(
            "pictures need matplotlib: pip install matplotlib (an .html page does not)"
        ) from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a picture does not depend on who draws it
        matplotlib.rc("svg", hashsalt="commgrid", fonttype="none")  # text stays text
        matplotlib.rc("font", family="sans-serif", size=9.0)
        matplotlib.rc("text", color=INK)
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that no window shows; a notebook does, with pyplot or without."""
    return _picture()(figsize=(width, height), facecolor=PAPER, layout="constrained")


@cache
def _picture() -> type[Figure]:
    """matplotlib's figure, which by itself only shows where pyplot has been imported."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_svg_(self) -> str:
            text = StringIO()
            with drawing():
                self.savefig(text, format="svg", metadata={"Date": None})
            return text.getvalue()

    return Picture


def check_suffix(path: Path, suffixes: Sequence[str] = (*SUFFIXES, ".html")) -> None:
    """Refuses a file that would be neither a picture nor a page, before anything is computed.

    Raises:
        SpecError: a suffix that is none of `suffixes`.
    """
    if path.suffix not in suffixes:
        raise SpecError(f"-o {path}: expected a file that ends in {', '.join(suffixes)}")


def save(figure: Figure, path: Path) -> None:
    """Writes a figure; the suffix says as what.

    Raises:
        SpecError: another suffix, or a folder that cannot be written to.
    """
    check_suffix(path, SUFFIXES)
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with writing(f"-o {path}"):
        figure.savefig(path, dpi=150, metadata=dates.get(path.suffix))


def write_text(path: Path, text: str) -> None:
    """Writes a page, a grid or a trace.

    Raises:
        SpecError: a folder that cannot be written to.
    """
    with writing(f"-o {path}"):
        path.write_text(text, encoding="utf-8")
