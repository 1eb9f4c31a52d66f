"""Arithmetic on ranks: from sizes and YAML to the plan of every group, without torch."""
