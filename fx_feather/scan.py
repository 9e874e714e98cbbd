"""Loops over a dim of a value: step after step, and associative ones, which also run over a dim that is split."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import tree
from .errors import ShapeError, fail
from .trace import block

#: Chunks of an associative scan: a dim can be split over this many ranks, or over a divisor.
CHUNKS = 64


def scan(
    f: Callable[..., tuple[Any, Any]],
    carry: Any,
    xs: Any = None,
    *args: Any,
    dim: int = 0,
    length: int | None = None,
    reverse: bool = False,
    chunk: int | None = None,
) -> tuple[Any, Any]:
    """Runs `carry, y = f(carry, x, *args)` over the slices of `xs` along `dim`, and stacks what each step gives.

    The steps are cut into chunks, and each chunk is a call of one `block`: it is traced and partitioned once, and it is
    a unit of rematerialisation. With `compile_step(..., remat="full")` only the carries between chunks are kept, which
    for chunks of √n steps takes memory for 2√n of n steps, at the price of a second forward (Chen et al. 2016,
    "Training Deep Nets with Sublinear Memory Cost"). The dim must be whole on each rank; others may be split.
    Inside of a `block`, all steps are part of that block's graph.

    Args:
        f: a pure function `(carry, x, *args) -> (carry, y)` of pytrees of tensors. Its new carry has the structure,
            shapes and dtypes of the old one; `y` may be None.
        carry: the first carry.
        xs: pytree of tensors with one size along `dim`; None for steps without input.
        args: pytrees that each step reads, such as parameters. A tensor that `f` closes over is refused.
        dim: the dim of `xs` that is walked along; the results are stacked along it as well.
        length: number of steps, needed if `xs` has no leaf.
        reverse: walk from the last slice to the first; the results are in the order of the slices.
        chunk: steps of a chunk; the square root of the number of steps by default.

    Returns:
        The last carry, and the stacked results.

    Raises:
        ShapeError: sizes along `dim` differ or are 0, a dim that is not there, or a carry that changes.

    >>> total, sums = scan(lambda c, x: (c + x, c + x), torch.tensor(0.0), torch.tensor([1.0, 2.0, 3.0]))
    >>> total, sums
    (tensor(6.), tensor([1., 3., 6.]))
    """
    call = "ff.scan(f, carry, xs)"
    steps = _length(call, xs, dim, length)
    size = chunk or math.isqrt(steps - 1) + 1
    if size < 1:
        _refuse(call, f"chunk={chunk}", "a chunk of no steps", "a chunk has at least one step", f"chunk={1}")

    def some(carry: Any, part: Any, n: int, args: tuple[Any, ...]) -> tuple[Any, Any]:
        ys: list[Any] = []
        for t in reversed(range(n)) if reverse else range(n):
            x = tree.map(lambda v, t=t: v.select(dim, t), part)
            new, y = f(carry, x, *args)
            tree.check_same(tree.structure(carry), new, call=call, name="the new carry")
            _check_kept(call, "the new carry", carry, new)
            carry = new
            ys.append(y)
        if reverse:
            ys.reverse()
        return carry, tree.map(lambda *each: torch.stack(each, dim), *ys)

    body = block(some, getattr(f, "__name__", type(f).__name__))
    leaves, treedef = tree.flatten(xs)
    pieces = [x.split(size, dim) for x in leaves]
    made: list[Any] = []
    starts = range(0, steps, size)
    for k in reversed(range(len(starts))) if reverse else range(len(starts)):
        part = tree.unflatten(treedef, [p[k] for p in pieces])
        carry, ys = body(carry, part, min(size, steps - starts[k]), args)
        made.append(ys)
    if reverse:
        made.reverse()
    return carry, tree.map(lambda *each: torch.cat(each, dim), *made)


def associative_scan(f: Callable[[Any, Any], Any], xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
    """All running results of an associative function: `x0`, `f(x0, x1)`, `f(f(x0, x1), x2)`, … along `dim`.

    It takes O(n) work in O(log n) steps (Blelloch 1990, "Prefix Sums and Their Applications"), in chunks: within each,
    over the totals of all chunks, and then each chunk with what lies before it. So `dim` may be split over as many
    ranks as a divisor of the number of chunks, the largest divisor of its size up to 64: a rank scans what it holds,
    and only the totals travel, once, in one sum over the ranks.

    Args:
        f: an associative function of two pytrees of one structure, which acts on each place along `dim` by itself. It
            sees slices of many places at once, with one more dim before `dim`; dims are best counted from the last.
        xs: pytree of tensors with one size along `dim`.
        dim: the dim that is walked along.
        reverse: walk from the last to the first: `f(f(xn, xn-1), …)`.

    Returns:
        A pytree like `xs`.

    Raises:
        ShapeError: sizes along `dim` differ or are 0, a dim that is not there, or `f` changes a shape.

    >>> associative_scan(torch.mul, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([ 1.,  2.,  6., 24.])

    A linear recurrence `h[t] = a[t] h[t-1] + b[t]`:

    >>> def then(first, second):
    ...     return first[0] * second[0], first[1] * second[0] + second[1]
    >>> associative_scan(then, (torch.tensor([0.5, 0.5]), torch.tensor([1.0, 2.0])))[1]
    tensor([1.0000, 2.5000])
    """
    call = "ff.associative_scan(f, xs)"
    n = _length(call, xs, dim, None)
    leaves, treedef = tree.flatten(xs)
    count = max(k for k in range(1, min(CHUNKS, n) + 1) if n % k == 0)

    def join(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        out = f(tree.unflatten(treedef, a), tree.unflatten(treedef, b))
        tree.check_same(treedef, out, call=call, name="f(a, b)")
        _check_kept(call, "f(a, b)", tree.unflatten(treedef, b), out)
        return tree.leaves(out)

    ats = [dim % x.ndim for x in leaves]
    # Chunks, then places in a chunk: a split dim is split by chunks.
    inner = [x.unflatten(d, (count, n // count)) for x, d in zip(leaves, ats, strict=True)]
    inner = _running(join, inner, [d + 1 for d in ats], reverse)
    if count > 1:
        last = 0 if reverse else -1
        totals = [x.select(d + 1, last) for x, d in zip(inner, ats, strict=True)]
        # A lookup of every row makes the dim of chunks whole on each rank.
        rows = torch.arange(count, device=leaves[0].device)
        totals = [x.index_select(d, rows) for x, d in zip(totals, ats, strict=True)]
        sums = [x.unsqueeze(d + 1) for x, d in zip(_running(join, totals, ats, reverse), ats, strict=True)]
        # The first chunk has nothing before it. What stands there is a pair that is joined elsewhere too, so that
        # nothing overflows in what is thrown away.
        start, second = (count - 1, count - 2) if reverse else (0, 1)
        first = rows == start
        before, here = [], []
        for x, s, t, d in zip(inner, sums, totals, ats, strict=True):
            is_first = first.view(-1, *(1,) * (x.ndim - d - 1))
            before.append(_shifted(s, d, reverse))
            here.append(torch.where(is_first, t.unsqueeze(d + 1).narrow(d, second, 1), x))
        joined = join(before, here)
        inner = [
            torch.where(first.view(-1, *(1,) * (x.ndim - d - 1)), x, y)
            for x, y, d in zip(inner, joined, ats, strict=True)
        ]
    return tree.unflatten(treedef, [x.flatten(d, d + 1) for x, d in zip(inner, ats, strict=True)])


def _shifted(x: Tensor, d: int, reverse: bool) -> Tensor:
    """What lies before each row along `d`; before the first one the row itself."""
    n = x.shape[d]
    if reverse:
        return torch.cat([x.narrow(d, 1, n - 1), x.narrow(d, n - 1, 1)], d)
    return torch.cat([x.narrow(d, 0, 1), x.narrow(d, 0, n - 1)], d)


def _running(join: Callable[..., list[Tensor]], xs: list[Tensor], dims: list[int], reverse: bool) -> list[Tensor]:
    """The running results along dims that are whole: of pairs first, then of the places in between."""
    n = xs[0].shape[dims[0]]
    if n == 1:
        return xs
    if reverse:
        flipped = [x.flip(d) for x, d in zip(xs, dims, strict=True)]
        return [x.flip(d) for x, d in zip(_running(join, flipped, dims, False), dims, strict=True)]

    def every(xs: list[Tensor], start: int, end: int) -> list[Tensor]:
        return [x[(*(slice(None),) * d, slice(start, end, 2))] for x, d in zip(xs, dims, strict=True)]

    pairs = _running(join, join(every(xs, 0, n - n % 2), every(xs, 1, n)), dims, False)
    first = [x.narrow(d, 0, 1) for x, d in zip(xs, dims, strict=True)]
    if n == 2:
        evens = first
    else:
        before = [x.narrow(d, 0, (n - 1) // 2) for x, d in zip(pairs, dims, strict=True)]
        between = join(before, every(xs, 2, n))
        evens = [torch.cat([a, b], d) for a, b, d in zip(first, between, dims, strict=True)]
    out = []
    for even, odd, d in zip(evens, pairs, dims, strict=True):
        both = torch.stack([even.narrow(d, 0, n // 2), odd], d + 1).flatten(d, d + 1)
        out.append(torch.cat([both, even.narrow(d, n // 2, 1)], d) if n % 2 else both)
    return out


def _length(call: str, xs: Any, dim: int, length: int | None) -> int:
    leaves, paths = tree.leaves(xs), tree.paths(xs)
    sizes = {f"xs{p}": x.shape[dim] if -x.ndim <= dim < x.ndim else None for p, x in zip(paths, leaves, strict=True)}
    missing = [f"{p} has {x.ndim} dims" for p, x in zip(sizes, leaves, strict=True) if sizes[p] is None]
    if missing:
        _refuse(
            call, "; ".join(missing), f"no dim {dim}", "all of xs is walked along one dim", "another dim=, or unsqueeze"
        )
    found = {*sizes.values()} | ({length} if length is not None else set())
    if len(found) != 1:
        got = ", ".join(f"{p} of size {n} along dim {dim}" for p, n in sizes.items()) or "xs without a leaf"
        got += f", length={length}" if length is not None or not sizes else ""
        _refuse(call, got, f"{len(found)} lengths", "a scan has one length", "xs of one size along dim, or length=")
    (n,) = found
    if not n:
        _refuse(call, f"size 0 along dim {dim}", "no step", "a scan has at least one step", "a longer xs")
    return int(n)  # type: ignore[arg-type]


def _check_kept(call: str, name: str, old: Any, new: Any) -> None:
    pairs = zip(tree.paths(old), tree.leaves(old), tree.leaves(new), strict=True)
    changed = [
        f"{name}{p} is {tuple(b.shape)} {b.dtype}, not {tuple(a.shape)} {a.dtype}"
        for p, a, b in pairs
        if (a.shape, a.dtype) != (b.shape, b.dtype)
    ]
    if changed:
        _refuse(
            call,
            "; ".join(changed),
            f"{len(changed)} of {len(tree.leaves(old))} leaves change",
            "each step takes what the one before gave, so shapes and dtypes stay",
            "an f whose results are like its arguments, by .to(dtype) or .expand",
        )


def _refuse(call: str, got: str, number: str, rule: str, fix: str) -> None:
    fail(ShapeError, call=call, got=got, number=number, rule=rule, fix=fix)
