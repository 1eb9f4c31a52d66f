"""What a source converts while it is sent is what it would be of the whole tensor, however it is
cut."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import commgrid
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear, initialize_parameters
from commgrid.testing import run_on_ranks
from commgrid.transfer import Convert, Fp8Blocks, Part, Transfer, mapping
from tests.sizes import full
from tests.transfer.programs import COLUMNS, PEERS, ROWS, World, both
from tests.ways import attempt

FP8 = torch.float8_e4m3fn
RANKS = 4


def quantized(name: str, whole: Tensor, block: tuple[int, int]) -> dict[str, Tensor]:
    """Block by block in plain loops: numbers, and the scale of each block."""
    rows, columns = whole.shape
    numbers = torch.zeros(rows, columns)
    scales = torch.ones(-(-rows // block[0]), -(-columns // block[1]))
    for i, j in product(range(scales.shape[0]), range(scales.shape[1])):
        part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
        largest = whole[part].float().abs().max()
        if largest > 0:
            scales[i, j] = largest / 448
        numbers[part] = whole[part].float() / scales[i, j]
    return {name: numbers.to(FP8), f"{name}_scale_inv": scales}


def cells(draw: random.Random, shape: Sequence[int], ranks: int) -> dict[int, list[Any]]:
    """A tensor cut anywhere in both dims: to each rank some boxes, and some boxes to two ranks."""
    edges = [
        [0, *sorted(draw.sample(range(1, size), min(draw.randrange(4), size - 1))), size]
        for size in shape
    ]
    found: dict[int, list[Any]] = {rank: [] for rank in range(ranks)}
    for (top, bottom), (left, right) in product(*map(pairwise, edges)):
        for rank in draw.sample(range(ranks), draw.choice([1, 1, 2])):
            found[rank].append((slice(top, bottom), slice(left, right)))
    return found


def parts_of(whole: Tensor, boxes: Sequence[tuple[slice, slice]]) -> list[Part]:
    return [
        Part(whole[box].clone(), tuple(whole.shape), (box[0].start, box[1].start)) for box in boxes
    ]


def random_cuts(seeds: Sequence[int]) -> list[str]:
    """Matrices cut at random on both sides, sent twice; what is wrong."""
    grid, wrong = commgrid.initialize(tp=RANKS), []
    for seed in seeds:
        draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        block = draw.choice([(4, 4), (3, 5), (128, 2), (1, 7)])
        shape = draw.randint(1, 20), draw.randint(1, 20)
        dtype = draw.choice([torch.float32, torch.bfloat16])
        whole = torch.randn(shape, generator=generator).to(dtype)
        expected = quantized("w", whole, block)
        held = parts_of(whole, cells(draw, shape, RANKS)[grid.rank])
        empty = {name: torch.zeros_like(one) for name, one in expected.items()}
        wanted = {
            name: parts_of(one, cells(draw, one.shape, RANKS)[grid.rank])
            for name, one in empty.items()
        }
        transfer = Transfer(
            {"w": held}, wanted, convert=Fp8Blocks(block), max_bytes=draw.choice([64, 1 << 20]),
            timeout=60,
        )  # fmt: skip
        for factor in (1.0, 3.0):
            for part in held:
                part.tensor.mul_(factor)
            whole.mul_(factor)
            transfer.run()
            for name, one in quantized("w", whole, block).items():
                for part in wanted[name]:
                    place = tuple(
                        slice(o, o + n) for o, n in zip(part.offset, part.tensor.shape, strict=True)
                    )
                    if not torch.equal(part.tensor.float(), one[place].float()):
                        wrong.append(f"seed {seed}, times {factor}: {name}")
        transfer.close()
    commgrid.shutdown()
    return wrong


def test_blocks_of_any_cut_are_those_of_the_whole_tensor() -> None:
    seeds = range(200) if full() else range(6)
    assert run_on_ranks(random_cuts, RANKS, seeds, timeout=600) == [[]] * RANKS


class Layers(nn.Module):
    def __init__(self, grid: commgrid.HyperCommGrid) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(6, 10, grid=grid)
        self.down = RowParallelLinear(10, 6, grid=grid)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("experts", torch.arange(2 * 5 * 6.0).view(2, 5, 6))
        with commgrid.use_grid(grid):
            initialize_parameters(self, 7)


def served(module: nn.Module) -> dict[str, Tensor]:
    """What an engine should get of the unsharded module."""
    found = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    found["norm.weight"] += 1
    for name in ("up.weight", "down.weight"):
        found.update(quantized(name, found[name], (4, 4)))
    experts = [quantized("experts", expert, (4, 4)) for expert in found["experts"]]
    return found | {name: torch.stack([one[name] for one in experts]) for name in experts[0]}


def modules() -> list[str]:
    """Layers cut over tp, by FSDP2, and by both: all of these split blocks."""
    wrong = []
    commgrid.join()
    single = commgrid.initialize(name="single", ranks=[0])
    expected = served(Layers(single)) if single else {}
    for number, (axes, fsdp) in enumerate([({"tp": 2}, False), ({"tp": 2}, True), ({}, True)]):
        grid = commgrid.initialize(name=f"training {number}", **axes)
        model = Layers(grid)
        if fsdp:
            fully_shard(model, mesh=grid.device_mesh("dp"))
        target = {name: torch.zeros_like(one) for name, one in expected.items()}
        transfer = Transfer(
            model, target if single else None, source_grid=grid, target_grid=single,
            convert=[
                Fp8Blocks((4, 4)),  # which leaves vectors to the next one
                Convert(lambda _, norm: norm + 1, only=["norm.weight"]),
            ],
            timeout=60,
        )  # fmt: skip
        transfer.run()
        wrong += [
            f"{name} of {axes}, fsdp {fsdp}" for name, one in expected.items()
            if not torch.equal(target[name].float(), one.float())
        ]  # fmt: skip
        transfer.close()
    commgrid.shutdown()
    return wrong


def test_layers_however_they_are_cut() -> None:
    assert run_on_ranks(modules, RANKS, backend=None, launcher="torchrun") == [[]] * RANKS


def scaled_rows(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Whole numbers, and a scale for each row."""
    scales = tensor.abs().amax(-1, keepdim=True) / 127
    return {name: (tensor / scales).round().to(torch.int8), f"{name}.scale": scales}


