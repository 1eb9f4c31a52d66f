"""`commgrid.advisor.cluster` by its earlier name, which goes with release 0.3."""

from commgrid.advisor.cluster import *  # noqa: F403
