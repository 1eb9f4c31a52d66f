"""`commgrid.advisor.crossing` by its earlier name, which goes with release 0.3."""

from commgrid.advisor.crossing import *  # noqa: F403
