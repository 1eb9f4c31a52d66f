"""Programs that call parts of a model: their parameters have the names of the whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from commgrid.audit.compare import compare
from commgrid.audit.finding import Comparison
from commgrid.audit.parameters import names_of
from tests.audit.audited import part, seen_on

PROGRAM = """
import torch, commgrid
from torch import nn
from commgrid.data_parallel import GradientReducer

grid = commgrid.initialize()
rank, dp = grid.rank, grid.size("dp")
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
draw = torch.Generator().manual_seed(1)
REDUCER = True
{model}
reducers = [GradientReducer(each) for each in models] if REDUCER else []
for step in range(2):
    tokens = torch.randint(0, 8, (4, 6), generator=draw)
    {before}
    tokens = tokens.chunk(dp)[grid.get_local_rank("dp")]
    {forward}
    loss.backward()
    for reducer in reducers:
        reducer.finish()
    {after}
    optimizer.step()
    optimizer.zero_grad()
commgrid.shutdown()
"""

SGD = "optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)"
DICT = f"""
model = nn.ModuleDict({{"embedding": nn.Embedding(8, 5), "drop": nn.Dropout(0.0),
                       "head": nn.Linear(5, 8, bias=False)}})
models = [model]
{SGD}
"""
HEAD = "loss = nn.CrossEntropyLoss()(logits.flatten(0, 1), tokens.flatten())"
OF_DICT = f"logits = model['head'](model['drop'](model['embedding'](tokens))); {HEAD}"

LIST = DICT.replace("ModuleDict({", "ModuleList([").replace("})", "])")
for key in ("embedding", "drop", "head"):
    LIST = LIST.replace(f'"{key}": ', "")
OF_LIST = f"logits = model[2](model[0](tokens)); {HEAD}"

METHODS = f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 5), nn.Linear(5, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(5))
    def encode(self, tokens):
        return self.embedding(tokens) * self.scale
    def decode(self, x):
        return self.head(x)
model = Model()
models = [model]
{SGD}
"""
OF_METHODS = f"logits = model.decode(model.encode(tokens)); {HEAD}"

APART = f"""
embedding, head = nn.Embedding(8, 5), nn.Linear(5, 8, bias=False)
models = [embedding, head]
{SGD}
"""
OF_APART = f"logits = head(embedding(tokens)); {HEAD}"

NAMED = """
embedding, head = nn.Embedding(8, 5), nn.Linear(5, 8, bias=False)
models = [embedding, head]
optimizer = torch.optim.SGD(
    [("embedding.weight", embedding.weight), ("head.weight", head.weight)], lr=0.1
)
"""

TWO = f"""
actor, critic = (nn.Sequential(nn.Embedding(8, 5), nn.Linear(5, n)) for n in (8, 1))
models = [actor, critic]
{SGD}
"""
OF_TWO = f"logits = actor(tokens) + critic(tokens); {HEAD}"

TIED = f"""
model = nn.ModuleDict({{"embedding": nn.Embedding(8, 5), "head": nn.Linear(5, 8, bias=False)}})
model["head"].weight = model["embedding"].weight
models = [model]
{SGD}
"""
OF_TIED = f"logits = model['head'](model['embedding'](tokens)); {HEAD}"

WRAPPED = f"""
from torch.nn.parallel import DistributedDataParallel
REDUCER = False
{METHODS}
model.forward = lambda tokens: model.decode(model.encode(tokens))
wrapped = DistributedDataParallel(model) if dp > 1 else model
"""
OF_WRAPPED = f"logits = wrapped(tokens); {HEAD}"

WRAPPED_PARTS = f"""
from torch.nn.parallel import DistributedDataParallel
REDUCER = False
wrap = DistributedDataParallel if dp > 1 else lambda each: each
model = nn.ModuleDict({{"embedding": wrap(nn.Embedding(8, 5)),
                       "head": wrap(nn.Linear(5, 8, bias=False))}})
models = [model]
{SGD}
"""

OTHER_ORDER = f"""
model = nn.ModuleDict({{"one": nn.Embedding(8, 8), "two": nn.Embedding(8, 8)}})
models = [model]
{SGD}
"""
OF_OTHER_ORDER = (
    "logits = sum(model[key](tokens) for key in sorted(model, reverse=bool(rank))); " + HEAD
)

SHARED = """
encoder = nn.Embedding(8, 5)
actor, critic = (nn.ModuleDict({"encoder": encoder, name: nn.Linear(5, 8)}) for name in "ac")
models, REDUCER = [actor, critic], False
optimizer = torch.optim.SGD({p for m in models for p in m.parameters()}, lr=0.1)
"""
OF_SHARED = f"x = encoder(tokens); logits = actor['a'](x) + critic['c'](x); {HEAD}"

