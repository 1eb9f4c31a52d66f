"""Failure detection: connections between the ranks of a grid, and which rank is gone or late."""
