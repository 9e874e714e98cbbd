"""Rules of lookups: a looked-up dim that is split gives each rank the rows it holds, and zeros for others."""

import dataclasses
import functools as ft
from collections.abc import Callable

import torch
from torch import Tensor

from ..collectives import axis_index
from ..errors import RuleError, fail
from .local import Local
from .pointwise import named, sets, sizes_of
from .rule import Dim, Factors, OpCall, Operand, Rule, Sharding, register


def held(local: Local, factor: str, index: Tensor, wraps: bool = False) -> tuple[Tensor, Tensor]:
    """Where this rank holds what `index` names along a split factor, and whether it does; elsewhere row 0."""
    at, true = local.positions(factor, index.device)
    if wraps:
        index = torch.where(index < 0, index + local.sharding.sizes[factor], index)
    row = index - at[0]
    inside = (row >= 0) & (row < at.shape[0])
    row = torch.where(inside, row, 0)
    return row, inside & true[row]


def filler(local: Local, factor: str, index: Tensor, dtype: torch.dtype, wraps: bool = False) -> Tensor:
    """What stands for a row that this rank doesn't hold: 0, or NaN where nobody does, like `index`.

    On one device an index outside of a dim is an error; zeros on all ranks would hide it. Integers have no NaN.
    """
    zero = torch.zeros((), dtype=dtype, device=index.device)
    if not dtype.is_floating_point:
        return zero.expand(index.shape)
    size = local.sharding.sizes[factor]
    return torch.where((index >= (-size if wraps else 0)) & (index < size), zero, float("nan"))


def _refuse(call: OpCall, option: str, why: str) -> None:
    fail(
        RuleError,
        call=str(call.target),
        got=f"{option}=True",
        number=f"{option} is set",
        rule=why,
        fix=f"leave out {option}",
    )


def _embedding(call: OpCall) -> Sharding:
    weight, index = call.operands
    if call.arg(3, "scale_grad_by_freq", False):
        _refuse(call, "scale_grad_by_freq", "a rank sees only its own tokens, so it can't count all of them")
    if call.arg(4, "sparse", False):
        _refuse(call, "sparse", "a gradient is a dense tensor of the parameter's shape")
    padding = call.arg(2, "padding_idx", -1)

    def lookup(local: Local, operands: list[Tensor]) -> Tensor:
        rows, hit = held(local, "v", operands[1])
        other = filler(local, "v", operands[1], operands[0].dtype)
        found = torch.ops.aten.embedding.default(operands[0], rows)
        out = torch.where(hit.unsqueeze(-1), found, other.unsqueeze(-1))
        if padding < 0:
            return out
        # The row of the padding token is read but takes no gradient.
        return torch.where((operands[1] == padding).unsqueeze(-1), out.detach(), out)

    of_index = named(index.shape)
    sizes = {**sizes_of((of_index, index.shape)), "v": weight.shape[0], "d": weight.shape[1]}
    return Sharding(
        ((("v",), ("d",)), of_index), ((*of_index, ("d",)),), sizes, linear=sets([weight]), lower={"v": lookup}
    )


register("embedding.default", Rule(_embedding, text="v d, ... -> ... d"))


def _masked(call: OpCall, factor: str, at: int, wraps: bool = False) -> Callable[[Local, list[Tensor]], Tensor]:
    """Lowering of a gather along a split dim: what other ranks hold is zero here."""

    def lookup(local: Local, operands: list[Tensor]) -> Tensor:
        rows, hit = held(local, factor, operands[1], wraps)
        out = (
            call.target(operands[0], at, rows)
            if not isinstance(call.args[1], Operand)
            else call.target(operands[0], rows, at)
        )
        return torch.where(hit, out, filler(local, factor, operands[1], out.dtype, wraps))

    return lookup


def _gather(call: OpCall) -> Sharding:
    x, index = call.operands
    at = call.dim(1)
    of_x: list[Dim] = []
    of_index: list[Dim] = []
    whole: set[str] = set()
    sizes: dict[str, int] = {}
    for i, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)):
        shared = n == m and i != at
        of_x.append((f"d{i}",))
        of_index.append((f"d{i}",) if shared else (f"j{i}",))
        sizes[f"d{i}"] = n
        sizes.setdefault(of_index[-1][0], m)
        # A row of a shorter index names the same row of the operand: neither can be split alone.
        if not shared and i != at:
            whole |= {f"d{i}", f"j{i}"}
    return Sharding(
        (tuple(of_x), tuple(of_index)),
        (tuple(of_index),),
        sizes,
        whole=frozenset(whole),
        linear=sets([x]),
        lower={f"d{at}": _masked(call, f"d{at}", at)} if x.ndim else {},
    )


register("gather.default", Rule(_gather, text="v ..., j ... -> j ..."))