TEACHER = f"""
from copy import deepcopy
model = nn.ModuleDict({{"embedding": nn.Embedding(8, 5), "head": nn.Linear(5, 8, bias=False)}})
teacher = deepcopy(model).requires_grad_(False)
models = [model]
{SGD}
"""
OF_TEACHER = (
    "aim = teacher['head'](teacher['embedding'](tokens)); "
    "loss = (model['head'](model['embedding'](tokens)) - 2 * aim).square().mean()"
)

COMPILED = (
    DICT
    + """
model["embedding"] = torch.compile(model["embedding"], backend="eager")
"""
)

COMPILED_WHOLE = f"""
{METHODS}
model.forward = lambda tokens: model.decode(nn.functional.dropout(model.encode(tokens), 0.0))
whole = torch.compile(model, backend="eager")
"""
OF_COMPILED_WHOLE = f"logits = whole(tokens); {HEAD}"

LOSSES = f"""
model = nn.ModuleDict({{"net": nn.Linear(8, 8), "temperature": nn.ParameterList([nn.Parameter(
    torch.ones(()))])}})
measure = nn.CrossEntropyLoss(weight=torch.ones(8))
models = [model]
{SGD}
"""
OF_LOSSES = (
    "x = model['net'](nn.functional.one_hot(tokens, 8).double()) * model['temperature'][0]; "
    "loss = measure(x.flatten(0, 1), tokens.flatten())"
)

SIBLINGS = f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.ModuleDict({{"head": nn.Linear(5, 8, bias=False)}})
        self.embedding, self.head = nn.Embedding(8, 5), nn.Linear(5, 8, bias=False)
    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.module["head"](x) + 2 * self.head(x)
model = Model()
models = [model]
{SGD}
"""
OF_SIBLINGS = f"logits = model(tokens); {HEAD}"

NAMED_SIBLINGS = """
embedding, head, inner = nn.Embedding(8, 5), nn.Linear(5, 8), nn.Linear(5, 8)
models = [embedding, head, inner]
optimizer = torch.optim.SGD(
    [(f"{name}.{key}", each)
     for name, module in (("embedding", embedding), ("head", head), ("module.head", inner))
     for key, each in module.named_parameters()], lr=0.1
)
"""
OF_NAMED_SIBLINGS = f"x = embedding(tokens); logits = inner(x) + 2 * head(x); {HEAD}"

NAMED_WRAPPED = NAMED.replace('"embedding.', '"module.embedding.').replace(
    '"head.', '"module.head.'
)

CHECKED = {
    "a dict of modules": (DICT, OF_DICT),
    "a list of modules": (LIST, OF_LIST),
    "methods other than forward": (METHODS, OF_METHODS),
    "names from the optimizer": (NAMED, OF_APART),
    "a tied head": (TIED, OF_TIED),
    "DistributedDataParallel around the model": (WRAPPED, OF_WRAPPED),
    "DistributedDataParallel around its parts": (WRAPPED_PARTS, OF_TIED),
    "parts in another order on each rank": (OTHER_ORDER, OF_OTHER_ORDER),
    "an attribute called module beside others": (SIBLINGS, OF_SIBLINGS),
    "names from the optimizer with module beside others": (NAMED_SIBLINGS, OF_NAMED_SIBLINGS),
    "names from the optimizer within a wrapper": (NAMED_WRAPPED, OF_APART),
    "a frozen copy": (TEACHER, OF_TEACHER),
    "a loss with buffers and a list of parameters": (LOSSES, OF_LOSSES),
    "a part that is compiled": (COMPILED, OF_DICT),
    "a model that is compiled": (COMPILED_WHOLE, OF_COMPILED_WHOLE),
}
NOT_CHECKED = {
    "parts that no module has": (APART, OF_APART),
    "two models with equal names": (TWO, OF_TWO),
}


def compared(
    model: str, forward: str, folder: Path, other: str = "dp=2", before: str = "", after: str = "",
    same_weights: bool = False, one: str = "dp=1",
) -> Comparison:  # fmt: skip
    folder.mkdir(exist_ok=True)
    script = folder / "program.py"
    head = "import sys\nsys.argv[1:] = []\n"  # the flags of the harness are none of its own
    script.write_text(
        head + PROGRAM.format(model=model, forward=forward, before=before, after=after)
    )
    return part(one, other, folder, script, [], same_weights=same_weights)


@pytest.mark.parametrize("case", CHECKED)
def test_parts_are_compared_by_their_names_in_the_whole_model(case: str, tmp_path: Path) -> None:
    found = compared(*CHECKED[case], tmp_path)
    assert not found.findings, found.findings[0].text
    assert found.complete, found.notes
    assert found.steps == 2
    assert found.compared["gradients"] >= 2
    assert found.compared["losses"] == 2


def test_a_part_of_two_models_is_not_guessed(tmp_path: Path) -> None:
    """Which of the two names it depends on the order of calls, and no rank is accused."""
    found = compared(SHARED, OF_SHARED, tmp_path, other="tp=2")
    assert not found.findings, found.findings[0].text


@pytest.mark.parametrize("case", NOT_CHECKED)
@pytest.mark.parametrize("same_weights", [False, True])
def test_names_that_are_two_parameters_are_not_compared(
    case: str, same_weights: bool, tmp_path: Path
) -> None:
    found = compared(*NOT_CHECKED[case], tmp_path, same_weights=same_weights)
    assert not found.findings, found.findings[0].text
    assert not found.complete
    assert any("two modules have one" in note for note in found.notes)


def test_a_look_without_gradients_first(tmp_path: Path) -> None:
    look = "with torch.no_grad(): model['head'](model['embedding'](tokens))"
    found = compared(DICT, OF_DICT, tmp_path, before=look)
    assert not found.findings
    assert found.compared["gradients"] == 4


@pytest.mark.parametrize("case", ["a dict of modules", "names from the optimizer"])
def test_a_part_that_is_not_reduced_has_its_name(case: str, tmp_path: Path) -> None:
    """The head alone keeps each rank's own gradient."""
    model, forward = CHECKED[case]
    model = model.replace("models = [model]", "models = [model['embedding']]")
    model = model.replace("models = [embedding, head]", "models = [embedding]")
    model = model.replace("[p for m in models for p in m.parameters()]", "model.parameters()")
    (first, *_) = compared(model, forward, tmp_path).findings
    assert (first.name, first.kind, first.axes) == ("head.weight", "not reduced", ("dp",))


