"""Unpatched megatron-core on CUDA over NCCL: its own groups' losses and commgrid's."""

from __future__ import annotations

import shlex
import warnings

import pytest
import torch

from tests.gpu.on_gpus import on_gpus

CASES = {
    "--tp 2": 2,
    "--pp 2": 2,
    "--pp 2 --vpp 2": 2,
    "--tp 2 --pp 2 --distributed-optimizer": 4,
    "--experts 4 --ep 2": 2,
}
"""As on the CPU, but for sequence parallelism, which torch's LayerNorm refuses."""


def losses(given: str) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")
    from examples import megatron_gpt

    torch.use_deterministic_algorithms(True)
    found = {}
    for groups in ("megatron", "commgrid", "collection"):
        args = megatron_gpt.parse(["--groups", groups, *shlex.split(given)])
        found[groups] = megatron_gpt.train(args)
        megatron_gpt.finish(args)
    return found


@pytest.mark.parametrize("given", CASES)
def test_losses_are_the_same(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself with this
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for found in on_gpus(losses, CASES[given], given, timeout=120):
        assert found["commgrid"] == found["megatron"]
        assert found["collection"] == found["megatron"]