def _take_along_dim(call: OpCall) -> Sharding:
    x, index = call.operands
    at = call.dim(2, "dim") if call.arg(2, "dim") is not None else None
    if at is None:
        flat, of_index = tuple((f"x{i}",) for i in range(x.ndim)), named(index.shape)
        sizes = sizes_of((flat, x.shape), (of_index, index.shape))
        return Sharding((flat, of_index), (named(call.outs[0].shape),), sizes, whole=frozenset(sizes))
    out = call.outs[0].shape
    of_x = tuple(("v",) if i == at else (f"d{i}",) if n == out[i] else () for i, n in enumerate(x.shape))
    of_chosen = tuple((f"d{i}",) if n == out[i] else () for i, n in enumerate(index.shape))
    sizes = {**sizes_of((named(out), out)), "v": x.shape[at]}
    return Sharding((of_x, of_chosen), (named(out),), sizes, linear=sets([x]), lower={"v": _masked(call, "v", at)})


register("take_along_dim.default", Rule(_take_along_dim, text="v ..., j ... -> j ..."))


def _index_select(call: OpCall) -> Sharding:
    x, index = call.operands
    at = call.dim(1)
    of_x = named(x.shape)
    out = tuple(("j",) if i == at else f for i, f in enumerate(of_x))

    def lookup(local: Local, operands: list[Tensor]) -> Tensor:
        rows, hit = held(local, f"d{at}", operands[1])
        picked = operands[0].index_select(at, rows)
        shape = [-1 if i == at else 1 for i in range(picked.ndim)]
        other = filler(local, f"d{at}", operands[1], picked.dtype)
        return torch.where(hit.view(shape), picked, other.view(shape))

    of_index: Factors = (("j",),) if index.ndim else ()
    sizes = {**sizes_of((of_x, x.shape)), "j": call.outs[0].shape[at] if x.ndim else 1}
    return Sharding((of_x, of_index), (out,), sizes, linear=sets([x]), lower={f"d{at}": lookup} if x.ndim else {})


register("index_select.default", Rule(_index_select, text="v ..., j -> j ..."))


def _broadcast_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))


def _index(call: OpCall) -> Sharding:
    x, indices = call.operands[0], list(call.args[1])
    used = [(i, o) for i, o in enumerate(indices) if isinstance(o, Operand)]
    for _, o in used:
        if o.dtype in (torch.bool, torch.uint8):
            fail(
                RuleError,
                call=str(call.target),
                got=f"a mask of shape {list(o.shape)} as index",
                number="the size of the result depends on the values of the mask",
                rule="a global program has sizes that are known when it is traced",
                fix="torch.where(mask, x, 0)",
            )
    shape = _broadcast_shape([o.shape for _, o in used])
    at = [i for i, _ in used]
    # Indices side by side give their dims in their own place; apart from each other, in front.
    front = 0 if at != list(range(at[0], at[-1] + 1)) else at[0]
    of_x = named(x.shape)
    kept = [f for i, f in enumerate(of_x) if i not in at]
    # Where an index counts the places of its own dim, as `arange(n)` does, row goes with row: they are one factor.
    paired: dict[int, int] = {}
    for i, o in used:
        k = len(shape) - o.ndim + o.counts if o.counts is not None else -1
        if k >= 0 and shape[k] == x.shape[i] and k not in paired.values():
            paired[i] = k
    own = {k: f"d{i}" for i, k in paired.items()}
    looked_up = tuple((own.get(k, f"j{k}"),) for k in range(len(shape)))
    out = (*kept[:front], *looked_up, *kept[front:])
    operands = [of_x]
    for _, o in used:
        lead = len(shape) - o.ndim
        operands.append(tuple(looked_up[lead + i] if n == shape[lead + i] else () for i, n in enumerate(o.shape)))
    sizes = {**sizes_of((of_x, x.shape)), **{f: n for (f,), n in zip(looked_up, shape, strict=True)}}

    def lookup(local: Local, tensors: list[Tensor]) -> Tensor:
        rows: list[Tensor | None] = [None] * len(indices)
        inside: list[Tensor] = []
        others: list[Tensor] = []
        for (i, o), index in zip(used, tensors[1:], strict=True):
            rows[i] = index
            if i in paired:
                n = tensors[0].shape[i]
                rows[i] = torch.arange(n, device=index.device).view([n if k == o.counts else 1 for k in range(o.ndim)])
            elif local.axes(f"d{i}"):
                rows[i], hit = held(local, f"d{i}", index, wraps=True)
                inside.append(hit)
                others.append(filler(local, f"d{i}", index, x.dtype, wraps=True))
        picked = torch.ops.aten.index.Tensor(tensors[0], rows)
        if not inside:
            return picked
        hit, other = ft.reduce(torch.logical_and, inside), ft.reduce(torch.add, others)
        behind = (1,) * (len(kept) - front)
        return torch.where(hit.reshape(hit.shape + behind), picked, other.reshape(other.shape + behind))

    return Sharding(
        tuple(operands), (out,), sizes, linear=sets([x]), lower={f"d{i}": lookup for i in at if i not in paired},
        run=lookup if paired else None,
    )  # fmt: skip


register("index.Tensor", Rule(_index, text="v ..., j -> j ..."))


