"""Collectives that join or split a dim: gathers, scatters, and padding a part to the whole."""

import functools as ft

import torch
from torch import Tensor

from ..mesh import Axes
from .primitive import Collective, apply, free, register, resized


def _gathered(x: Tensor, axes: str, n: int, dim: int) -> Tensor:
    return resized(x, dim, x.shape[dim] * n)


def _part(x: Tensor, axes: str, n: int, dim: int) -> Tensor:
    return resized(x, dim, x.shape[dim] // n)


def _gather_bytes(local_bytes: int, n: int) -> int:
    return (n - 1) * local_bytes


def _scatter_bytes(local_bytes: int, n: int) -> int:
    return (n - 1) * local_bytes // n


def _whole_on_all(values: list[Tensor], dim: int) -> list[Tensor]:
    whole = torch.cat(values, dim)
    return [whole.clone() for _ in values]


def _own_part(values: list[Tensor], dim: int) -> list[Tensor]:
    size = values[0].shape[dim] // len(values)
    # A clone, since a part that is the whole would be the operand itself.
    parts = [v.narrow(dim, i * size, size) for i, v in enumerate(values)]
    return [p.clone(memory_format=torch.contiguous_format) for p in parts]


def _part_of_sum(values: list[Tensor], dim: int) -> list[Tensor]:
    return _own_part([ft.reduce(torch.add, values)] * len(values), dim)


def _zeros_around(values: list[Tensor], dim: int) -> list[Tensor]:
    n, size = len(values), values[0].shape[dim]
    out = []
    for i, v in enumerate(values):
        whole = v.new_zeros([n * size if d == dim else s for d, s in enumerate(v.shape)])
        whole.narrow(dim, i * size, size).copy_(v)
        out.append(whole)
    return out


register(
    Collective(
        name="all_gather",
        type="V -> R",
        summary="all parts joined on a dim, on every rank, for use that differs by rank (NCCL all-gather)",
        vjp="reduce_scatter",
        op=None,
        fake=_gathered,
        reference=_whole_on_all,
        bytes=_gather_bytes,
        static=("dim",),
    )
)
register(
    Collective(
        name="all_gather_invariant",
        type="V -> I",
        summary="all parts joined on a dim, on every rank, for use that is the same on all (NCCL all-gather)",
        vjp="pscatter",
        op=None,
        fake=_gathered,
        reference=_whole_on_all,
        bytes=_gather_bytes,
        static=("dim",),
    ),
    shares="all_gather",
)
register(
    Collective(
        name="reduce_scatter",
        type="partial -> V",
        summary="the rank's own part of the sum over the axes (NCCL reduce-scatter)",
        vjp="all_gather",
        op=None,
        fake=_part,
        reference=_part_of_sum,
        bytes=_scatter_bytes,
        static=("dim",),
        divides="dim",
        reduces=True,
    )
)
register(
    Collective(
        name="pscatter",
        type="I -> V",
        summary="the rank's own part of an invariant value (NCCL: nothing)",
        vjp="all_gather_invariant",
        op=None,
        fake=_part,
        reference=_own_part,
        bytes=free,
        static=("dim",),
        divides="dim",
    )
)
register(
    Collective(
        name="pscatter_replicated",
        type="R -> V",
        summary="the rank's own part of a replicated value (NCCL: nothing)",
        vjp="pad",
        op=None,
        fake=_part,
        reference=_own_part,
        bytes=free,
        static=("dim",),
        divides="dim",
    ),
    shares="pscatter",
)
register(
    Collective(
        name="pad",
        type="V -> partial",
        summary="the rank's own part with zeros where the other parts are (NCCL: nothing)",
        vjp="pscatter_replicated",
        op=None,
        fake=_gathered,
        reference=_zeros_around,
        bytes=free,
        static=("dim",),
    )
)


def all_gather(x: Tensor, axes: Axes, n: int, dim: int, grad_dtype: torch.dtype | None = None) -> Tensor:
    """V -> R: all parts joined on `dim`, on every rank, for use that differs by rank (NCCL all-gather).

        ranks        a     | b       ->   ab | ab
        cotangents   c0+d0 | c1+d1   <-   c0c1 | d0d1     reduce_scatter, in `grad_dtype` where it is given

    Choose it to use a stored part whole, beside values that are split over the same axes: a parameter under FSDP, the
    input of a tensor-parallel block whose residual is split.

    >>> all_gather(torch.tensor([1.0, 2.0]), ("dp",), 1, dim=0)
    tensor([1., 2.])
    """
    return apply("all_gather", x, axes, n, {"dim": dim}, grad_dtype)


def all_gather_invariant(x: Tensor, axes: Axes, n: int, dim: int) -> Tensor:
    """V -> I: all parts joined on `dim`, on every rank, for use that is the same on all (NCCL all-gather).

        ranks        a  | b    ->   ab   | ab
        cotangents   c0 | c1   <-   c0c1 | c0c1           pscatter, no communication

    Choose it where every rank does the same with the whole: an output, an updated parameter. Where the uses differ,
    it would lose their sum; that is `all_gather`.

    >>> all_gather_invariant(torch.tensor([1.0, 2.0]), ("dp",), 1, dim=0)
    tensor([1., 2.])
    """
    return apply("all_gather_invariant", x, axes, n, {"dim": dim})


def reduce_scatter(x: Tensor, axes: Axes, n: int, dim: int, grad_dtype: torch.dtype | None = None) -> Tensor:
    """partial -> V: the rank's own part of the sum over the axes (NCCL reduce-scatter).

        ranks        a0a1 | b0b1   ->   a0+b0 | a1+b1
        cotangents   cd   | cd     <-   c     | d         all_gather

    Choose it to resolve a pending sum of which each rank needs a part. `grad_dtype` is the precision in which a second
    derivative would sum.

    Raises:
        ShapeError: the size of `dim` is no multiple of `n`.

    >>> reduce_scatter(torch.tensor([1.0, 2.0]), ("tp",), 1, dim=0)
    tensor([1., 2.])
    """
    return apply("reduce_scatter", x, axes, n, {"dim": dim}, grad_dtype)


def pscatter(x: Tensor, axes: Axes, n: int, dim: int) -> Tensor:
    """I -> V: the rank's own part of an invariant value (NCCL: nothing).

        ranks        ab | ab   ->   a | b
        cotangents   cd | cd   <-   c | d                 all_gather_invariant

    Choose it to split what every rank has whole.

    Raises:
        ShapeError: the size of `dim` is no multiple of `n`.

    >>> pscatter(torch.tensor([1.0, 2.0]), ("tp",), 1, dim=0)
    tensor([1., 2.])
    """
    return apply("pscatter", x, axes, n, {"dim": dim})


def pscatter_replicated(x: Tensor, axes: Axes, n: int, dim: int) -> Tensor:
    """R -> V: the rank's own part of a replicated value (NCCL: nothing).

        ranks        ab | ab   ->   a | b
        cotangents   c0 | 0d   <-   c | d                 pad, no communication

    Choose it where an operator needs a part and has the whole. The cotangent stays a pending sum, which `pvary`
    resolves once for all uses.

    Raises:
        ShapeError: the size of `dim` is no multiple of `n`.

    >>> pscatter_replicated(torch.tensor([1.0, 2.0]), ("tp",), 1, dim=0)
    tensor([1., 2.])
    """
    return apply("pscatter_replicated", x, axes, n, {"dim": dim})


def pad(x: Tensor, axes: Axes, n: int, dim: int) -> Tensor:
    """V -> partial: the rank's own part with zeros where the other parts are (NCCL: nothing).

        ranks        a | b   ->   a0 | 0b
        cotangents   c | d   <-   cd | cd                 pscatter_replicated

    Choose it to add a split value to a pending sum.

    >>> pad(torch.tensor([1.0, 2.0]), ("tp",), 1, dim=0)
    tensor([1., 2.])
    """
    return apply("pad", x, axes, n, {"dim": dim})
