"""Tensors in boxes: who has which part of a full one, and how it comes to who needs it.

    boxes, items, model_state, optimizer_state   what a rank has of a model: boxes of full tensors
    layouts, held                                what all ranks tell each other of that
    pools, shares, plan                          who sends what to whom: arithmetic, without torch
    ring, transport, ending                      a plan carried out, in bounded memory

Checkpoints, transfers between grids and states kept in memory are made of these.
"""
