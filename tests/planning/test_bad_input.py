"""Everything a user can type wrong is one clear error, before any communicator exists.

Errors that need a live grid are in test_grid.py.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from commgrid import GridSpec, GroupPlan, NotInGridError, SpecError

build = GridSpec.build


def table(**rows: Any) -> GridSpec:
    return build(tp=2, cp=4, pp=4, groups=rows).resolve(32)


def dictionary(**keys: Any) -> GridSpec:
    return GridSpec.from_dict({"axes": {"tp": 2, "dp": -1}, **keys})


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "size 0": (lambda: build(tp=0), r"tp=0: expected a positive integer, or -1"),
    "size -2": (lambda: build(pp=-2), r"pp=-2: expected a positive integer"),
    "size True": (lambda: build(tp=True), r"tp=True: expected a positive integer"),
    "size two": (lambda: build(tp="two"), r"tp='two': expected a positive integer"),  # type: ignore[arg-type]
    "size 2.0": (lambda: build(tp=2.0), r"tp=2.0: .*write 2$"),  # type: ignore[arg-type]
    "size '4'": (lambda: build(cp="4"), r"cp='4': .*write 4$"),  # type: ignore[arg-type]
    "ep 0": (lambda: build(ep=0), r"ep=0: expected a positive integer"),
    "ep -1": (lambda: build(ep=-1), r"ep=-1.*edp already fills the expert region"),
    "size in a dict": (lambda: GridSpec.from_dict({"axes": {"tp": 0}}), r"axes\.tp=0: expected"),
    "size in a region": (
        lambda: dictionary(regions={"expert": {"axes": {"ep": "tq"}}}),
        r"regions\.expert\.axes\.ep='tq': .*or one of tp, cp, dp, pp",
    ),
    "two -1": (lambda: build(tp=-1), r"tp=-1 and dp=-1: only one size can be filled"),
    "not dividing": (
        lambda: build(tp=3, pp=2).resolve(16),
        r"tp=3 · cp=1 · pp=2 = 6 does not divide 16 ranks.*16 = 2·6 \+ 4; nearest that fit: "
        r"tp=2, or tp=4, or 12 or 18 ranks",
    ),
    "not the world": (
        lambda: build(tp=2, dp=3).resolve(16),
        r"tp=2 · cp=1 · dp=3 · pp=1 = 6 is not the 16 ranks there are.*dp=8",
    ),
    "inherited": (
        lambda: build(tp=4, ep=3).resolve(16),
        r"region expert: etp=4 \(inherited from tp\) · ep=3 .* = 12 does not divide.*ep=2, or ep=4",
    ),
    "hsdp parts": (
        lambda: build(dp_shard=3, dp_replicate=2, dp=8),
        r"dp_shard=3 · dp_replicate=2 does not make dp=8",
    ),
    "order missing": (
        lambda: build(tp=2, order="cp-dp-pp"),
        r"axis 'tp' is missing, its size is 2",
    ),
    "order missing ep": (lambda: build(ep=2, order="tp-dp-pp"), r"axis 'ep' is missing"),
    "order doubled": (lambda: build(tp=2, order="tp-tp-dp"), r"axis 'tp' is there twice"),
    "order unknown": (
        lambda: build(order="tp-cp-dq-pp"),
        r"unknown axis 'dq'.*did you mean 'dp'\?",
    ),
    "order no string": (lambda: build(order=["tp"]), r"order=\['tp'\]: expected axes"),  # type: ignore[arg-type]
    "order for new axis": (
        lambda: GridSpec.from_dict({"axes": {"node": 2}}),
        r"order: missing; needed to place axis 'node'",
    ),
    "axis mistyped": (
        lambda: GridSpec.from_dict({"axes": {"tpp": 2}}),
        r"order: missing; needed to place axis 'tpp'; did you mean 'tp'\?",
    ),
    "two meanings": (
        lambda: build(a=2, b=2, a_b=2, order="a-b-a_b-dp"),
        r"'a_b' would mean both a × b and a_b; rename",
    ),
    "axis no name": (lambda: GridSpec.from_dict({"axes": {"t-p": 2}}), r"axes\.t-p: an axis needs"),
    "unknown key": (lambda: dictionary(oder="tp-dp"), r"oder: unknown key.*did you mean 'order'\?"),
    "size at the top": (
        lambda: GridSpec.from_dict({"tp": 2}),
        r"tp: unknown key.*sizes go under axes, as axes: \{tp: 2\}",
    ),
    "no axes": (lambda: GridSpec.from_dict({"order": "tp"}), r"axes: missing"),
    "no mapping": (lambda: GridSpec.from_dict([1]), r"config: expected a mapping, got list"),  # type: ignore[arg-type]
    "region key": (
        lambda: dictionary(regions={"expert": {"axes": {"ep": 2}, "odrer": "ep"}}),
        r"regions\.expert\.odrer: unknown key.*did you mean 'order'\?",
    ),
    "region dense": (
        lambda: dictionary(regions={"dense": {}}),
        r"regions\.dense: .*given by `axes`",
    ),
    "region no mapping": (
        lambda: dictionary(regions={"expert": 2}),
        r"regions\.expert=2: expected",
    ),
    "pp groups differ": (
        lambda: build(tp=2, pp=2, ep=2, etp=1, order="tp-cp-pp-ep-dp").resolve(8),
        r"order: pp groups differ between regions: rank 0 has pp group \(0, 2\) in dense and "
        r"\(0, 1\) in expert; put pp last",
    ),
    "share": (lambda: build(share="al"), r"share='al': expected aliases, region, all; did you "),
    "share none": (
        lambda: build(share="none"),
        r"share='none': this is now called 'aliases', .*; expected aliases, region, all",
    ),
    "share no string": (lambda: dictionary(share=["all"]), r"share=\['all'\]: expected aliases, "),
    "connect": (lambda: build(connect="axis"), r"connect='axis': .*did you mean 'axes'\?"),
    "create name": (lambda: build(create=["dp_cq"]), r"create: no group is named 'dp_cq'; did you"),
    "groups no mapping": (lambda: build(groups=["x"]), r"groups=\['x'\]: expected a mapping"),  # type: ignore[arg-type]
    "group of nothing": (lambda: table(fsdp="dp_qq"), r"groups\.fsdp\.of='dp_qq': no group has"),
    "group options of nothing": (
        lambda: table(dp_cpp={"timeout": 3}),
        r"groups\.dp_cpp: no group has this name; give `of`.*did you mean 'dp_cp'\?",
    ),
    "group loop": (
        lambda: table(a="b", b="a"),
        r"groups\.a\.of='b': these entries are made of each",
    ),
    "group shadows an axis": (lambda: table(tp="dp"), r"groups\.tp: 'tp' already names"),
    "group shadows a combination": (lambda: table(cp_dp="tp"), r"groups\.cp_dp: 'cp_dp' already"),
    "part shadows an axis": (
        lambda: table(lv={"of": "cp", "split": {"tp": 2, "b": 2}}),
        r"groups\.lv: 'tp' already names",
    ),
    "name taken": (
        lambda: table(a="tp", lv={"of": "cp", "split": {"a": 2, "b": 2}}),
        r"groups\.lv: 'a' is taken already",
    ),
    "group key": (
        lambda: table(x={"of": "tp", "onw": True}),
        r"groups\.x\.onw: .*did you mean 'own'\?",
    ),
    "group own": (
        lambda: table(x={"of": "tp", "own": "yes"}),
        r"groups\.x\.own='yes': expected true",
    ),
    "group value": (lambda: table(x=3), r"groups\.x=3: expected the name of a group, or a mapping"),
    "pick without of": (
        lambda: table(tp={"pick": ["first"]}),
        r"groups\.tp: own, pick and split need",
    ),
    "pick outside": (
        lambda: table(e={"of": "pp", "pick": [0, 4]}),
        r"groups\.e\.pick: position 4 is outside 'pp' of size 4 \(positions 0 to 3\)",
    ),
    "pick doubled": (
        lambda: table(e={"of": "pp", "pick": [1, 1]}),
        r"groups\.e\.pick=\[1, 1\]: exp",
    ),
    "pick no list": (lambda: table(e={"of": "pp", "pick": "first"}), r"groups\.e\.pick='first'"),
    "pick of a pick": (
        lambda: table(e={"of": "pp", "pick": [0, 1]}, f={"of": "e", "pick": [0]}),
        r"groups\.f: 'e' is itself a pick",
    ),
    "split does not fit": (
        lambda: table(lv={"of": "cp", "split": {"a": 3, "b": 2}}),
        r"groups\.lv\.split: a=3·b=2 does not make 'cp', which has size 4",
    ),
    "split of size 0": (
        lambda: table(lv={"of": "cp", "split": {"a": 0, "b": 4}}),
        r"groups\.lv\.split\.a=0: expected a positive integer",
    ),
    "pick and split": (
        lambda: table(x={"of": "cp", "pick": [0], "split": {"a": 4}}),
        r"groups\.x: pick and split exclude each other",
    ),
    "timeout": (
        lambda: table(dp={"timeout": -1}),
        r"groups\.dp\.timeout=-1: expected seconds above 0",
    ),
    "backend": (lambda: table(dp={"backend": 3}), r"groups\.dp\.backend=3: expected a string"),
    "nccl key": (
        lambda: table(dp={"nccl": {"max_cta": 3}}),
        r"groups\.dp\.nccl\.max_cta: unknown key.*did you mean 'max_ctas'\?",
    ),
    "nccl value": (
        lambda: table(dp={"nccl": {"max_ctas": "3"}}),
        r"groups\.dp\.nccl\.max_ctas='3': expected int",
    ),
    "ranks repeated": (
        lambda: build(ranks=[5, 2, 0, 2]),
        r"ranks=\[5, 2, 0, 2\]: rank 2 is there twice; name each rank once",
    ),
    "ranks negative": (
        lambda: build(ranks=[3, -2]),
        r"ranks=\[3, -2\]: -2 at place 1 is no rank; expected integers from 0 on",
    ),
    "ranks from below 0": (lambda: build(ranks=range(-2, 2)), r"-2 at place 0 is no rank"),
    "ranks True": (lambda: build(ranks=[0, True]), r"True at place 1 is no rank"),
    "ranks of floats": (lambda: build(ranks=[0, 1.0]), r"1\.0 at place 1 is no rank"),  # type: ignore[list-item]
    "ranks without order": (
        lambda: build(ranks={0, 1, 3}),  # type: ignore[arg-type]
        r"ranks=\{0, 1, 3\}: expected a list of distinct ranks, whose order counts",
    ),
    "ranks a number": (lambda: build(ranks=3), r"ranks=3: expected a list of distinct ranks"),  # type: ignore[arg-type]
    "ranks long": (lambda: build(ranks=[*range(500), 7]), r"…: rank 7 is there twice"),
    "ranks empty": (lambda: build(ranks=[]), r"ranks=\[\]: expected at least one rank; leave"),
    "ranks empty range": (lambda: build(ranks=range(3, 3)), r"ranks=range\(3, 3\): expected at"),
    "ranks as falling text": (
        lambda: build(ranks="0-3,7-5"),
        r"ranks='0-3,7-5': '7-5' is neither a rank nor a rising range; expected such as 0,1,2,4",
    ),
    "ranks as text without step": (lambda: build(ranks="0-6/0"), r"'0-6/0' is neither"),
    "ranks as no text": (lambda: build(ranks="first"), r"ranks='first': 'first' is neither"),
    "ranks in steps of 0": (lambda: dictionary(ranks={"stop": 4, "step": 0}), r"expected integers"),
    "ranks beyond the world": (
        lambda: build(ranks=[0, 9, 2, 1]).resolve(8),
        r"ranks=0, 9, 2, 1: the world has only ranks 0-7",
    ),
    "listed ranks do not match": (
        lambda: GridSpec.from_dict({"axes": {"tp": 2, "dp": 2}, "ranks": [5, 2, 0]}),
        r"ranks=5, 2, 0: 3 ranks, but the sizes make 4",
    ),
    "size of a float with an index": (
        lambda: build(tp=torch.tensor(2.0)),
        r"tp=.*: expected a positive",
    ),
    "size torch True": (lambda: build(tp=torch.tensor(True)), r"tp=.*: expected a positive"),  # type: ignore[arg-type]
    "listed group and own": (
        lambda: table(x={"ranks": [[0, 1]], "own": True}),
        r"groups\.x: own beside ranks, which says all members .*; leave own out",
    ),
    "listed group of another": (
        lambda: table(x={"ranks": [[0, 1]], "of": "tp", "pick": [0]}),
        r"groups\.x: of and pick beside ranks",
    ),
    "listed group and split": (
        lambda: table(x={"ranks": [[0, 1]], "split": {"a": 2}}),
        r"groups\.x: split beside ranks",
    ),
    "one flat list": (
        lambda: table(x={"ranks": [0, 1]}),
        r"groups\.x\.ranks=\[0, 1\]: expected a list for each group; write \[\[0, 1\]\] for one",
    ),
    "listed group empty": (
        lambda: table(x={"ranks": []}),
        r"groups\.x\.ranks=\[\]: expected a list",
    ),
    "empty list of a group": (
        lambda: table(x={"ranks": [[0], []]}),
        r"groups\.x\.ranks\[1\]=\[\]: expected at least one rank",
    ),
    "rank twice in a list": (
        lambda: table(x={"ranks": [[0, 3, 0]]}),
        r"groups\.x\.ranks\[0\]=\[0, 3, 0\]: rank 0 is there twice",
    ),
    "rank in two lists": (
        lambda: table(x={"ranks": [[0, 1], [2, 1]]}),
        r"groups\.x\.ranks: rank 1 is in lists 0 and 1; .*write two rows",
    ),
    "listed rank outside": (
        lambda: table(x={"ranks": [[0, 32], [40]]}),
        r"groups\.x\.ranks: ranks 32, 40 outside this grid, which covers ranks 0-31",
    ),
    "listed group shadows an axis": (
        lambda: table(cp_dp={"ranks": [[0, 1]]}),
        r"groups\.cp_dp: 'cp_dp' already names",
    ),
    "pick outside a list": (
        lambda: table(x={"ranks": [[0, 1, 2], [3, 4]]}, y={"of": "x", "pick": [2]}),
        r"groups\.y\.pick: position 2 is outside 'x' of size 2 .*; that is its smallest list",
    ),
    "split of lists": (
        lambda: table(x={"ranks": [[0, 1]]}, y={"of": "x", "split": {"a": 2}}),
        r"groups\.y: 'x' has listed ranks; split a combination of axes",
    ),
    "ranks in YAML": (
        lambda: dictionary(ranks={"from": 4}),
        r"ranks=\{'from': 4\}: expected integers",
    ),
    "ranks no numbers": (lambda: build(ranks=[0, 1, "a"]), r"ranks=\[0, 1, 'a'\]: 'a' at place 2"),  # type: ignore[list-item]
    "ranks do not match": (
        lambda: GridSpec.from_dict({"axes": {"tp": 2, "dp": 2}, "ranks": {"stop": 8}}),
        r"ranks=0-7: 8 ranks, but the sizes make 4",
    ),
    "create nothing": (lambda: build(create=None), r"create=None: expected all, or a list"),  # type: ignore[arg-type]
    "create number": (lambda: dictionary(create=5), r"create=5: expected all, or a list"),
    "connect what is not created": (
        lambda: build(create=["tp"], connect=["dp"]),
        r"connect: group 'dp' is not created",
    ),
    "timeout without end": (
        lambda: table(dp={"timeout": float("inf")}),
        r"groups\.dp\.timeout=inf: expected seconds",
    ),
    "world_size": (lambda: build().resolve(0), r"world_size=0: expected a whole number from 1 on"),
    "plan of an open spec": (lambda: GroupPlan.for_rank(build(), 0), r"open sizes \(-1\); call"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_clear_spec_error(name: str) -> None:
    call, said = BAD[name]
    with pytest.raises(SpecError, match=said):
        call()


YAML: Mapping[str, tuple[str, str]] = {
    "python tag": ("axes: !!python/object/apply:os.getcwd []", "not plain YAML .no Python tags."),
    "not yaml": ("axes: {tp: 2", "not plain YAML"),
    "a list": ("- tp", "expected a mapping such as .* found list"),
    "nothing": ("", "found nothing"),
    "key no name": ("? [tp, cp]\n: 2", "line 1: a key must be a name"),
    "key twice": ("axes: {tp: 2, tp: 4}", "line 1: key 'tp' is given twice"),
    "unknown key": ("axis: {tp: 2}", "axis: unknown key.*did you mean 'axes'"),
}


@pytest.mark.parametrize("name", YAML)
def test_a_bad_file_is_named_with_its_path(name: str, tmp_path: Path) -> None:
    text, said = YAML[name]
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=rf"grid\.yaml: .*{said}"):
        GridSpec.from_yaml(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere\.yaml: there is no such file"):
        GridSpec.from_config(tmp_path / "nowhere.yaml")
    with pytest.raises(SpecError, match="cannot be read"):
        GridSpec.from_yaml(tmp_path)


def test_a_rank_outside_the_grid() -> None:
    spec = build(tp=2, ranks=range(4, 8)).resolve(8)
    with pytest.raises(NotInGridError, match="rank 3 is not in this grid, which covers ranks 4-7"):
        GroupPlan.for_rank(spec, 3)
