"""Megatron-core, to compare with; importing it makes torch and others warn, which is theirs."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core")  # whatever imports this is skipped without it
    from megatron.core import parallel_state
    from megatron.core.parallel_state import RankGenerator

__all__ = ["RankGenerator", "parallel_state"]
