"""Checkpoints of a preconditioner, with the same content at any number of ranks and any placement.

entries      the tensors of a state: which ranks have each, and its shape
checkpoint   a complete state on every rank, as a plain dictionary
sharding     each rank's own share, for ``torch.distributed.checkpoint``
validation   whether a state fits, before anything is changed
saving       the methods of `natgrad.KFAC`
"""
