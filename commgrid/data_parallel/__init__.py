"""Gradients over the data-parallel group."""

from commgrid.data_parallel.gradients import average_gradients, gradient_norm

__all__ = ["average_gradients", "gradient_norm"]