def forms() -> dict[str, Any]:
    """What functions get and give, on rows 0 to 2 of 5 and the rest."""
    grid = commgrid.initialize()
    seen: list[tuple[str, tuple[int, ...]]] = []

    def noted(function: Any) -> Any:
        def call(name: str, tensor: Tensor) -> Any:
            seen.append((name, tuple(tensor.shape)))
            return function(name, tensor)

        return call

    whole = torch.arange(1.0, 21.0).view(5, 4)
    first, rows = (0, 3) if grid.rank == 0 else (3, 2)
    found: dict[str, Any] = {}

    def sent(convert: Any, /, **target: Tensor) -> dict[str, Tensor]:
        seen.clear()
        source = {"w": Part(whole[first : first + rows].clone(), (5, 4), (first, 0))}
        transfer = Transfer(source, target, convert=convert, timeout=20)
        planned = len(seen)
        transfer.run()
        found["seen"] = seen[planned:]
        transfer.close()
        return target

    out = sent(noted(lambda _, w: w / w.sum()), w=torch.zeros(5, 4))
    found["a whole tensor"] = torch.equal(out["w"], whole / whole.sum()), found["seen"]
    out = sent(noted(lambda _, w: {"w": w, "norm": w.norm()}), w=whole * 0, norm=torch.zeros(()))
    found["a number"] = torch.equal(out["w"], whole), out["norm"].item() == whole.norm().item()
    out = sent(Convert(noted(lambda _, w: w + 1), block=(1,)), w=torch.zeros(5, 4))
    found["elements"] = torch.equal(out["w"], whole + 1), found["seen"]
    rows_of = {"w": torch.zeros(5, 4, dtype=torch.int8), "w.scale": torch.zeros(5, 1)}
    out = sent(Convert(noted(scaled_rows), block=(None,)), **rows_of)
    expected = scaled_rows("w", whole)
    found["rows"] = all(torch.equal(out[name], expected[name]) for name in out), found["seen"]
    out = sent(noted(lambda _, w: w), w=torch.zeros(5, 4))
    found["itself"] = torch.equal(out["w"], whole), found["seen"]
    out = sent(
        [Convert(noted(lambda _, w: -w), only=lambda name: name == "v")], w=torch.zeros(5, 4)
    )
    found["another name"] = torch.equal(out["w"], whole), found["seen"]
    out = sent(Convert(lambda _, w: w.bfloat16(), block=(1,)), w=torch.zeros(5, 4))
    found["another dtype"] = torch.equal(out["w"], whole)
    del found["seen"]
    commgrid.shutdown()
    return found


