"""Collectives that keep the shape: sums, the maximum, and the identities between states that look alike."""

import functools as ft

import torch
from torch import Tensor

from ..mesh import Axes
from .primitive import Collective, apply, free, like, register


def _all_reduce_bytes(local_bytes: int, n: int) -> int:
    # A ring reduces n parts in n - 1 steps and gathers them in as many.
    return 2 * (n - 1) * local_bytes // n


def _sum_on_all(values: list[Tensor]) -> list[Tensor]:
    total = ft.reduce(torch.add, values)
    return [total.clone() for _ in values]


def _max_on_all(values: list[Tensor]) -> list[Tensor]:
    largest = ft.reduce(torch.maximum, values)
    return [largest.clone() for _ in values]


def _unchanged(values: list[Tensor]) -> list[Tensor]:
    return [v.clone() for v in values]


def _only_first(values: list[Tensor]) -> list[Tensor]:
    return [v.clone() if i == 0 else torch.zeros_like(v) for i, v in enumerate(values)]


register(
    Collective(
        name="psum",
        type="partial -> I",
        summary="the sum over the axes, on every rank (NCCL all-reduce)",
        vjp="pvary",
        op=None,
        fake=like,
        reference=_sum_on_all,
        bytes=_all_reduce_bytes,
        reduces=True,
    )
)
register(
    Collective(
        name="pvary",
        type="I -> R",
        summary="the same value, from now on used differently on each rank (NCCL: nothing)",
        vjp="psum",
        op=None,
        fake=like,
        reference=_unchanged,
        bytes=free,
    ),
    identity=True,
)
register(
    Collective(
        name="pmax",
        type="V -> I",
        summary="the elementwise maximum over the axes, on every rank (NCCL all-reduce with ncclMax)",
        vjp=None,
        op=None,
        fake=like,
        reference=_max_on_all,
        bytes=_all_reduce_bytes,
    )
)
register(
    Collective(
        name="keep_first",
        type="I -> partial",
        summary="the value on the first rank and zeros on the others (NCCL: nothing)",
        vjp="unvary",
        op=None,
        fake=like,
        reference=_only_first,
        bytes=free,
    )
)
register(
    Collective(
        name="keep_first_replicated",
        type="R -> partial",
        summary="the value on the first rank and zeros on the others (NCCL: nothing)",
        vjp="keep_first_replicated",
        op=None,
        fake=like,
        reference=_only_first,
        bytes=free,
    ),
    shares="keep_first",
)
register(
    Collective(
        name="unvary",
        type="R -> I",
        summary="the same value, from now on used in the same way on each rank (NCCL: nothing)",
        vjp="keep_first",
        op=None,
        fake=like,
        reference=_unchanged,
        bytes=free,
    ),
    identity=True,
)


def psum(x: Tensor, axes: Axes, n: int, grad_dtype: torch.dtype | None = None) -> Tensor:
    """partial -> I: the sum over the axes, on every rank (NCCL all-reduce).

        ranks        a | b   ->   a+b | a+b
        cotangents   c | c   <-   c   | c        pvary, no communication

    Choose it to resolve a pending sum that every rank then uses whole. `reduce_scatter` costs half as much where a
    part is enough. `grad_dtype` is the precision in which a second derivative would sum.

    >>> psum(torch.tensor([1.0, 2.0]), ("tp",), 1)
    tensor([1., 2.])
    """
    return apply("psum", x, axes, n, grad_dtype=grad_dtype)


def pvary(x: Tensor, axes: Axes, n: int, grad_dtype: torch.dtype | None = None) -> Tensor:
    """I -> R: the same value, from now on used differently on each rank (NCCL: nothing).

        ranks        a   | a     ->   a | a
        cotangents   c+d | c+d   <-   c | d      psum, in `grad_dtype` where it is given

    Choose it where an invariant value meets one that is split: a weight and split data. Apply it once a value, not
    once a use, so that one sum serves all uses.

    >>> pvary(torch.tensor([1.0, 2.0]), ("dp",), 2)
    tensor([1., 2.])
    """
    return apply("pvary", x, axes, n, grad_dtype=grad_dtype)


def pmax(x: Tensor, axes: Axes, n: int) -> Tensor:
    """V -> I: the elementwise maximum over the axes, on every rank (NCCL all-reduce with ncclMax).

        ranks        a | b   ->   max(a,b) | max(a,b)
        cotangents   none: a gradient that arrives here is an error

    Choose it for values that take no gradient: the shift of a softmax, the scale of a quantised tensor.

    Raises:
        RuleError: in the backward, when a gradient flows through it.

    >>> pmax(torch.tensor([1.0, 2.0]), ("tp",), 1)
    tensor([1., 2.])
    """
    return apply("pmax", x, axes, n)


def keep_first(x: Tensor, axes: Axes, n: int) -> Tensor:
    """I -> partial: the value on the first rank of the group and zeros on the others (NCCL: nothing).

        ranks        a | a   ->   a | 0
        cotangents   c | c   <-   c | c          unvary

    Choose it to add an invariant value to a pending sum: once, not once a rank.

    >>> keep_first(torch.tensor([1.0, 2.0]), ("tp",), 1)
    tensor([1., 2.])
    """
    return apply("keep_first", x, axes, n)


def keep_first_replicated(x: Tensor, axes: Axes, n: int) -> Tensor:
    """R -> partial: the value on the first rank of the group and zeros on the others (NCCL: nothing).

        ranks        a | a   ->   a | 0
        cotangents   c | 0   <-   c | c          keep_first_replicated

    Choose it to add a replicated value to a pending sum: once, not once a rank.

    >>> keep_first_replicated(torch.tensor([1.0, 2.0]), ("tp",), 1)
    tensor([1., 2.])
    """
    return apply("keep_first_replicated", x, axes, n)


def unvary(x: Tensor, axes: Axes, n: int) -> Tensor:
    """R -> I: the same value, from now on used in the same way on each rank (NCCL: nothing).

        ranks        a | a   ->   a | a
        cotangents   c | 0   <-   c | c          keep_first

    Choose it where a replicated value becomes an output. The cotangent of R is a pending sum, so an invariant one
    enters it on one rank only.

    >>> unvary(torch.tensor([1.0, 2.0]), ("tp",), 2)
    tensor([1., 2.])
    """
    return apply("unvary", x, axes, n)
