"""Audits: a program's own steps on several grids, compared number by number."""
