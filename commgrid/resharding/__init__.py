"""Full tensors in boxes: which rank holds which of them, and how ranks exchange them.

    item, holders, model_state, optimizer_state   the boxes that a rank holds of a model
    local_boxes, layouts                          their description for the other ranks
    pools, assignment, plan                       the messages of all ranks, by arithmetic alone
    transport, ending                             the exchange of messages, in bounded memory

Checkpoints, transfers between grids and states kept in memory are made of these.
"""
