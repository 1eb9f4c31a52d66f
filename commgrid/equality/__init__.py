"""Comparison of numbers among ranks: digests of tensors, extremes over a group, noted inputs."""
