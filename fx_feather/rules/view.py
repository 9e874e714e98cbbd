"""Rules of operators that only move elements: views, permutations, joins, and factories."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .local import Local
from .pointwise import broadcast, named, sets, sizes_of
from .rule import Dim, Factors, OpCall, Operand, Rule, Sharding, register


def regroup(before: Sequence[int], after: Sequence[int]) -> tuple[Factors, Factors, dict[str, int], frozenset[str]]:
    """The factors of two shapes of one order of elements, their sizes, and those that must stay whole.

    >>> regroup((4, 6), (4, 2, 3))[:2]
    ((('v0',), ('v1', 'v2')), (('v0',), ('v1',), ('v2',)))
    """
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]

    def new(n: int, stays: bool = False) -> str:
        name = f"v{len(sizes)}"
        sizes[name] = n
        if stays:
            whole.add(name)
        return name

    if 0 in before:
        for dims, shape in ((left, before), (right, after)):
            for dim, n in zip(dims, shape, strict=True):
                dim.append(new(n, True))
    else:
        _match(list(before), list(after), left, right, new)

    def frozen(dims: list[list[str]]) -> Factors:
        return tuple(tuple(d) for d in dims)

    return frozen(left), frozen(right), sizes, frozenset(whole)


def _match(
    before: list[int], after: list[int], left: list[list[str]], right: list[list[str]], new: Callable[..., str]
) -> None:
    i = j = 0
    while i < len(before) or j < len(after):
        # A dim used up by its factors, or of size 1 on one side only, takes no further part.
        if i < len(before) and j < len(after) and before[i] == after[j] == 1 and not left[i] and not right[j]:
            f = new(1)
            left[i], right[j] = [f], [f]
            i, j = i + 1, j + 1
        elif i < len(before) and before[i] == 1:
            i += 1
        elif j < len(after) and after[j] == 1:
            j += 1
        else:
            n = math.gcd(before[i], after[j])
            if n in (before[i], after[j]):
                f = new(n)
                left[i].append(f)
                right[j].append(f)
                before[i], after[j] = before[i] // n, after[j] // n
                i, j = i + (before[i] == 1), j + (after[j] == 1)
                continue
            # Neither size divides the other: a major factor is shared, and what follows is mixed up to the next
            # place where both shapes have a border.
            if n > 1:
                f = new(n)
                left[i].append(f)
                right[j].append(f)
                before[i], after[j] = before[i] // n, after[j] // n
            mixed_left, mixed_right = before[i], after[j]
            left[i].append(new(before[i], True))
            right[j].append(new(after[j], True))
            i, j = i + 1, j + 1
            while mixed_left != mixed_right:
                if mixed_left < mixed_right:
                    mixed_left *= before[i]
                    left[i].append(new(before[i], True))
                    i += 1
                else:
                    mixed_right *= after[j]
                    right[j].append(new(after[j], True))
                    j += 1


def _resized(at: int, name: str) -> Callable[..., Any]:
    """Rewrite that puts the local shape of the result in the place of the size argument."""

    def rewrite(args: tuple[Any, ...], kwargs: dict[str, Any], shapes: list[tuple[int, ...]]) -> Any:
        size = list(shapes[0])
        if len(args) > at:
            return (*args[:at], size, *args[at + 1 :]), kwargs
        return args, {**kwargs, name: size}

    return rewrite


def _viewing(rewrite: Callable[..., Any] | None = None) -> Callable[[OpCall], Sharding]:
    def shard(call: OpCall) -> Sharding:
        x = call.operands[0]
        left, right, sizes, whole = regroup(x.shape, call.outs[0].shape)
        others = tuple(((),) * o.ndim for o in call.operands[1:])
        ignored = frozenset(o.index for o in call.operands[1:])

        def run(local: Local, operands: list[Tensor]) -> Tensor:
            return operands[0].reshape(local.results[0].local_shape(local.mesh))

        return Sharding(
            (left, *others),
            (right,),
            sizes,
            whole=whole,
            linear=sets([x]),
            ignored=ignored,
            rewrite=rewrite,
            # These mean another thing on a part: a dim may have size 1 on one rank only.
            run=run if rewrite is None else None,
        )

    return shard


register("view.default _unsafe_view.default", Rule(_viewing(_resized(1, "size")), text="from the two shapes"))
register("reshape.default", Rule(_viewing(_resized(1, "shape")), text="from the two shapes"))
register(
    "flatten.using_ints unflatten.int view_as.default reshape_as.default", Rule(_viewing(), text="from the two shapes")
)
register("squeeze.default squeeze.dim squeeze.dims ravel.default", Rule(_viewing(), text="from the two shapes"))


def _unsqueeze(call: OpCall) -> Sharding:
    x = call.operands[0]
    at = call.dim(1, ndim=x.ndim + 1)
    factors = named(x.shape)
    return Sharding((factors,), ((*factors[:at], (), *factors[at:]),), sizes_of((factors, x.shape)), linear=sets([x]))


register("unsqueeze.default", Rule(_unsqueeze, text="... -> ... 1 ..."))


def _permuted(call: OpCall) -> Sharding:
    x = call.operands[0]
    factors = named(x.shape)
    # The operator itself says where each dim goes, on a tensor whose dims all have sizes of their own.
    args = tuple(None if isinstance(a, Operand) else a for a in call.args[1:])
    with _disable_current_modes():
        moved = call.target(torch.empty([i + 2 for i in range(x.ndim)], device="meta"), *args, **call.kwargs)
    out = tuple(factors[n - 2] for n in moved.shape)
    return Sharding((factors,), (out,), sizes_of((factors, x.shape)), linear=sets([x]))


register(
    """transpose.int permute.default t.default movedim.int movedim.intlist moveaxis.int moveaxis.intlist
    swapaxes.default swapdims.default numpy_T.default matrix_H.default mT.default mH.default adjoint.default""",
    Rule(_permuted, text="dims in another order"),
)


def _expanding(call: OpCall) -> Sharding:
    def run(local: Local, operands: list[Tensor]) -> Tensor:
        return operands[0].expand(local.results[0].local_shape(local.mesh))

    x = call.operands[0]
    return broadcast(call, sets([x]), frozenset(o.index for o in call.operands[1:]), run=run)


register("expand.default expand_as.default broadcast_to.default", Rule(_expanding, text="from broadcasting"))


def _repeat(call: OpCall) -> Sharding:
    x, repeats = call.operands[0], call.args[1]
    lead = len(repeats) - x.ndim
    factors = named(x.shape)
    sizes = sizes_of((factors, x.shape))
    out: list[Dim] = []
    for i, r in enumerate(repeats):
        own = factors[i - lead] if i >= lead else ()
        if r == 1:
            out.append(own)
        else:
            sizes[f"r{i}"] = r
            out.append((f"r{i}", *own))
    return Sharding((factors,), (tuple(out),), sizes, linear=sets([x]))


register("repeat.default tile.default", Rule(_repeat, text="n -> (r n)"))


def _repeat_interleave(call: OpCall) -> Sharding:
    x, r, dim = call.operands[0], call.args[1], call.arg(2, "dim")
    factors = named(x.shape)
    sizes = {**sizes_of((factors, x.shape)), "r": r}
    if dim is None:
        # Flattened first, so that only the major dim can be split.
        out: Factors = ((*(f for d in factors for f in d), "r"),)
        return Sharding((factors,), (out,), sizes, linear=sets([x]))
    at = dim % x.ndim
    out = tuple((*f, "r") if i == at and r > 1 else f for i, f in enumerate(factors))

    def rewrite(args: tuple[Any, ...], kwargs: dict[str, Any], shapes: list[tuple[int, ...]]) -> Any:
        return args, {k: v for k, v in kwargs.items() if k != "output_size"}

    return Sharding((factors,), (out,), sizes, linear=sets([x]), rewrite=rewrite)


register("repeat_interleave.self_int", Rule(_repeat_interleave, text="n -> (n r)"))


def _cat(call: OpCall) -> Sharding:
    ndim = call.outs[0].ndim
    at = call.dim(1, ndim=ndim)
    # An empty tensor of one dim may be joined with any others; it has no part in the result.
    joined = [o for o in call.operands if o.ndim == ndim]
    out = tuple(() if i == at else (f"d{i}",) for i in range(ndim))
    operands: list[Factors] = []
    sizes = {f"d{i}": n for i, n in enumerate(call.outs[0].shape) if i != at}
    for o in call.operands:
        if o not in joined:
            operands.append(((),) * o.ndim)
            continue
        sizes[f"c{o.index}"] = o.shape[at]
        operands.append(tuple((f"c{o.index}",) if i == at else f for i, f in enumerate(out)))
    whole = frozenset(f"c{o.index}" for o in joined)
    return Sharding(tuple(operands), (out,), sizes, whole=whole, linear=sets(list(call.operands)))


register("cat.default concat.default concatenate.default", Rule(_cat, text="!c ..., !c ... -> c ..."))


def _stack(call: OpCall) -> Sharding:
    at = call.dim(1, ndim=call.outs[0].ndim)
    factors = named(call.operands[0].shape)
    return Sharding(
        tuple(factors for _ in call.operands),
        ((*factors[:at], (), *factors[at:]),),
        sizes_of((factors, call.operands[0].shape)),
        linear=sets(list(call.operands)),
        spread=True,
    )


register("stack.default", Rule(_stack, text="..., ... -> n ..."))


def _factory(call: OpCall) -> Sharding:
    results = tuple(named(o.shape) for o in call.outs)
    sizes = sizes_of(*((r, o.shape) for r, o in zip(results, call.outs, strict=True)))
    operands = tuple(((),) * o.ndim for o in call.operands)
    return Sharding(operands, results, sizes, ignored=frozenset(o.index for o in call.operands))


register(
    """arange.default arange.start arange.start_step full.default zeros.default ones.default empty.memory_format
    scalar_tensor.default eye.default eye.m linspace.default tril_indices.default triu_indices.default
    new_zeros.default new_ones.default new_full.default new_empty.default""",
    Rule(_factory, text="-> whole"),
)