def test_functions_of_tensors_rows_and_elements() -> None:
    first, other = run_on_ranks(forms, 2)
    assert first == {
        "a whole tensor": (True, [("w", (5, 4))]),
        "a number": (True, True),
        "elements": (True, [("w", (3, 4))]),
        "rows": (True, [("w", (3, 4))]),
        "itself": (True, []),
        "another name": (True, []),
        "another dtype": True,
    }
    assert other == {
        **first, "a whole tensor": (True, []), "elements": (True, [("w", (2, 4))]),
        "rows": (True, [("w", (2, 4))]),
    }  # fmt: skip


def between_programs(world: World) -> bool:
    """Rows 0 to 7 of 24, and so on, become blocks of 5 rows in another program."""
    rows = ROWS // world.grid.size("tp")
    place = (rows * world.rank, 0)
    whole = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) - 70.0
    expected = quantized("w", whole, (5, 4))
    held: Any = {"w": Part(whole[place[0] :][:rows].clone(), (ROWS, COLUMNS), place)}
    if world.name == "engine":
        held = {name: torch.zeros_like(one) for name, one in expected.items()}
    sides = (held, None) if world.name == "trainer" else (None, held)
    grids: Any = {"trainer": "source_grid", "engine": "target_grid"}[world.name]
    transfer = Transfer(
        *sides, store=world.store, peer=PEERS[world.name], timeout=60.0, **{grids: world.grid},
        convert=Fp8Blocks((5, 4)) if world.name == "trainer" else None,
    )  # fmt: skip
    transfer.run(verify=True)
    transfer.close()
    if world.name == "trainer":
        return True
    return all(torch.equal(held[name].float(), one.float()) for name, one in expected.items())


@pytest.mark.full
def test_blocks_that_go_to_another_program() -> None:
    assert both(between_programs, between_programs, (3, 2)) == ([True] * 3, [True] * 2)


HEADS, KV_HEADS, HEAD, HIDDEN, EXPERTS, INNER = 4, 2, 6, 10, 3, 6
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD}
ATTENTION, EXPERT = "model.layers.0.self_attn", "model.layers.0.mlp.experts"


