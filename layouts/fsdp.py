"""Fully sharded data parallel (FSDP, ZeRO stage 3): stage 2, and the parameters rest in parts too.

Split: the batch; parameters, gradients and optimizer state at rest.
Replicated: the parameters of a block while it computes.
Forward: an all-gather of each block's parameters before its use.
Backward: the all-gather again where the gathered parameters were not kept, and a reduce-scatter of the gradients, in
each microbatch.
Update: nothing, each rank updates what it holds.

A parameter without an embed or latent dim (a q/k-norm's scale) stays whole; its gradient is all-reduced once a step.

Bytes that a rank sends a step, with P the bytes of the parameters (each in the dtype that is sent), m microbatches
and n the ranks of the axis: m P (n-1)/n forward, and m P (n-1)/n backward, 2 m P (n-1)/n where they are gathered again.

Source: Rajbhandari et al., ZeRO, 2020, section 5; Zhao et al., PyTorch FSDP, 2023.
"""

from fx_feather import Layout, Store

from .zero2 import zero2


def fsdp(axis: str | tuple[str, ...] = "fsdp") -> Layout:
    """The batch and, at rest, parameters, gradients and optimizer state are split over `axis`.

    >>> fsdp("dp").store.params
    {'embed': ('dp',), 'latent': ('dp',)}
    """
    return zero2(axis) | Layout(store=Store(params={"embed": axis, "latent": axis}))


zero3 = fsdp