STAGES = """
import torch, commgrid, torch.distributed as dist
from torch import nn
grid = commgrid.initialize()
torch.set_default_dtype(torch.float64)
stages, stage = grid.size("pp"), grid.get_local_rank("pp")
torch.manual_seed(SEED)
model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4 // stages)])
torch.manual_seed(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x = torch.randn(2, 4).requires_grad_()
    if stage:
        dist.recv(x.data, 0)
    y = model(x)
    if stage == stages - 1:
        y.square().mean().backward()
    if stages > 1:
        if stage:
            dist.send(x.grad, 0)
        else:
            dist.send(y.detach(), 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            y.backward(gradient)
    optimizer.step()
    optimizer.zero_grad()
commgrid.shutdown()
"""


@pytest.mark.parametrize("seed", ["0", "stage"])
def test_stages_that_count_their_layers_from_0(seed: str, tmp_path: Path) -> None:
    """They are right, and their names are not those of the whole model."""
    script = tmp_path / "program.py"
    script.write_text("import sys\nsys.argv[1:] = []\n" + STAGES.replace("SEED", seed))
    one = seen_on("pp=1", tmp_path / "1", script, [])
    two = seen_on("pp=2", tmp_path / "2", script, [])
    for found in (compare(one, two), compare(two, two), compare(two, one)):
        assert not found.findings, found.findings[0].text
        assert not found.complete
    assert "2.bias is a parameter on pp=1 and on no rank of pp=2" in compare(one, two).notes[0]


@pytest.mark.parametrize("same_weights", [False, True])
def test_shapes_that_differ_are_not_compared(same_weights: bool, tmp_path: Path) -> None:
    """A layer that the program shards by hand and does not declare."""
    cut = f"""
model = nn.ModuleDict({{"head": nn.Linear(6, 8, bias=False),
                       "embedding": nn.Embedding(8, 6 // grid.size("tp"))}})
models, REDUCER = [model], False
{SGD}
"""
    forward = (
        "from commgrid.collectives import all_gather; "
        "logits = model['head'](all_gather(model['embedding'](tokens), 'tp', dim=-1)); " + HEAD
    )
    found = compared(cut, forward, tmp_path, other="tp=2", same_weights=same_weights)
    assert not found.findings, found.findings[0].text
    assert "it has the shapes [8, 3] and [8, 6]" in found.notes[0]


