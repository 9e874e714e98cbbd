"""ZeRO stage 2: stage 1, and each rank accumulates its part of the gradients only.

Split: the batch, the gradients while they accumulate, the optimizer state.
Replicated: parameters.
Forward: nothing but the sum and the count of the loss.
Backward: a reduce-scatter of the gradients in each microbatch, so that no rank ever holds the whole sum.
Update: each rank updates its part, and the updated parameters are all-gathered once a step.

A parameter without an embed or latent dim (a q/k-norm's scale) stays whole; its gradient is all-reduced once a step.

Bytes that a rank sends a step, with P the bytes of the parameters, m microbatches and n the ranks of the axis:
m P (n-1)/n backward and P (n-1)/n in the update. Stage 1 sends less where m > 1 and the gradients fit.

Source: Rajbhandari et al., ZeRO, 2020, section 5.
"""

from fx_feather import Layout, Store

from .zero1 import zero1


def zero2(axis: str | tuple[str, ...] = "dp") -> Layout:
    """The batch and, at rest, gradients and optimizer state are split over `axis`.

    >>> zero2("dp").store.grads
    {'embed': ('dp',), 'latent': ('dp',)}
    """
    return zero1(axis) | Layout(store=Store(grads={"embed": axis, "latent": axis}))
