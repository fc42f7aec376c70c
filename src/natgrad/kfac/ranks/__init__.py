"""Several processes: what the plan gives to this rank, and how its tensors travel.

    distributed   what the user chose: placement, group, precision on the wire
    block_specs   blocks as sizes and boxes, for the planner
    team          the plan, and this rank's share of it
    shipments     the messages of some ops, as one all-to-all
    reduction     sums of statistics -> the ranks that keep a factor
    overlap       ... already during the backward pass
    gradients     gradients -> the ranks that precondition them, and back
    agreement     settings as text, to be compared between ranks

Every number that leaves a rank is a message of an op of the plan, so that the bytes that were
predicted and those that were sent can be compared. One process runs the same code with a plan in
which nothing travels.
"""
