"""Seeing a grid while it runs, and what it has done: traces."""
