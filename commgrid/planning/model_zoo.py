"""`commgrid.advisor.model` by its earlier name, which goes with release 0.3."""

from commgrid.advisor.model import *  # noqa: F403
