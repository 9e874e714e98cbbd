"""Tensor parallel: each rank has its part of every weight, and computes with it on all tokens.

Split: heads and the MLP's hidden dim, first weight by columns and second by rows, so that nothing is sent between the
two; the vocabulary in embedding, head and loss; with the weights their gradients and optimizer state.
Replicated: the residual stream, the norms and their scales.
Forward: the conjugate pair around each half of a block: `pvary` where it starts (nothing is sent), and an all-reduce of
the pending sum where it ends. One more all-reduce ends the embedding. The loss reduces a few numbers a token, never the
logits.
Backward: the pair changes places: an all-reduce of the cotangent where each half starts, and one before the head. The
scales of q/k-norms act on split heads, so their gradients are summed over the axis, once a step.

Bytes that a rank sends in a microbatch, with A = batch × seq × embed the bytes of the residual stream of a rank,
L blocks and n the ranks of the axis: (2 L + 1) 2 A (n-1)/n forward, and as much backward.

The dims heads and mlp must divide by the axis; the vocabulary is padded. Of kv_heads there may be fewer than ranks, in
numbers that divide: then all ranks hold them whole, and their gradients are summed.

Source: Shoeybi et al., Megatron-LM, 2019, section 3.
"""

from fx_feather import Layout


def tp(axis: str | tuple[str, ...] = "tp") -> Layout:
    """Heads, MLP and vocabulary are split over `axis`.

    >>> tp("tp").compute
    {'heads': ('tp',), 'kv_heads': ('tp',), 'mlp': ('tp',), 'vocab': ('tp',)}
    """
    return Layout(compute=dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), axis))
