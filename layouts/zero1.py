"""ZeRO stage 1: data parallel, and each rank keeps and updates its part of the optimizer state.

Split: the batch, the optimizer state.
Replicated: parameters, and gradients while they accumulate.
Forward: nothing but the sum and the count of the loss.
Backward: one reduce-scatter of the gradients, once a step. Microbatches add up a pending sum of their own.
Update: each rank updates the part whose state it has, and the updated parameters are all-gathered.

A parameter without an embed or latent dim (a q/k-norm's scale) stays whole, and its gradient is all-reduced.

Bytes that a rank sends a step, with P the bytes of the parameters and n the ranks of the axis:
P (n-1)/n backward and P (n-1)/n in the update, in all those of DDP.

Source: Rajbhandari et al., ZeRO, 2020, section 5.
"""

from fx_feather import Layout, Store

from .ddp import ddp


def zero1(axis: str | tuple[str, ...] = "dp") -> Layout:
    """The batch and, at rest, the optimizer state are split over `axis`.

    >>> zero1("dp").store.opt
    {'embed': ('dp',), 'latent': ('dp',)}
    """
    return ddp(axis) | Layout(store=Store(opt={"embed": axis, "latent": axis}))
