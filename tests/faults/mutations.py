"""Command lines and YAML files as nobody would write them: real ones, with something else in them.

Seeded, so that a case that was found can be made again by its number.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from typing import Any

import yaml

from commgrid.cost_model.cluster import CLUSTERS
from commgrid.cost_model.model import MODELS
from commgrid.planning.presets import PRESETS

ROOT = Path(__file__).parents[2]
STRANGE: list[Any] = [
    0, 1, 2, 3, 7, -1, -2, 64, 1024, 10**6, 2**31, 2**63, 10**30, -(10**30), 10**400, 0.5, 1e308,
    float("nan"), float("inf"), True, False, None, "", " ", "\n", "0", "-1", "1e9", "0x10", "1_000",
    "tp", "dp-tp", "tp-tp", "tp-cp-ep-dp-pp", "tp_dp", "all", "none", "axes", "région", "集", "🏖️",
    "a" * 5000, "-".join("abcdefgh"), "0-3,6", "0-99999999999", "0-14/2", "5-1", "0-3/0", ",", "-",
    "~", "!!python/object:os.system", "node", "cluster", [], {}, [[]], [0, 0], list(range(8)),
    [-1], ["tp", "dp"], {"tp": 2}, {"tp": {"tp": 2}}, {"of": "pp", "pick": ["first", "last"]},
    {"ranks": [[0, 1], [2, 3]]}, {"ranks": [[0, "x"]]}, {"start": 0, "stop": 10**12, "step": 1},
    [None], {"a" * 300: 1}, {"": 1}, {1: 2}, {None: None}, b"bytes", "2026-11-23", "12:30:45",
    list(range(3000)), {f"axis{n}": 2 for n in range(40)}, {f"axis{n}": 1 for n in range(14)},
]  # fmt: skip
WEIGHTS = {"plan": 6, "explain": 5, "diff": 4, "show": 4, "check": 2}
TEXTS = [
    "*a", "&a [*a]", "&a {x: *a}", "[" * 3000, "{a: " * 500, "- " * 2000, "!!binary x", "!!set {a}",
    "!!timestamp 2026-99-99", "? [a]\n: b", "<<: *b", "---\n---\n", "%YAML 9.9\n---\n", "\x00",
    "\ufeff", "\x85", "'", '"', "|", ">", "@", "`", "key: value: other", "\\ud800", "1" * 6000,
    "9" * 5000, "0b" + "1" * 4000, "1:" * 500 + "1", "0x" + "f" * 2000,
    "{" + ", ".join(f"k{n}: {n}" for n in range(3000)) + "}",
    "x: &x [a,a,a,a,a,a,a,a]\ny: &y [*x,*x,*x,*x,*x,*x,*x,*x]\nz: &z [*y,*y,*y,*y,*y,*y,*y,*y]\n"
    "w: &w [*z,*z,*z,*z,*z,*z,*z,*z]\nv: &v [*w,*w,*w,*w,*w,*w,*w,*w]\nu: &u [*v,*v,*v,*v,*v,*v]\n"
    "t: [*u,*u,*u,*u,*u,*u,*u,*u,*u]\n",
]  # fmt: skip


def files() -> list[str]:
    """The text of every YAML there is: of docs, presets, examples, clusters and tests."""
    found = [path.read_text() for path in ROOT.glob("examples/**/*.yaml")]
    for page in sorted((ROOT / "docs").glob("*.md")):
        found += re.findall(r"```ya?ml[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)
    found += [yaml.safe_dump(_plain(preset)) for preset in PRESETS.values()]
    found += [yaml.safe_dump(_plain(model)) for model in MODELS.values()]
    found += [yaml.safe_dump(_plain(cluster)) for cluster in CLUSTERS.values()]
    return found


def _plain(value: Any) -> Any:
    """What of a preset or a cluster YAML can hold."""
    for name in ("to_dict", "as_dict"):
        if hasattr(value, name):
            return getattr(value, name)()
    return {"axes": {"tp": 2, "dp": -1}}


class Mutator:
    """Makes cases.

    Args:
        parsers: of the commands, by name.
        folder: where files may be written.
        seed: of everything.
    """

    def __init__(
        self, parsers: dict[str, argparse.ArgumentParser], folder: Path, seed: int
    ) -> None:
        self._parsers, self._folder = parsers, folder
        self._random = random.Random(seed)
        self._files = files()
        self._commands = sorted(parsers)

    def case(self) -> list[str]:
        """A command line; the files that it names are written."""
        pick = self._random
        weights = [WEIGHTS.get(command, 1) for command in self._commands]
        (command,) = pick.choices(self._commands, weights)
        args = [command]
        actions = [a for a in self._parsers[command]._actions if a.dest != "help"]
        flags = [a for a in actions if a.option_strings]
        for action in actions:
            if not action.option_strings and (action.required or pick.random() < 0.6):
                args.append(self._positional())
            elif action.required and pick.random() < 0.9:
                args += [action.option_strings[0], pick.choice(["0", "3", "5", "99", "x"])]
        if "world_size" in {a.dest for a in actions} and pick.random() < 0.8:
            args += ["--world-size", pick.choice(["8", "16", "64", "1024"])]
        if "model" in {a.dest for a in actions} and pick.random() < 0.3:
            args += ["--model", self._positional(), "--cluster", self._positional()]
        for action in pick.sample(flags, min(len(flags), pick.choice([0, 0, 1, 1, 2, 4]))):
            args += self._flag(action)
        if pick.random() < 0.03:
            pick.shuffle(args)
        return [each.replace("\x00", "") for each in args]

    def _flag(self, action: argparse.Action) -> list[str]:
        name = self._random.choice(action.option_strings)
        if action.nargs == 0:
            return [name]
        return [name, self._value(action.dest)]

    def _value(self, dest: str) -> str:
        pick = self._random
        if dest in ("output", "path", "out"):  # pictures are drawn elsewhere, and take seconds
            return str(self._folder / pick.choice(["a.txt", "no/such/a.html", "a.html"]))
        if dest in ("yaml", "before", "after", "model", "cluster") and pick.random() < 0.7:
            return self._positional()
        if dest == "changes":
            key = pick.choice(
                ["axes.tp", "order", "create", "axes", "groups.x", "a.b.c", "", "ranks"]
            )
            return f"{key}={self._text(pick.choice(STRANGE))}"
        if dest in ("within", "axis"):
            return f"{pick.choice(['tp', 'dp', 'x', ''])}={self._text(pick.choice(STRANGE))}"
        if pick.random() < 0.5:
            return str(pick.choice([1, 2, 4, 8, 64, "tp", "dp", "1f1b", "all", *CLUSTERS, *MODELS]))
        return self._text(pick.choice(STRANGE))

    def _text(self, value: Any) -> str:
        return value if isinstance(value, str) else str(value)

    def _positional(self) -> str:
        pick = self._random
        if pick.random() < 0.25:
            names = [*PRESETS, *CLUSTERS, *MODELS]
            return pick.choice([*names, "no such", "", "/", str(self._folder)])
        path = self._folder / f"{pick.randrange(20)}.yaml"
        path.write_bytes(self.yaml().encode("utf-8", "surrogatepass"))
        return str(path)

    def yaml(self) -> str:
        """A file's text."""
        pick = self._random
        text = pick.choice(self._files)
        for _ in range(pick.choice([0, 1, 1, 2, 4])):
            text = self._changed(text) if pick.random() < 0.6 else self._edited(text)
        return text

    def _changed(self, text: str) -> str:
        """One value of the tree is another, or a key is new, gone or elsewhere."""
        pick = self._random
        try:
            tree = yaml.safe_load(text)
        except Exception:  # PyYAML's own ways to say that it is none
            return self._edited(text)
        places: list[tuple[Any, Any]] = []

        def walk(node: Any, depth: int = 0) -> None:
            if depth > 20 or len(places) > 200:
                return
            for key in list(node) if isinstance(node, dict) else range(len(node)):
                places.append((node, key))
                if isinstance(node[key], dict | list):
                    walk(node[key], depth + 1)

        if isinstance(tree, dict | list):
            walk(tree)
        if not places:
            return self._text(pick.choice(STRANGE))
        node, key = pick.choice(places)
        way = pick.random()
        if way < 0.6:
            node[key] = pick.choice(STRANGE)
        elif way < 0.75:
            del node[key]
        elif isinstance(node, dict):
            keys = ["tp", "axes", "groups", "order", "x", 5, None, "create"]
            node[pick.choice(keys)] = pick.choice(STRANGE)
        else:
            node.append(pick.choice(STRANGE))
        try:
            return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
        except (yaml.YAMLError, RecursionError):
            return text

    def _edited(self, text: str) -> str:
        """A piece of text is inserted, or lost, or there twice."""
        pick = self._random
        at = pick.randrange(len(text) + 1)
        until = min(len(text), at + pick.randrange(1, 20))
        way = pick.random()
        if way < 0.5:
            piece = pick.choice(
                [*TEXTS, self._text(pick.choice(STRANGE)), chr(pick.randrange(1, 0x2FFF))]
            )
            return text[:at] + piece + text[at:]
        return text[:at] + text[until:] if way < 0.8 else text[:until] + text[at:]
