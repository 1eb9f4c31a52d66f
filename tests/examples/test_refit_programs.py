"""The engine of another program writes what the trainer's weights in fp8 write in one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import commgrid
from commgrid import checkpoint
from commgrid.launching.process import free_port
from commgrid.testing import run_on_ranks
from tests.examples.curves import ROOT, load
from tests.transfer.test_conversions import quantized

FOLDER = ROOT / "examples" / "refit"
REFITS, TOKENS = 3, 12


def started(program: str, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "4", str(FOLDER / f"{program}.py"), "--refits", str(REFITS), *flags]  # fmt: skip
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def in_one_process(folder: str) -> list[tuple[list[int], float]]:
    """The tokens of each checkpoint, whose matrices were rounded to fp8 in blocks, in fp64; and
    the logit of the last one."""
    moe = load("refit/moe")
    commgrid.initialize(ep=1, etp=1)
    found = []
    for refit in range(REFITS + 1):
        model = moe.Transformer()
        checkpoint.load(folder, model, step=refit, progress=False)
        model.double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "_proj." in name or ".experts." in name:
                    for matrix in parameter.view(-1, *parameter.shape[-2:]):
                        made = quantized("w", matrix.float(), moe.BLOCK)
                        rows = made["w_scale_inv"].double().repeat_interleave(moe.BLOCK[0], 0)
                        scales = rows.repeat_interleave(moe.BLOCK[1], 1)
                        matrix.copy_(made["w"].double() * scales)
            tokens, logit = list(moe.PROMPT), 0.0
            for _ in range(TOKENS):
                logits = model(torch.tensor([tokens]))[0, -1]
                tokens.append(int(logits.argmax()))
                logit = logits.max().item()
        found.append((tokens[len(moe.PROMPT) :], logit))
    commgrid.shutdown()
    return found


@pytest.mark.full
def test_tokens_before_and_after_each_refit(tmp_path: Path) -> None:
    store = f"127.0.0.1:{free_port()}"
    engine = started("engine", "--store", store, "--tokens", str(TOKENS))
    trainer = started("trainer", "--store", store, "--save", str(tmp_path), "--steps", "20")
    try:
        said, trained = (program.communicate(timeout=300)[0] for program in (engine, trainer))
    finally:
        for program in (engine, trainer):
            program.kill()
    assert (engine.returncode, trainer.returncode) == (0, 0), said + trained
    assert f"refit {REFITS}  loss" in trained
    line = r"(before|after) refit (\d)  \[(.*)\]  logit (\S+)"
    found = {
        (when, int(refit)): ([*map(int, tokens.split(", "))], pytest.approx(float(logit), rel=1e-7))
        for when, refit, tokens, logit in re.findall(line, said)
    }
    (expected,) = run_on_ranks(in_one_process, 1, str(tmp_path))
    assert len({logit for _, logit in expected}) == REFITS + 1, "a refit that changes nothing"
    for refit, each in enumerate(expected):
        assert found.pop(("after", refit)) == each, refit
        if refit:
            assert found.pop(("before", refit)) == expected[refit - 1], refit
    assert not found
