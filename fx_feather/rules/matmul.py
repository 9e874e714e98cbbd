"""Rules of products: matmul and its relatives, whose contracted factor is summed over."""

from typing import Any

import torch

from ..errors import RuleError, fail
from .pattern import rule
from .pointwise import aligned, sets, sizes_of
from .rule import Dim, Factors, OpCall, Rule, Sharding, register

rule("mm.default", "m k, k n -> m n", linear="0|1")
rule("bmm.default", "b m k, b k n -> b m n", linear="0|1")
rule("mv.default", "m k, k -> m", linear="0|1")
rule("dot.default", "k, k ->", linear="0|1")
rule("vdot.default", "k, k ->", linear="0|1")
rule("outer.default", "m, n -> m n", linear="0|1")
rule("ger.default", "m, n -> m n", linear="0|1")


def _matmul(call: OpCall) -> Sharding:
    a, b = call.operands
    lead = max(a.ndim, b.ndim) - 2
    m: Factors = () if a.ndim == 1 else (("m",),)
    n: Factors = () if b.ndim == 1 else (("n",),)
    batch = call.outs[0].shape[: max(lead, 0)]
    of_a = (*aligned(a.shape[:-2], batch), *m, ("k",))
    of_b = (*aligned(b.shape[:-2], batch), ("k",), *n)
    out = (*((f"d{i}",) for i in range(len(batch))), *m, *n)
    sizes = sizes_of((of_a, a.shape), (of_b, b.shape), (out, call.outs[0].shape))
    return Sharding((of_a, of_b), (out,), sizes, linear=sets([a], [b]))


register("matmul", Rule(_matmul, text="... m k, ... k n -> ... m n"))


def _linear(call: OpCall) -> Sharding:
    x, w, *bias = call.operands
    lead = tuple((f"d{i}",) for i in range(x.ndim - 1))
    n: Factors = (("n",),) if w.ndim == 2 else ()
    of_bias = tuple(n if b.ndim else () for b in bias)
    sizes = sizes_of(((*lead, ("k",)), x.shape), ((*n, ("k",)), w.shape))
    # The bias is added once only, so with a bias the contracted factor stays whole.
    whole = frozenset({"k"}) if bias else frozenset[str]()
    linear = sets([x, *bias], [w, *bias])
    return Sharding(((*lead, ("k",)), (*n, ("k",)), *of_bias), ((*lead, *n),), sizes, whole=whole, linear=linear)


def _linear_then_add(x: Any, weight: Any, bias: Any = None) -> Any:
    out = torch.ops.aten.linear.default(x, weight)
    return out if bias is None else out + bias


register("linear", Rule(_linear, _linear_then_add, text="... k, n k, n -> ... n"))


def _added(left: str, right: str, out: str) -> Any:
    def shard(call: OpCall) -> Sharding:
        bias, a, b = call.operands
        result = tuple((f,) for f in out)
        lead = call.outs[0].ndim - bias.ndim
        of_bias = tuple((out[lead + i],) if n == call.outs[0].shape[lead + i] else () for i, n in enumerate(bias.shape))
        of_a, of_b = tuple((f,) for f in left), tuple((f,) for f in right)
        sizes = sizes_of((of_a, a.shape), (of_b, b.shape), (result, call.outs[0].shape))
        return Sharding(
            (of_bias, of_a, of_b), (result,), sizes, whole=frozenset({"k"}), linear=sets([bias, a], [bias, b])
        )

    return shard


