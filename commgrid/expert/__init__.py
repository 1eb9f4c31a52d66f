"""Mixtures of experts: router, dispatch to the ranks of the experts, experts."""

from commgrid.expert.dispatch import Dispatched, make_dispatcher
from commgrid.expert.experts import GroupedExperts
from commgrid.expert.layer import MoELayer
from commgrid.expert.router import Router, Routing
from commgrid.expert.shared import SharedExpert

__all__ = [
    "Dispatched",
    "GroupedExperts",
    "MoELayer",
    "Router",
    "Routing",
    "SharedExpert",
    "make_dispatcher",
]
