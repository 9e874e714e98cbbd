"""Collectives that move parts between ranks, and the position of a rank in its group."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MeshError, message, raise_all
from ..mesh import Axes, as_axes
from .primitive import COLLECTIVES, LIBRARY, Collective, Static, apply, check_group, execute, free, like, register


def _exchanged(x: Tensor, axes: str, n: int, split_dim: int, concat_dim: int) -> Tensor:
    sizes = list(x.shape)
    sizes[split_dim] = sizes[split_dim] // n
    sizes[concat_dim] = sizes[concat_dim] * n
    return x.new_empty(sizes)


def _exchange(values: list[Tensor], split_dim: int, concat_dim: int) -> list[Tensor]:
    n, size = len(values), values[0].shape[split_dim] // len(values)
    return [torch.cat([v.narrow(split_dim, i * size, size) for v in values], concat_dim) for i in range(n)]


def _swapped(static: Static) -> Static:
    return {"split_dim": static["concat_dim"], "concat_dim": static["split_dim"]}


def _sent(values: list[Tensor], perm: Sequence[int]) -> list[Tensor]:
    out = [torch.zeros_like(v) for v in values]
    for source, destination in zip(perm[::2], perm[1::2], strict=True):
        out[destination] = values[source].clone()
    return out


def _inverted(static: Static) -> Static:
    perm = static["perm"]
    pairs = zip(perm[::2], perm[1::2], strict=True)
    return {"perm": [r for source, destination in pairs for r in (destination, source)]}


register(
    Collective(
        name="all_to_all",
        type="V -> V",
        summary="split on one dim before, on another after (NCCL all-to-all)",
        vjp="all_to_all",
        op=None,
        fake=_exchanged,
        reference=_exchange,
        bytes=lambda local_bytes, n: (n - 1) * local_bytes // n,
        static=("split_dim", "concat_dim"),
        divides="split_dim",
        vjp_static=_swapped,
    )
)
register(
    Collective(
        name="ppermute",
        type="V -> V",
        summary="each source's value to its destination, zeros where none arrives (NCCL send and recv)",
        vjp="ppermute",
        op=None,
        fake=like,
        reference=_sent,
        bytes=lambda local_bytes, n: local_bytes if n > 1 else 0,
        static=("perm",),
        vjp_static=_inverted,
    )
)


def all_to_all(x: Tensor, axes: Axes, n: int, split_dim: int, concat_dim: int) -> Tensor:
    """V on concat_dim -> V on split_dim: split on one dim before, on another after (NCCL all-to-all).

        ranks        a0a1 | b0b1   ->   a0b0 | a1b1
        cotangents   c0d0 | c1d1   <-   c0c1 | d0d1       all_to_all, dims swapped

    Each rank cuts its part on `split_dim` in `n` pieces, sends piece i to rank i, and joins what it receives on
    `concat_dim`. Choose it to move a split from one dim to another (sequence to heads in attention) for the price of
    one part, where a gather would pay for all.

    Raises:
        ShapeError: the size of `split_dim` is no multiple of `n`.

    >>> all_to_all(torch.tensor([[1.0, 2.0]]), ("cp",), 1, split_dim=1, concat_dim=0)
    tensor([[1., 2.]])
    """
    return apply("all_to_all", x, axes, n, {"split_dim": split_dim, "concat_dim": concat_dim})


def ppermute(x: Tensor, axes: Axes, n: int, perm: Sequence[tuple[int, int]]) -> Tensor:
    """V -> V: each source's value to its destination, zeros where none arrives (NCCL send and recv).

        ranks        a | b | c   ->   c | a | b           perm = [(0, 1), (1, 2), (2, 0)]
        cotangents   d | e | f   <-   f | d | e           ppermute, permutation inverted

    `perm` is a list of (source, destination), positions in the group. Choose it for rings (keys and values that travel
    past every rank) and for neighbours.

    Raises:
        MeshError: a position outside of the group, a source that sends or a destination that receives twice.

    >>> ppermute(torch.tensor([1.0, 2.0]), ("cp",), 1, perm=[(0, 0)])
    tensor([1., 2.])
    """
    names = as_axes(axes)
    check_group("ppermute", names, n)
    check_perm(names, n, perm)
    return apply("ppermute", x, names, n, {"perm": [int(r) for pair in perm for r in pair]})


def check_perm(axes: tuple[str, ...], n: int, perm: Sequence[tuple[int, int]]) -> None:
    """Raises MeshError unless `perm` is pairs of positions, no source and no destination twice."""
    call = f"ppermute(x, {axes!r}, n={n}, perm={list(perm)!r})"
    problems = []

    def refuse(number: str, fix: str) -> None:
        rule = "a permutation sends from each rank at most once, and to each at most once, so that it can be inverted"
        problems.append(message(call=call, got=f"perm {list(perm)!r}", number=number, rule=rule, fix=fix))

    ring = f"a ring is [(i, (i + 1) % {n}) for i in range({n})]"
    pairs = [p for p in perm if isinstance(p, (tuple, list)) and len(p) == 2]
    if len(pairs) < len(perm):
        refuse(f"{[p for p in perm if p not in pairs]!r} are not pairs (source, destination)", ring)
    for what, ranks in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        for rank in sorted({r for r in ranks if not 0 <= r < n}):
            refuse(f"{what} {rank} is outside 0..{n - 1}", f"positions in the group of {n} ranks; {ring}")
        for rank in sorted({r for r in ranks if ranks.count(r) > 1}):
            refuse(f"{what} {rank} is named {ranks.count(rank)} times", f"name {what} {rank} once; {ring}")
    raise_all(MeshError, problems)


def _positions(values: list[Tensor], device: Any = None) -> list[Tensor]:
    return [torch.tensor(i, device=device) for i in range(len(values))]


def _position(axes: str, n: int, device: Any = None) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


def _run_axis_index(axes: str, n: int, device: Any = None) -> Tensor:
    return execute(COLLECTIVES["axis_index"], None, axes, n, {"device": device})


# Defined by hand: it is the only one without an operand, so its schema and kernel have no `x`.
LIBRARY.define("axis_index(str axes, int n, Device? device=None) -> Tensor")
LIBRARY.impl("axis_index", _run_axis_index, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::axis_index", _position, lib=LIBRARY)
COLLECTIVES["axis_index"] = Collective(
    name="axis_index",
    type="-> V",
    summary="the rank's position in its group, an integer (NCCL: nothing)",
    vjp=None,
    op=torch.ops.fx_feather.axis_index.default,
    fake=_position,
    reference=_positions,
    bytes=free,
)


def axis_index(axes: Axes, n: int, device: torch.device | str | None = None) -> Tensor:
    """-> V: the rank's position in its group, the first axis major, an int64 scalar (NCCL: nothing).

        ranks        -> 0 | 1 | 2
        cotangents   none: it is an integer

    Choose it where per-rank code has to know which part it holds: the offset of a split vocabulary. It is a node of
    the program, not a number, so that all ranks run the same program.

    >>> axis_index(("tp",), 1)
    tensor(0)
    """
    names = as_axes(axes)
    check_group("axis_index", names, n)
    out: Tensor = torch.ops.fx_feather.axis_index.default(",".join(names), n, device=device)
    return out