def _product_then_add(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    out = torch.ops.aten.matmul.default(a, b)
    out = out if alpha == 1 else out * alpha
    # As in torch, a beta of 0 drops even what is not finite.
    return out if beta == 0 else out + (bias if beta == 1 else bias * beta)


register("addmm.default", Rule(_added("mk", "kn", "mn"), _product_then_add, text="m n, m k, k n -> m n"))
register("baddbmm.default", Rule(_added("bmk", "bkn", "bmn"), _product_then_add, text="b m n, b m k, b k n -> b m n"))
register("addmv.default", Rule(_added("mk", "k", "m"), _product_then_add, text="m, m k, k -> m"))


def equation(text: str, ndims: list[int]) -> tuple[list[list[str]], list[str]]:
    """The letters of each operand and of the result of an einsum; those of the ellipsis are named ...0, ...1, ..."""
    left, arrow, right = text.replace(" ", "").partition("->")
    parts = left.split(",")
    letters = [p.replace("...", "") for p in parts]
    longest = max((n - len(s) for n, s, p in zip(ndims, letters, parts, strict=True) if "..." in p), default=0)

    def spelled(part: str, lead: int) -> list[str]:
        before, dots, after = part.partition("...")
        return [*before, *(f"...{longest - lead + i}" for i in range(lead if dots else 0)), *after]

    operands = [spelled(p, n - len(s)) for p, n, s in zip(parts, ndims, letters, strict=True)]
    if arrow:
        return operands, spelled(right, longest)
    once = sorted(c for c in set("".join(letters)) if "".join(letters).count(c) == 1)
    return operands, [*(f"...{i}" for i in range(longest)), *once]


def _einsum(call: OpCall) -> Sharding:
    text = call.arg(0, "equation")
    inputs, output = equation(text, [o.ndim for o in call.operands])
    for names in inputs:
        twice = sorted({c for c in names if names.count(c) > 1})
        if twice:
            fail(
                RuleError,
                call=f"einsum({text!r}, ...)",
                got=f"operand {''.join(names)!r}",
                number=f"index {twice[0]!r} appears twice in one operand",
                rule="two dims of one operand can't be split alike, so a diagonal is no factor",
                fix="torch.diagonal(...) before the einsum",
            )
    sizes: dict[str, int] = {}
    for names, operand in zip(inputs, call.operands, strict=True):
        for c, n in zip(names, operand.shape, strict=True):
            sizes[c] = max(sizes.get(c, 1), n)

    def factors(names: list[str], shape: tuple[int, ...]) -> Factors:
        out: list[Dim] = [(c,) if n == sizes[c] else () for c, n in zip(names, shape, strict=True)]
        return tuple(out)

    operands = tuple(factors(names, o.shape) for names, o in zip(inputs, call.operands, strict=True))
    results = (factors(output, call.outs[0].shape),)
    return Sharding(operands, results, sizes, linear=sets(*([o] for o in call.operands)))


register("einsum.default", Rule(_einsum, text="its own equation"))


def _tensordot(call: OpCall) -> Sharding:
    a, b = call.operands
    of_a: list[Dim] = [(f"a{i}",) for i in range(a.ndim)]
    of_b: list[Dim] = [(f"b{i}",) for i in range(b.ndim)]
    for k, (i, j) in enumerate(zip(call.arg(2, "dims_self"), call.arg(3, "dims_other"), strict=True)):
        of_a[i] = (f"k{k}",) if a.shape[i] == max(a.shape[i], b.shape[j]) else ()
        of_b[j] = (f"k{k}",) if b.shape[j] == max(a.shape[i], b.shape[j]) else ()
    out = [f for f in of_a if f and f[0][0] == "a"] + [f for f in of_b if f and f[0][0] == "b"]
    sizes = sizes_of((tuple(of_a), a.shape), (tuple(of_b), b.shape))
    return Sharding((tuple(of_a), tuple(of_b)), (tuple(out),), sizes, linear=sets([a], [b]))


register("tensordot", Rule(_tensordot, text="contracted dims summed over"))


def _inner(call: OpCall) -> Sharding:
    a, b = call.operands
    if not a.ndim or not b.ndim:
        one = tuple((f"d{i}",) for i in range(max(a.ndim, b.ndim)))
        of_a, of_b, out = one[: a.ndim], one[: b.ndim], one
    else:
        lead_a = tuple((f"a{i}",) for i in range(a.ndim - 1))
        lead_b = tuple((f"b{i}",) for i in range(b.ndim - 1))
        of_a, of_b, out = (*lead_a, ("k",)), (*lead_b, ("k",)), (*lead_a, *lead_b)
    sizes = sizes_of((of_a, a.shape), (of_b, b.shape))
    return Sharding((of_a, of_b), (out,), sizes, linear=sets([a], [b]))


register("inner", Rule(_inner, text="... k, ... k -> ..."))
