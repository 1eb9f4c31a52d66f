"""Mixtures of experts: router, dispatch to the ranks of the experts, experts."""

from commgrid.expert.dispatch import Dispatched, Dispatcher
from commgrid.expert.experts import GroupedExperts
from commgrid.expert.layer import MoELayer
from commgrid.expert.loss_scale import follow_loss_scale, set_loss_scale
from commgrid.expert.router import Router, Routing
from commgrid.expert.shared import SharedExpert

__all__ = [
    "Dispatched",
    "Dispatcher",
    "GroupedExperts",
    "MoELayer",
    "Router",
    "Routing",
    "SharedExpert",
    "follow_loss_scale",
    "set_loss_scale",
]
