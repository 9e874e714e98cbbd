"""Reuse of memory: operators write their result over an operand that nobody needs any more."""

import operator
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

#: Operators whose operands may change places, bit for bit.
_COMMUTE = {aten.add.Tensor, aten.mul.Tensor}

#: Operators that give their operand's memory, whatever their schemas say.
_SAME_MEMORY = {aten._unsafe_view.default, aten._reshape_alias.default}


def held_alone(xs: list[torch.Tensor], k: int) -> bool:
    """Whether nobody but this list holds the tensor at a place in it, and no other tensor or array its memory."""
    storage = xs[k].untyped_storage()
    # Another process may hold what is shared, and who brought memory of his own what can't be resized.
    if sys.getrefcount(storage) != _ALONE_STORAGE or storage.is_shared() or not storage.resizable():
        return False
    # Not only Python holds tensors: a collective under way does, and an array or a capsule made from one.
    # Without that count it can't be known.
    if not _COUNTS or _references(xs, k) != _ALONE or xs[k]._use_count() != 1:  # type: ignore[attr-defined]
        return False
    holders = 2  # the tensor's own, and the one asked here
    base = xs[k]._base
    if base is not None:
        # A view keeps the tensor that it is a view of, which then nobody else may hold either.
        if sys.getrefcount(base) != _ALONE_BASE or base._use_count() != 2:  # type: ignore[attr-defined]
            return False
        holders += 1
    return torch._C._storage_Use_Count(storage._cdata) == holders


def _references(xs: list[torch.Tensor], k: int) -> int:
    return sys.getrefcount(xs[k])


def _storage_references(xs: list[torch.Tensor], k: int) -> int:
    storage = xs[k].untyped_storage()
    return sys.getrefcount(storage)


def _base_references(x: torch.Tensor) -> int:
    base = x._base
    return sys.getrefcount(base)


_COUNTS = hasattr(torch.Tensor, "_use_count")

# Counted in the same way: how many the interpreter itself adds depends on its version.
_ALONE = _references([torch.empty(0)], 0)
_ALONE_STORAGE = _storage_references([torch.empty(0)], 0)
_ALONE_BASE = _base_references(torch.empty(0).view(0))


def reuse(graph: fx.Graph, given: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Edits a graph in place: `c = a + b` becomes `c = a.add_(b)` where `a` was made in this graph and is used up.

    Keeps results bit for bit: an operator in place runs the same kernel. Fresh memory costs more than the arithmetic
    of an operator: it is not in the cache yet.

    A Python function in the place of an operator says by `in_place` what may write over its operand, if there is such,
    and by `fresh` that nobody else holds its result; so does an operator that is not PyTorch's own.

    Args:
        graph: the graph.
        given: what comes in and may be written over, since nobody else needs it; nothing else that comes in is.

    Returns:
        Those of `given` that are written over.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    owner: dict[fx.Node, fx.Node | None] = {}
    sharing: dict[fx.Node, list[fx.Node]] = {}
    kept = set(graph.output_node().all_input_nodes)
    written: set[fx.Node] = set()
    for n in graph.nodes:
        owner[n] = n if n in given else _owner(n, owner)
        if n.op == "call_function":
            for k in (0, 1) if n.target in _COMMUTE and len(n.args) == 2 and not n.kwargs else (0,):
                target = _in_place(n, k)
                if target is None:
                    continue
                a = n.args[k]
                root = owner[a]
                if root is None or _size(root) != _size(n):
                    continue
                # Nothing that lies in this memory may be read later, or by this operator as another operand.
                alike = sharing[root]
                if any(x in kept or any(order[u] > order[n] for u in x.users) for x in alike):
                    continue
                if sum(x in alike for x in _operands(n)) != 1:
                    continue
                n.args = (a, *(x for i, x in enumerate(n.args) if i != k))
                n.target = target
                owner[n] = root
                written.add(root)
                break
        root = owner[n]
        if root is not None:
            sharing.setdefault(root, []).append(n)
    return written.intersection(given)


def made_inside(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory was made in this graph, so that `reuse` may write over it."""
    owner: dict[fx.Node, fx.Node | None] = {}
    for n in graph.nodes:
        owner[n] = _owner(n, owner)
    return {n for n, root in owner.items() if root is not None}


def _operands(n: fx.Node) -> list[fx.Node]:
    """All nodes among the arguments, one for each time it stands there."""
    found: list[fx.Node] = []
    fx.node.map_arg((n.args, n.kwargs), found.append)
    return found


def _owner(n: fx.Node, owner: dict[fx.Node, fx.Node | None]) -> fx.Node | None:
    """The node that made the memory in which the result of `n` lies; None if it came from outside, or may have."""
    if n.target is operator.getitem:
        return owner.get(n.args[0])  # one of several views, such as a part that `split` gives
    if getattr(n.target, "fresh", False):
        return n if isinstance(n.meta.get("val"), torch.Tensor) else None
    if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload) or n.target.namespace != "aten":
        return None
    written = [a.name for a in n.target._schema.arguments if a.is_out]
    if written:
        return owner.get(n.kwargs.get(written[0]))
    shares = n.target in _SAME_MEMORY or any(r.alias_info is not None for r in n.target._schema.returns)
    if shares:
        return owner.get(n.args[0]) if isinstance(n.args[0], fx.Node) else None
    if len(n.target._schema.returns) != 1 or not isinstance(n.meta.get("val"), torch.Tensor):
        return None
    # A composite operator may give an operand back, and says nothing of it.
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(n.target.name(), "CompositeImplicitAutograd")
    return None if composite else n


def _in_place(n: fx.Node, k: int) -> Callable[..., Any] | None:
    """The operator that writes the result of `n` over its operand `k`, if there is one and the result fits there."""
    target, val = n.target, n.meta.get("val")
    a = n.args[k] if len(n.args) > k else None
    old = a.meta.get("val") if isinstance(a, fx.Node) else None
    if not isinstance(old, torch.Tensor) or not isinstance(val, torch.Tensor):
        return None
    if (old.shape, old.stride(), old.dtype, old.device) != (val.shape, val.stride(), val.dtype, val.device):
        return None
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "in_place", None)
    fine = torch.Tag.pointwise in target.tags or target is aten.scatter_add.default
    if target.namespace != "aten" or not fine or target._schema.is_mutable:
        return None
    packet = getattr(aten, target.overloadpacket.__name__ + "_", None)
    found = getattr(packet, target._overloadname, None)
    if found is None or [x.name for x in found._schema.arguments] != [x.name for x in target._schema.arguments]:
        return None
    return found


def _size(n: fx.Node) -> int:
    return n.meta["val"].numel() * n.meta["val"].element_size()
