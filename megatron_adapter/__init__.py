"""Megatron-core's names for a commgrid grid."""

from megatron_adapter.names import MEGATRON_GROUPS, MegatronGroup, megatron_names

__all__ = ["MEGATRON_GROUPS", "MegatronGroup", "megatron_names"]
