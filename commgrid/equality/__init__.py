"""Comparison of numbers among ranks: digests of tensors, noted inputs."""