def fused() -> dict[str, Any]:
    """Megatron's tensors, cut over 2 ranks, into vLLM's in fp8: parts are quantized alone."""
    grid = commgrid.initialize(tp=2)
    torch.manual_seed(3)
    q = torch.randn(KV_HEADS, HEADS // KV_HEADS * HEAD, HIDDEN)
    k, v = torch.randn(2, KV_HEADS, HEAD, HIDDEN)
    qkv = torch.cat([q, k, v], 1).flatten(0, 1)  # the groups of both ranks one after the other
    experts = torch.randn(EXPERTS, 2, INNER, HIDDEN)
    rows = len(qkv) // 2
    own = slice(grid.rank * rows, (grid.rank + 1) * rows)
    source: dict[str, Any] = {
        "decoder.layers.0.self_attention.linear_qkv.weight": Part(
            qkv[own].clone(), tuple(qkv.shape), (own.start, 0)
        )
    }
    for number, expert in enumerate(experts):
        name = f"decoder.layers.0.mlp.experts.local_experts.{number}.linear_fc1.weight"
        source[name] = [
            Part(half[:5].clone() if grid.rank == 0 else half[5:].clone(), (2 * INNER, HIDDEN),
                 (half_number * INNER + 5 * grid.rank, 0))
            for half_number, half in enumerate(expert)
        ]  # fmt: skip
    parts = [quantized("w", each.flatten(0, 1), (4, 4)) for each in (q, k, v)]
    halves = [[quantized("w", half, (4, 4)) for half in expert] for expert in experts]
    expected = {}
    for end in ("", "_scale_inv"):
        expected[f"{ATTENTION}.qkv_proj.weight{end}"] = torch.cat([one[f"w{end}"] for one in parts])
        expected[f"{EXPERT}.w13_weight{end}"] = torch.stack(
            [torch.cat([half[f"w{end}"] for half in expert]) for expert in halves]
        )
    target = {name: torch.zeros_like(one) for name, one in expected.items()}
    names = mapping("qwen3_moe", source="megatron", target="vllm", config=CONFIG)
    transfer = Transfer(source, target, rename=names, convert=Fp8Blocks((4, 4)), timeout=20)
    transfer.run()
    transfer.close()
    found = {n: torch.equal(target[n].float(), one.float()) for n, one in expected.items()}
    found["one of both"] = attempt(
        source, {f"{EXPERT}.w13_weight": target[f"{EXPERT}.w13_weight"]}, rename=names,
        only=["*w13_weight"], convert=Fp8Blocks((4, 4)),
    )  # fmt: skip
    commgrid.shutdown()
    return found


def test_fused_tensors_get_the_scales_of_their_parts() -> None:
    for found in run_on_ranks(fused, 2):
        assert found.pop("one of both") == (
            f"{NOTHING}ranks 0-1: only= leaves out {EXPERT}.0.gate_proj.weight_scale_inv, which "
            f"convert= makes of {EXPERT}.0.gate_proj.weight; add its name"
        )
        assert len(found) == 4
        assert all(found.values()), found


def once(name: str, tensor: Tensor) -> Tensor:
    """Another dtype for numbers below 0."""
    return tensor.double() if tensor.min() < 0 else tensor + 1


def fails(name: str, tensor: Tensor) -> Tensor:
    if tensor.max() > 1:
        raise ArithmeticError("too large")
    return tensor + 1


def block_of(make: Callable[[], Any]) -> str:
    with pytest.raises(commgrid.SpecError) as error:
        make()
    return str(error.value)


def refusals() -> dict[str, str]:
    """Conversions that would send something else in silence, each beside one that does not."""
    grid = commgrid.initialize()
    rank = grid.rank

    def tensors(*names: str, value: float = 2.0) -> dict[str, Tensor]:
        return {name: torch.full((2, 2), value) for name in names}

    def said(convert: Any, *names: str, into: Sequence[str] = (), **options: Any) -> str:
        value = options.pop("value", 2.0)
        target = tensors(*(into or names), value=0.0)
        return attempt(tensors(*names, value=value), target, convert=convert, **options)

    def twice(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {name: tensor * 2, f"{name}_half": tensor / 2}

    pair, other = ("w", "w_half"), ("v", "v_half")
    mine = twice if rank == 0 else None
    unequal = {"w": torch.full((2, 2), float(rank))}
    optimizers = tuple(torch.optim.SGD(nn.Linear(1, 1).parameters()) for _ in range(2))
    found = {
        "in place": said(lambda _, w: w.add_(1), "w"),
        "a copy": said(lambda _, w: w.clone().add_(1), "w"),
        "nothing": said(lambda _, w: None, "w"),
        "a list": said(lambda _, w: [w], "w"),
        "one name": said(lambda _, w: {"x": w + 1}, "v", "w", into=["x"]),
        "both": said(twice, "w", into=pair),
        "one of both": said(twice, "w"),
        "one of both, some": said(twice, "w", only=["w*"]),
        "left out": said(twice, "w", into=pair, only=["w"]),
        "not left out": said(twice, "w", into=pair, only=["w", "*_half"]),
        "on one rank": said(mine, "w", into=pair),
        "on no source": attempt(None if rank else tensors("w"), tensors("w", value=0.0),
                                source_grid=grid, convert=lambda _, w: w + 1),
        "pattern": said(Convert(twice, only=["v", "w*"]), "w", into=pair),
        "two patterns": said(Convert(twice, only=iter("wv")), "w", "v", into=[*pair, *other]),
        "a pattern of others": said(Convert(twice, only=["v", "w"]), "w", into=pair, only=["w*"]),
        "optimizer": said(twice, "w", into=pair, optimizer=optimizers),
        "no function": said("fp8", "w"),
        "block": block_of(lambda: Convert(twice, block=(0,))),
        "a block of one size": block_of(lambda: Fp8Blocks(128)),  # type: ignore[arg-type]
        "whole numbers": block_of(lambda: Fp8Blocks(dtype=torch.int8)),
        "half of a block": said(Convert(lambda _, w: w[:1, :1], block=(1, 1)), "w"),
        "two of a block": said(Convert(lambda _, w: w.repeat(1, 2), block=(1, None)), "w"),
        "another dtype later": said(once, "w", value=-1.0),
        "an error": said(fails, "w"),
        "too large": attempt(tensors("w"), {"w": torch.zeros(2, 2, dtype=torch.float16)},
                             convert=lambda _, w: w * 1e6),
        "unequal copies": attempt(unequal, tensors("w", value=0.0), convert=fails),
        "any copy": attempt(unequal, tensors("w", value=0.0), convert=lambda _, w: w * 0,
                            copies="any"),
    }  # fmt: skip
    old = tensors("w", value=1.0)
    found["an error, staged"] = attempt(tensors("w"), old, convert=fails, staged=True)
    found["then"] = str(old["w"].tolist())
    commgrid.shutdown()
    return found


def test_zeros_tiny_numbers_and_nan() -> None:
    whole = torch.zeros(8, 4)
    whole[4:6] = torch.tensor([1e-44, 3e38, -2.0, 0.5])
    whole[6, 0] = torch.nan
    made = Fp8Blocks((2, 2)).function("w", whole)
    assert isinstance(made, dict)
    scales = made["w_scale_inv"].repeat_interleave(2, 0).repeat_interleave(2, 1)
    back = made["w"].float() * scales
    assert back[:4].eq(0).all()
    assert back[4, 1] == whole[4, 1]
    assert back[6:, :2].isnan().all()
    assert back[6:, 2:].eq(0).all()


NOTHING = "TransferError: nothing was moved: "
UNUSABLE = "the target is not to be used: some of its tensors may be new and others old"


def test_what_a_conversion_may_not_do() -> None:
    first, other = run_on_ranks(refusals, 2, check=False)
    assert first == other
    doubled = "{'w': [[4.0, 4.0], [4.0, 4.0]], 'w_half': [[1.0, 1.0], [1.0, 1.0]]}"
    only_w = (
        f"{NOTHING}ranks 0-1: convert= makes w_half and w of one tensor, and the target has only "
        "w; give the target both"
    )
    three, zero = (str({"w": [[value] * 2] * 2}) for value in (3.0, 0.0))
    assert first == {
        "in place": f"{NOTHING}ranks 0-1: convert= writes to the tensor w that it is given, which "
        "is the model's; return a new one",
        "a copy": three,
        "nothing": f"{NOTHING}ranks 0-1: convert= returned NoneType for w; expected a tensor, or "
        "tensors by name",
        "a list": f"{NOTHING}ranks 0-1: convert= returned list for w; expected a tensor, or "
        "tensors by name",
        "one name": f"{NOTHING}ranks 0-1: convert= makes x of both v and w; give each a name of "
        "its own",
        "both": doubled,
        "one of both": only_w,
        "one of both, some": only_w,
        "left out": f"{NOTHING}ranks 0-1: only= leaves out w_half, which convert= makes of w; add "
        "its name",
        "not left out": doubled,
        "on one rank": f"{NOTHING}rank 0: convert= is given on rank 0 and not on rank 1 of the "
        "source; give it on all ranks of the source",
        "on no source": three,
        "pattern": f"{NOTHING}rank 0: convert= has only='v', which is the name of no tensor of the "
        "source; leave it out, or correct it",
        "two patterns": first["two patterns"],
        "a pattern of others": doubled,
        "optimizer": "SpecError: optimizer= goes with a whole model, unconverted; leave convert= "
        "out",
        "no function": "SpecError: convert='fp8': expected a function of name and tensor",
        "block": "block=(0,): expected whole numbers from 1, of the last dims, or None for a whole "
        "dim, as (128, 128)",
        "a block of one size": "block=128: expected rows and columns of a block, as (128, 128)",
        "whole numbers": "dtype=torch.int8: expected float8 numbers, as torch.float8_e4m3fn",
        "half of a block": "TransferError: convert= made w of shape (1, 1) and float32 of a part "
        "of shape (2, 2) of w; expected w of shape (2, 2) and float32, as of one block. Names, "
        f"shapes and dtypes may not depend on numbers (in transfer 'default'); {UNUSABLE}",
        "two of a block": f"{NOTHING}ranks 0-1: w has shape (2, 4) on ranks 0-1 of the source and "
        "(2, 2) on ranks 0-1 of the target; give both sides one model",
        "another dtype later": "TransferError: convert= made w of shape (2, 2) and float64 of a "
        "part of shape (2, 2) of w; expected w of shape (2, 2) and float32, as of one block. "
        "Names, shapes and dtypes may not depend on numbers (in transfer 'default'); "
        f"{UNUSABLE}",
        "an error": first["an error"],
        "too large": first["too large"],
        "unequal copies": first["unequal copies"],
        "any copy": zero,
        "an error, staged": first["an error, staged"],
        "then": "[[1.0, 1.0], [1.0, 1.0]]",
    }
    assert "the target is as it was" in first["an error, staged"]
    assert "failed: ArithmeticError: too large" in first["an error"]
    assert UNUSABLE in first["an error"]
    assert first["two patterns"].count("4.0") == 8
    assert "w: 4 of 4 numbers are too large for float16" in first["too large"]
    assert "nothing was moved" in first["too large"]
    assert "w, of which ranks 0-1 hold [2, 2] at [0, 0], differs" in first["unequal copies"]


def alive_at_most(max_bytes: int) -> tuple[int, int, int]:
    """The most bytes of converted tensors at once, all that were made, and how many there are."""
    rank = commgrid.initialize().rank
    alive = most = made = 0

    def gone(size: int) -> None:
        nonlocal alive
        alive -= size

    def noted(name: str, tensor: Tensor) -> Tensor:
        nonlocal alive, most, made
        found = tensor.bfloat16()
        weakref.finalize(found.untyped_storage(), gone, found.nbytes)
        alive += found.nbytes
        most, made = max(most, alive), made + found.nbytes
        return found

    source = {
        f"{n}": Part(torch.full((32, 64), float(n)), (64, 64), (32 * rank, 0)) for n in range(16)
    }
    target = {name: torch.zeros(64, 64) for name in source}
    convert = Convert(noted, block=(1,))
    transfer = Transfer(source, target, convert=convert, max_bytes=max_bytes)
    for _ in range(2):
        most = made = 0
        transfer.run()
        assert alive == 0, "a run keeps nothing"
    assert all(one.eq(float(name)).all() for name, one in target.items())
    commgrid.shutdown()
    return most, made, len(source)


def test_few_converted_tensors_are_held_at_once() -> None:
    part = 32 * 64 * 2
    for most, made, count in run_on_ranks(alive_at_most, 2, 2 * part):
        assert most < count * part // 2
        assert made >= count * part
    for _, made, count in run_on_ranks(alive_at_most, 2, 1 << 28):
        assert made == count * part
