"""Results of a loss: its sum, count and auxiliary values, and what ranks compare beside, reduced together."""

from collections.abc import Sequence

import torch

from ..program import Section
from ..spec import Type
from .stitch import Stitcher


def resolved(t: Type) -> Type:
    """The type with no pending sum, and the same everywhere where it is not split."""
    return t.with_(partial=frozenset(), replicated=frozenset())


def finished(
    s: Stitcher, unreduced: Sequence[int], grads: Sequence[int], tokens: bool
) -> tuple[Section, tuple[str, ...]]:
    """The section that gives gradients, which are reduced already, and results.

    Args:
        s: where to build.
        unreduced: its inputs, gradients first.
        grads: the reduced gradients.
        tokens: whether each rank brings two numbers more. Their sums, as one vector, are the last output then.

    Returns:
        The section, and the axes over which the numbers are summed: those of the results. With no axes there are none.
    """
    results = unreduced[len(grads) :]
    axes = _summed_over(s, results) if tokens else frozenset()
    own = [s.new(Type(torch.float64, (), (), axes)) for _ in range(2 if axes else 0)]
    made = reduced_results(s, [*results, *own])
    outs, sums = made[: len(results)], made[len(results) :]
    if sums:
        sums = [s.small(lambda a, b: [torch.stack([a, b])], sums, Type(torch.float64, (2,), ((),)), "tokens")]
    section = s.section("finish", [*unreduced, *own], [*grads, *outs, *sums])
    return section, tuple(a for a in s.mesh.axes if a in axes)


def _summed_over(s: Stitcher, values: Sequence[int]) -> frozenset[str]:
    """The axes over which some of the scalars are pending sums."""
    return frozenset[str]().union(*(s.types[v].partial for v in values if not s.types[v].shape))


def reduced_results(s: Stitcher, values: Sequence[int]) -> list[int]:
    """Sum, count and auxiliary values; scalars of all dtypes travel together, as float64, exact for counts to 2^53."""
    types = [s.types[v] for v in values]
    wide = [t.with_(dtype=torch.float64) if t.partial and not t.shape else t for t in types]
    # Sums over some axes join those over more: elsewhere one rank holds what all know.
    axes = _summed_over(s, values)
    joint = [t.with_(partial=axes, replicated=t.replicated - axes) if t.partial and not t.shape else t for t in wide]
    reduced = s.convert(s.convert(values, joint, "results"), [resolved(t) for t in wide], "results")
    return [
        v if w.dtype == t.dtype else s.small(lambda x, to=t.dtype: [x.to(to)], [v], resolved(t), "results", t.dtype)
        for v, t, w in zip(reduced, types, wide, strict=True)
    ]
