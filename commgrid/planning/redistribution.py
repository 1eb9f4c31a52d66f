"""`commgrid.advisor.redistribution` by its earlier name, which goes with release 0.3."""

from commgrid.advisor.redistribution import *  # noqa: F403
