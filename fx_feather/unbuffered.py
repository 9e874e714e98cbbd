"""Flat buffers that nobody needs: a collective of values that are joined for it takes them as they lie."""

import torch
from torch import fx

aten = torch.ops.aten


def unbuffered(graph: fx.Graph) -> bool:
    """Edits a graph in place: no buffer is made of values that are joined for a collective and taken apart after it.

    `split(psum(cat([a, b])), [2, 3])` becomes `psum.many([a, b])`. So does an all-gather along dim 0 of joined vectors,
    of which those of a rank are seen as a row before they are taken apart, and a reduce-scatter along dim 0 of matrices
    with a row for each rank, joined along dim 1.

    Keeps results bit for bit: the same numbers move and are added in the same order.

    Args:
        graph: collectives are Python functions; one that takes many values has an attribute `many` that does, which has
            the attribute `ranks`.

    Returns:
        whether there is any such collective.
    """
    edited = False
    for n in list(graph.nodes):
        many = getattr(n.target, "many", None)
        found = None if many is None or len(n.users) != 1 else _joined_and_split(n, many.__name__, many.ranks)
        if found is None:
            continue
        edited = True
        cat, between, split = found
        n.target, n.args, n.meta = many, (list(cat.args[0]),), dict(split.meta)
        split.replace_all_uses_with(n)
        for x in (split, *between, cat):
            graph.erase_node(x)
    return edited


def _joined_and_split(n: fx.Node, name: str, ranks: int) -> tuple[fx.Node, list[fx.Node], fx.Node] | None:
    """What joins the operand of a collective, a view of its result, and what takes that apart, if they fit."""
    (cat,), (after,) = n.args, n.users
    between = [after] if after.target is aten.view.default and len(after.users) == 1 else []
    split = next(iter(after.users)) if between else after
    if cat.target is not aten.cat.default or split.target is not aten.split_with_sizes.default or len(cat.users) > 1:
        return None
    pieces = [x.meta["val"] for x in cat.args[0]]
    sizes = [x.shape[-1] for x in pieces if x.ndim]
    lead = [ranks] if name == "reduce_scatter" else []
    alike = all(list(x.shape[:-1]) == lead and x.ndim == len(lead) + 1 and x.dtype == pieces[0].dtype for x in pieces)
    # As they are taken apart: a vector, or a row for each rank.
    shape = [*([ranks] if name == "all_gather" else []), sum(sizes)]
    source = split.args[0].meta["val"]
    along = _dim(cat, 1, len(lead) + 1), _dim(split, 2, len(shape))
    fits = alike and list(source.shape) == shape and split.args[1] == sizes and along == (len(lead), len(shape) - 1)
    return (cat, between, split) if fits else None


def _dim(n: fx.Node, at: int, ndim: int) -> int:
    dim = n.args[at] if len(n.args) > at else n.kwargs.get("dim", 0)
    return int(dim) % ndim
