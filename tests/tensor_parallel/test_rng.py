"""Dropout: equal where activations are replicated, different where sharded, recomputed alike."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import commgrid
from commgrid.collectives import all_gather
from commgrid.tensor_parallel import set_random_seed, sharded_rng
from commgrid.testing import run_on_ranks


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    commgrid.initialize(tp=2)
    set_random_seed(11)
    ones = torch.ones(64)
    first = F.dropout(ones, 0.5)
    with sharded_rng("tp"):
        sharded = F.dropout(ones, 0.5)
    return first, sharded, F.dropout(ones, 0.5)


def test_equal_where_replicated_and_different_where_sharded() -> None:
    ranks = run_on_ranks(drawn, 4)  # dp 2 · tp 2: ranks 0 and 1 are one tp group
    for first, second in ((0, 1), (2, 3)):
        (a, a_sharded, a_after), (b, b_sharded, b_after) = ranks[first], ranks[second]
        assert torch.equal(a, b)
        assert torch.equal(a_after, b_after)
        assert not torch.equal(a_sharded, b_sharded)
        assert not torch.equal(a, a_after)
    assert not torch.equal(ranks[0][0], ranks[2][0])
    assert not torch.equal(ranks[0][1], ranks[2][1])


def under_another_default_device() -> tuple[Tensor, Tensor]:
    """What sharded_rng draws; under torch.device("meta") its number for the ranks had no value."""
    commgrid.initialize()
    found = []
    for device in ("cpu", "meta"):
        set_random_seed(11)
        with torch.device(device), sharded_rng("tp"):
            found.append(torch.rand(8, device="cpu"))
    return found[0], found[1]


def test_the_default_device_does_not_matter() -> None:
    ((on_cpu, on_meta),) = run_on_ranks(under_another_default_device, 1)
    assert torch.equal(on_cpu, on_meta)


def recomputed() -> None:
    commgrid.initialize(tp=2)

    def run(x: Tensor) -> Tensor:
        x = F.dropout(x.sin(), 0.5)
        with sharded_rng("tp"):
            return F.dropout(x.exp(), 0.5)

    for reentrant in (False, True):
        gradients = []
        for how in (run, partial(checkpoint, run, use_reentrant=reentrant)):
            set_random_seed(3)
            x = torch.linspace(0, 1, 64, requires_grad=True)
            how(x).sum().backward()
            assert x.grad is not None
            gradients.append(x.grad)
        assert torch.equal(*gradients)
        masks = all_gather(gradients[0], "tp").chunk(2)
        assert not torch.equal(*masks)


def test_restored_under_activation_checkpointing() -> None:
    run_on_ranks(recomputed, 2)
