"""`commgrid.advisor.collectives` by its earlier name, which goes with release 0.3."""

from commgrid.advisor.collectives import *  # noqa: F403