CLIPPED = """
model = nn.ModuleDict({"experts": nn.Linear(8, 8), "router": nn.Linear(8, 8)})
models, REDUCER = [model], False
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
OF_CLIPPED = (
    "x = nn.functional.one_hot(tokens, 8).double(); "
    "loss = (model['experts'](x) * model['router'](x)).square().mean()"
)


@pytest.mark.parametrize("wrong", ["experts", "router"])
def test_a_factor_is_of_the_parameters_that_do_not_have_1(wrong: str, tmp_path: Path) -> None:
    twice = f"[p.grad.mul_(2 if grid.size('tp') > 1 else 1) for p in model['{wrong}'].parameters()]"
    found = compared(CLIPPED, OF_CLIPPED, tmp_path, other="tp=2", after=twice)
    assert {each.name for each in found.findings} == {f"{wrong}.weight", f"{wrong}.bias"}
    assert all("2 times the reference's" in each.words for each in found.findings)


CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)"


@pytest.mark.parametrize(
    "clip", [CLIP, CLIP.replace("_(", "_(parameters=").replace("(), ", "(), max_norm=")]
)
@pytest.mark.parametrize("wrong", ["experts", "router"])
def test_gradients_that_are_wrong_before_a_clip(wrong: str, clip: str, tmp_path: Path) -> None:
    """The clip makes all others smaller: no parameter has factor 1."""
    twice = f"[p.grad.mul_(2 if grid.size('tp') > 1 else 1) for p in model['{wrong}'].parameters()]"
    found = compared(CLIPPED, OF_CLIPPED, tmp_path, other="tp=2", after=f"{twice}; {clip}")
    assert {each.name for each in found.findings} == {f"{wrong}.weight", f"{wrong}.bias"}
    assert all("2 times the reference's" in each.words for each in found.findings)


def test_a_clip_of_right_gradients_is_no_difference(tmp_path: Path) -> None:
    found = compared(CLIPPED, OF_CLIPPED, tmp_path, other="tp=2", after=CLIP)
    assert not found.findings
    assert found.compared["gradients"] == 8


def test_a_clip_by_a_wrong_norm_scales_all(tmp_path: Path) -> None:
    clip = CLIP.replace("0.01", "0.01 / grid.size('tp')")
    (first,) = compared(CLIPPED, OF_CLIPPED, tmp_path, other="tp=2", after=clip).findings
    assert (first.name, first.kind) == ("of every parameter", "not averaged")


def test_a_factor_of_most_parameters_is_not_a_clips(tmp_path: Path) -> None:
    """Three of four are wrong, and the fourth has factor 1."""
    twice = "[p.grad.mul_(2 if grid.size('tp') > 1 else 1) for p in [*model.parameters()][1:]]"
    found = compared(CLIPPED, OF_CLIPPED, tmp_path, other="tp=2", after=twice)
    assert {each.name for each in found.findings} == {
        "experts.bias", "router.weight", "router.bias",
    }  # fmt: skip


EXPERTS = """
from commgrid.collectives import reduce_from_group
REDUCER, models = False, []
held = 4 // grid.size("ep")
first = held * grid.get_local_rank("ep")
experts = [nn.Linear(8, 8, bias=False) for _ in range(4)][first : first + held]
optimizer = torch.optim.SGD(
    [(f"layer.experts.local_experts.{i}.weight", each.weight) for i, each in enumerate(experts)],
    lr=0.1,
)
"""
OF_EXPERTS = (
    "x = nn.functional.one_hot(tokens, 8).double(); "
    "y = reduce_from_group(sum((i + first + 1) * each(x) for i, each in enumerate(experts)), 'ep');"
    " loss = (y - 1).square().mean()"
)
ALIKE = "tokens = torch.cat([tokens] * dp)"  # each rank takes all of them


@pytest.mark.parametrize(("one", "other"), [("1", "2"), ("2", "1")])
def test_an_expert_that_is_called_by_itself_is_not_guessed(
    one: str, other: str, tmp_path: Path
) -> None:
    """Which of all experts a rank's first one is cannot be told without their number."""
    grids = {"one": f"dp=2,ep={one},etp=1", "other": f"dp=2,ep={other},etp=1"}
    found = compared(EXPERTS, OF_EXPERTS, tmp_path, before=ALIKE, **grids)
    assert not found.findings, found.findings[0].text
    assert not found.complete
    assert "local_experts.0" in found.notes[0]


def named(*paths: str) -> nn.Module:
    """A module with a Linear at each path."""
    root = nn.Module()
    for path in paths:
        inner = root
        for word in path.split("."):
            if not hasattr(inner, word):
                inner.add_module(word, nn.Module())
            inner = inner.get_submodule(word)
        inner.weight = nn.Parameter(torch.ones(1))
    return root


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["module.head"], ["head"]),
        (["module.module.head"], ["head"]),  # Megatron-core's two wrappers
        (["_orig_mod.head", "_orig_mod.tail"], ["head", "tail"]),
        (["block._checkpoint_wrapped_module.up"], ["block.up"]),
        (["module.head", "head"], ["module.head", "head"]),
        (["block.module.up", "block.up"], ["block.module.up", "block.up"]),
        (
            ["block", "block.module.head"],
            ["block", "block.module.head"],
        ),  # it has parameters of its own
    ],
)
def test_only_a_sole_child_is_a_wrapped_module(paths: list[str], expected: list[str]) -> None:
    root = named(*paths)
    names = names_of(root, None)
    assert [names[root.get_submodule(path)] for path in paths] == expected
