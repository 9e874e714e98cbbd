"""Data parallel (DDP): each rank takes its part of the batch.

Split: the batch, and so every activation.
Replicated: parameters, gradients, optimizer state.
Forward: nothing but the sum and the count of the loss.
Backward: one all-reduce of the gradients, in buckets, once a step. Microbatches add up a pending sum of their own.
Update: one number, for the norm of large gradients, of which each rank sums a part.

Bytes that a rank sends a step, with P the bytes of the parameters and n the ranks of the axis: 2 P (n-1)/n.

Source: Li et al., PyTorch Distributed, 2020.
"""

from fx_feather import Layout


def ddp(axis: str | tuple[str, ...] = "dp") -> Layout:
    """The batch is split over `axis`.

    >>> ddp("dp")
    Layout(compute={'batch': ('dp',)}, store=Store(params={}, grads={}, opt={}))
    """
    return Layout(compute={"batch": axis})
