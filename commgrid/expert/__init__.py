"""Expert parallelism: which experts see which tokens."""

from commgrid.expert.router import Router, Routing

__all__ = ["Router", "Routing"]
