"""Tensor parallel with sequence parallel: between the blocks each rank keeps its part of every sequence.

Split: all that tensor parallel splits, and the sequence dim of the residual stream, so that the norms and the residual
additions are split as well.
Replicated: the normed input of each half of a block, and the scales of the norms.
Forward: an all-gather of the sequence where each half of a block starts, and a reduce-scatter of the pending sum where
it ends: two and two a block. One reduce-scatter ends the embedding, one all-gather stands before the head.
Backward: the two change places. The norms act on split tokens and the q/k-norms on split heads, so the gradients of
their scales are summed over the axis, once a step.

Bytes that a rank sends in a microbatch, with A = batch × seq × embed the bytes of the residual stream before it is
split, L blocks and n the ranks of the axis: (4 L + 2) A (n-1)/n forward, and as much backward. These are those of
tensor parallel alone, an all-reduce being a reduce-scatter and an all-gather; what rests between blocks is an n-th.

The dims heads, mlp and residual_seq must divide by the axis; the vocabulary is padded. Fewer kv_heads than ranks are
held whole by all, where the one divides the other.

Source: Korthikanti et al., Reducing Activation Recomputation, 2022, section 4.2.
"""

from fx_feather import Layout

from .tp import tp


def tp_sp(axis: str | tuple[str, ...] = "tp") -> Layout:
    """Heads, MLP, vocabulary and, between blocks, the sequence are split over `axis`.

    >>> tp_sp("tp").compute["residual_seq"]
    ('tp',)
    """
    # The row is the last: where a value has a dim of the weights too, that one is split.
    return tp(axis) | Layout(compute={"residual_seq": axis})
