"""Context parallel: each rank keeps its part of every sequence, through the whole model.

Split: the sequence dim of all activations, inside of the blocks as well.
Replicated: the parameters; and, inside of attention, the keys and values of the whole sequence (of latent attention
the latents and the keys with positions, which are shorter). Queries stay split.
Forward: an all-gather of keys and of values a block.
Backward: their reduce-scatter; and an all-reduce of the gradients, once a step, as under data parallel.

Bytes that a rank sends in a microbatch, with K = batch × seq × kv_heads × head_dim × bytes an element, L blocks and n
the ranks of the axis: 2 L K (n-1)/n forward, and as much backward.

The parts are contiguous and equal. A rank scores its queries against all keys of the sequence and masks those that come
later, so that all ranks do the same work: about twice that of a causal attention that skips what is masked, over n. The
mask takes seq² / n bytes. What looks along the sequence elsewhere is refused by name, but for running sums and
products, and `ff.associative_scan`. Generation with a cache takes one token at a time, which can't be split: use a
layout without it. There is neither a ring nor an all-to-all of heads yet.

The length of the sequence must divide by the axis (beside tensor with sequence parallel, by both).

Source: Llama Team, The Llama 3 Herd of Models, 2024, section 3.3.2.
"""

from fx_feather import Layout


def cp(axis: str | tuple[str, ...] = "cp") -> Layout:
    """Sequences are split over `axis`; attention gathers their keys and values.

    >>> cp("cp").compute
    {'seq': ('cp',), 'residual_seq': ('cp',)}
    """
    return Layout(compute={"seq": axis, "residual_seq": axis})