def _one_hot(call: OpCall) -> Sharding:
    if call.arg(1, "num_classes", -1) < 0:
        fail(
            RuleError,
            call="one_hot(index)",
            got="no num_classes",
            number="the size of the result depends on the largest value",
            rule="a global program has sizes that are known when it is traced",
            fix="one_hot(index, num_classes)",
        )
    factors, n = named(call.operands[0].shape), call.arg(1, "num_classes")

    def run(local: Local, operands: list[Tensor]) -> Tensor:
        # The operator itself looks at the values, to see that they are in range: that can't be traced.
        (index,) = operands
        return (index.unsqueeze(-1) == torch.arange(n, device=index.device)).to(index.dtype)

    return Sharding((factors,), ((*factors, ()),), sizes_of((factors, call.operands[0].shape)), run=run)


register("one_hot.default", Rule(_one_hot, text="... -> ... n"))


def _scatter(added: bool) -> Callable[[OpCall], Sharding]:
    def shard(call: OpCall) -> Sharding:
        x, *rest = call.operands
        at = call.dim(1)
        of_x = named(x.shape)
        sizes = sizes_of((of_x, x.shape))
        whole = {f"d{at}"}
        operands: list[Factors] = [of_x]
        for o in rest:
            dims: list[Dim] = []
            for i, n in enumerate(o.shape):
                if i != at and all(r.shape[i] == x.shape[i] for r in rest if r.ndim):
                    dims.append((f"d{i}",))
                    continue
                name = f"s{o.index}_{i}"
                sizes[name] = n
                whole |= {name, f"d{i}"}
                dims.append((name,))
            operands.append(tuple(dims))
        terms = [x, *rest[1:]]
        constant = len(rest) == 1 and call.arg(3, "value", 0) != 0
        linear = () if constant or (not added and call.kwargs.get("reduce")) else sets(terms)
        return Sharding(tuple(operands), (of_x,), sizes, whole=frozenset(whole), linear=linear)

    return shard


register("scatter.src scatter.value", Rule(_scatter(False), text="!v ..., !j ..., !j ... -> !v ..."))
register("scatter_add.default", Rule(_scatter(True), text="!v ..., !j ..., !j ... -> !v ..."))


def _index_add(call: OpCall) -> Sharding:
    x, _, source = call.operands
    at = call.dim(1)
    of_x = named(x.shape)
    of_source = tuple(("j",) if i == at else f for i, f in enumerate(of_x))
    sizes = {**sizes_of((of_x, x.shape)), "j": source.shape[at]}
    whole = frozenset({"j", f"d{at}"})
    return Sharding((of_x, (("j",),), of_source), (of_x,), sizes, whole=whole, linear=sets([x, source]))


def _added_to_zeros(call: OpCall) -> Sharding:
    """Rows that are split are added by each rank to zeros, and then summed: the first rank has what they come to."""
    plain, at = _index_add(call), call.dim(1)

    def add(local: Local, operands: list[Tensor]) -> Tensor:
        x, index, source = operands
        first = axis_index(local.axes("j"), local.mesh.count(local.axes("j")), x.device) == 0
        # Rows of padding are added to row 0: they are zeros by then.
        rows = local.positions("j", x.device)[1]
        index = torch.where(rows, index, 0)
        source = torch.where(rows.view([-1 if i == at else 1 for i in range(source.ndim)]), source, 0)
        return call.target(torch.where(first, x, 0), at, index, source, **call.kwargs)

    return dataclasses.replace(plain, whole=plain.whole - {"j"}, lower={"j": add})


register("index_add.default", Rule(_added_to_zeros, text="!v ..., j, j ... -> !v ..."))


def _ranked(dim_at: int) -> Callable[[OpCall], Sharding]:
    """Shard function of an operator that orders one dim."""

    def shard(call: OpCall) -> Sharding:
        x = call.operands[0]
        at = call.dim(dim_at, default=-1)
        factors = named(x.shape)
        out = tuple(() if i == at else f for i, f in enumerate(factors))
        whole = frozenset({f"d{at}"}) if x.ndim else frozenset[str]()
        return Sharding((factors,), (out,) * len(call.outs), sizes_of((factors, x.shape)), whole=whole)

    return shard


def _kthvalue(call: OpCall) -> Sharding:
    x = call.operands[0]
    at, keepdim = call.dim(2, default=-1), call.arg(3, "keepdim", False)
    factors = named(x.shape)
    out = tuple(() if i == at else f for i, f in enumerate(factors) if keepdim or i != at)
    return Sharding((factors,), (out,) * 2, sizes_of((factors, x.shape)), whole=frozenset({f"d{at}"}))


register("topk.default", Rule(_ranked(2), text="... !d -> ... k, ... k"))
register("sort.default argsort.default", Rule(_ranked(1), text="... !d -> ... d, ... d"))
register("sort.stable argsort.stable", Rule(_ranked(1), text="... !d -> ... d, ... d"))
register("kthvalue.default", Rule(_kthvalue, text="... !d -> ..., ..."))
