"""Factors of random views, broadcasts and einsums: they multiply to the shapes, and parts make the whole."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fx_feather.rules.matmul import equation
from fx_feather.rules.pointwise import aligned
from fx_feather.rules.view import regroup

FACTORS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@st.composite
def two_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two groupings of the same factors, with dims of size 1 put in anywhere."""
    factors = draw(FACTORS)

    def grouped() -> tuple[int, ...]:
        out = [1]
        for f in factors:
            if draw(st.booleans()):
                out.append(f)
            else:
                out[-1] *= f
        return tuple(out)

    return grouped(), grouped()


@given(two_shapes())
@settings(max_examples=200, derandomize=True, deadline=None)
def test_factors_multiply_to_both_shapes(shapes: tuple[tuple[int, ...], tuple[int, ...]]):
    left, right, sizes, whole = regroup(*shapes)
    for factors, shape in zip((left, right), shapes, strict=True):
        assert [math.prod(sizes[f] for f in dim) for dim in factors] == list(shape)
        flat = [f for dim in factors for f in dim]
        assert len(set(flat)) == len(flat)
    # Every factor that may be split is in both, in the same order.
    shared = [[f for dim in factors for f in dim if f not in whole] for factors in (left, right)]
    assert shared[0] == shared[1]


@given(two_shapes())
@settings(max_examples=200, derandomize=True, deadline=None)
def test_a_split_of_a_factor_is_the_same_split_in_both_shapes(shapes: tuple[tuple[int, ...], tuple[int, ...]]):
    left, right, sizes, whole = regroup(*shapes)
    x = torch.arange(math.prod(shapes[0])).view(shapes[0])
    y = x.view(shapes[1])
    for f in {f for dim in left for f in dim} - whole:
        if sizes[f] > 1:
            for part in range(sizes[f]):
                ours, theirs = (taken(v, dims, sizes, f, part) for v, dims in ((x, left), (y, right)))
                assert torch.equal(ours.flatten(), theirs.flatten())


def taken(x: torch.Tensor, dims: tuple[tuple[str, ...], ...], sizes: dict[str, int], f: str, part: int) -> torch.Tensor:
    """The elements at one index of a factor."""
    names = [g for dim in dims for g in dim]
    return x.reshape([sizes[g] for g in names]).select(names.index(f), part)


SHAPE = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(SHAPE, st.data())
@settings(max_examples=100, derandomize=True, deadline=None)
def test_broadcast_dims_have_no_factor(result: tuple[int, ...], data: st.DataObject):
    lead = data.draw(st.integers(0, len(result)))
    shape = tuple(data.draw(st.sampled_from([1, n])) for n in result[lead:])
    factors = aligned(shape, result)
    assert len(factors) == len(shape)
    for i, (dim, n) in enumerate(zip(factors, shape, strict=True)):
        assert dim == ((f"d{lead + i}",) if n == result[lead + i] else ())


@st.composite
def einsums(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """An equation, explicit or not, and shapes that fit it."""
    sizes = {c: draw(st.integers(1, 4)) for c in "abcd"}
    operands = [
        draw(st.lists(st.sampled_from("abcd"), max_size=3, unique=True)) for _ in range(draw(st.integers(1, 3)))
    ]
    leads = [draw(st.sampled_from([None, 0, 1, 2])) for _ in operands]
    parts = [("..." if n is not None else "") + "".join(o) for o, n in zip(operands, leads, strict=True)]
    shapes = [(*(2,) * (n or 0), *(sizes[c] for c in o)) for o, n in zip(operands, leads, strict=True)]
    used = sorted({c for o in operands for c in o})
    dots = "..." if any(n is not None for n in leads) else ""
    kept = draw(st.lists(st.sampled_from(used), unique=True)) if used else []
    return ",".join(parts) + draw(st.sampled_from(["", f"->{dots}{''.join(kept)}"])), shapes


@given(einsums())
@settings(max_examples=200, derandomize=True, deadline=None)
def test_the_result_of_an_einsum_has_the_dims_of_its_letters(case: tuple[str, list[tuple[int, ...]]]):
    text, shapes = case
    operands, result = equation(text, [len(s) for s in shapes])
    sizes: dict[str, int] = {}
    for names, shape in zip(operands, shapes, strict=True):
        assert len(names) == len(shape)
        sizes.update(zip(names, shape, strict=True))
    want = torch.einsum(text, *(torch.ones(s) for s in shapes)).shape
    assert tuple(sizes[c] for c in result) == tuple(want)
