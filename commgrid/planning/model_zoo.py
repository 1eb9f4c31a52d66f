"""`commgrid.advisor.models` by its earlier name, which goes with release 0.3."""

from commgrid.advisor.models import *  # noqa: F403
