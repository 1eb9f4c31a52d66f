"""Full tensors in boxes: which rank holds which of them, and how ranks exchange them.

    boxes, items, model_state, optimizer_state   the boxes that a rank holds of a model
    layouts, held                                their description for the other ranks
    pools, shares, plan                          the messages of all ranks, computed without torch
    ring, transport, ending                      the exchange of messages, in bounded memory

Checkpoints, transfers between grids and states kept in memory are made of these.
"""
