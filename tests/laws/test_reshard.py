"""Law: a conversion between any two types keeps the global value, and its vjp keeps the global cotangent."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from fx_feather.errors import SpecError
from fx_feather.mesh import Mesh
from fx_feather.passes.differentiate import Place, trace_local
from fx_feather.passes.reshard import convert, convert_all, steps
from fx_feather.simulate import Simulator
from fx_feather.spec import Type, assemble, pad_to, shard
from tests.laws.test_adjoint import on_ranks

MESHES = [Mesh(a=2, b=2), Mesh(a=2, b=3), Mesh(a=3, b=2)]
# Divided by every group, by none, and smaller than the groups.
SHAPES = [(12, 12), (5, 7), (1, 3)]

Pair = tuple[Type, Type]


def types(shape: tuple[int, ...], mesh: Mesh, dtype: torch.dtype = torch.float64) -> Iterator[Type]:
    """Every type of a shape: each axis is invariant, replicated, partial or splits a dim, in any order of axes."""
    for choice in itertools.product(["I", "R", "partial", *range(len(shape))], repeat=len(mesh.axes)):
        of = dict(zip(mesh.axes, choice, strict=True))
        split = [[a for a in mesh.axes if of[a] == d] for d in range(len(shape))]
        states = (frozenset(a for a in mesh.axes if of[a] == s) for s in ("partial", "R"))
        partial, replicated = states
        for dims in itertools.product(*(itertools.permutations(axes) for axes in split)):
            yield Type(dtype, shape, tuple(map(tuple, dims)), partial, replicated)


def parts(x: Tensor, t: Type, mesh: Mesh, g: torch.Generator, padding: float = 0.0) -> list[Tensor]:
    """Local values of a whole one: a pending sum in random terms, and `padding` where there is nothing."""
    axes = tuple(a for a in mesh.axes if a in t.partial)
    terms = [torch.randn(x.shape, generator=g, dtype=x.dtype) for _ in range(mesh.count(axes) - 1)]
    terms.append(x - sum(terms))
    out = []
    for r in range(mesh.size):
        local = shard(terms[mesh.index(r, axes)], t.with_(partial=frozenset()), mesh, r)
        out.append(torch.where(held(t, mesh, r), local, padding))
    return out


def held(t: Type, mesh: Mesh, rank: int) -> Tensor:
    """Which elements of a local value are not padding."""
    plain = t.with_(partial=frozenset())
    return pad_to(shard(torch.ones(t.shape, dtype=torch.bool), plain, mesh, rank), t.local_shape(mesh))


def joined(values: Sequence[Tensor], t: Type, mesh: Mesh) -> Tensor:
    """The whole value; ranks that should hold the same must."""
    for axis in mesh.axes:
        if t.state(axis) in ("I", "R"):
            for first, *others in mesh.groups(axis):
                for r in others:
                    same = torch.where(held(t, mesh, r), values[r] - values[first], 0.0)
                    assert (same.abs() < 1e-12).all(), f"ranks {first} and {r} differ"
    return assemble(list(values), t, mesh)


def check(pairs: Sequence[Pair], mesh: Mesh, seed: int) -> None:
    """Converts a random value and a random cotangent for each pair, on all ranks."""
    g = torch.Generator().manual_seed(seed)
    wholes = [[torch.randn(src.shape, generator=g, dtype=src.dtype) for _ in "xc"] for src, _ in pairs]
    xs = [parts(x, src, mesh, g, padding=0.5) for (x, _), (src, _) in zip(wholes, pairs, strict=True)]
    cts = [parts(c, dst.cotangent(), mesh, g) for (_, c), (_, dst) in zip(wholes, pairs, strict=True)]

    def work(rank: int) -> list[Any]:
        out = []
        for x, ct, (src, dst) in zip(xs, cts, pairs, strict=True):
            leaf = x[rank].clone().requires_grad_()
            y = convert(leaf, src, dst, mesh)
            (pulled,) = torch.autograd.grad(y, leaf, ct[rank])
            out.append((y.detach(), pulled))
        return out

    ranks = on_ranks(mesh, work)
    for i, (src, dst) in enumerate(pairs):
        x, c = wholes[i]
        try:
            ys, pulled = ([r[i][k] for r in ranks] for k in (0, 1))
            torch.testing.assert_close(joined(ys, dst, mesh), x, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(joined(pulled, src.cotangent(), mesh), c, rtol=1e-12, atol=1e-12)
        except Exception as e:
            e.add_note(f"{src.show(True)} -> {dst.show(True)} on {mesh}: {steps(src, dst, mesh)}")
            raise


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_every_pair_of_types_keeps_the_value(mesh: Mesh, shape: tuple[int, ...], record_property: Any) -> None:
    pairs = list(itertools.product(types(shape, mesh), repeat=2))
    check(pairs, mesh, 0)
    record_property("examples", len(pairs))


@st.composite
def pairs_on_three_axes(draw: st.DrawFn) -> tuple[Mesh, list[Pair]]:
    sizes = draw(st.sampled_from([(2, 2, 2), (2, 1, 3), (3, 2, 1)]))
    mesh = Mesh(**dict(zip("abc", sizes, strict=True)))
    out = []
    for _ in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
        every = list(types(shape, mesh))
        out.append((draw(st.sampled_from(every)), draw(st.sampled_from(every))))
    return mesh, out


@given(case=pairs_on_three_axes(), seed=st.integers(0, 99))
def test_three_axes_and_any_number_of_dims(case: tuple[Mesh, list[Pair]], seed: int) -> None:
    mesh, pairs = case
    check(pairs, mesh, seed)


@given(case=pairs_on_three_axes(), seed=st.integers(0, 99))
def test_values_that_travel_together_are_those_that_travel_alone(case: tuple[Mesh, list[Pair]], seed: int) -> None:
    """Bit for bit, in one flat buffer or one by one, run by ranks or simulated from a trace."""
    mesh, pairs = case
    g = torch.Generator().manual_seed(seed)
    xs = [parts(torch.randn(s.shape, generator=g, dtype=s.dtype), s, mesh, g, padding=0.5) for s, _ in pairs]

    def work(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        local = [x[rank] for x in xs]
        alone = [convert(x, src, dst, mesh) for x, (src, dst) in zip(local, pairs, strict=True)]
        return alone, convert_all(local, pairs, mesh)

    alone, together = zip(*on_ranks(mesh, work), strict=True)
    func = trace_local(
        lambda *local: convert_all(local, pairs, mesh), [Place.contiguous(s, mesh) for s, _ in pairs], "cpu", "convert"
    )
    traced = Simulator(mesh).call(func, xs)
    for i, (_, dst) in enumerate(pairs):
        for r in range(mesh.size):
            where = held(dst, mesh, r)
            for other in (together[r][i], traced[i][r]):
                assert other.shape == alone[r][i].shape
                assert torch.equal(other[where], alone[r][i][where])


def test_every_two_pending_sums_share_one_collective() -> None:
    mesh = Mesh(a=2, b=2)
    src, dst = (Type(torch.float64, (3, 2), ((), ()), frozenset(p)) for p in ("a", ""))
    func = trace_local(
        lambda *xs: convert_all(xs, [(src, dst)] * 3, mesh), [Place.contiguous(src, mesh)] * 3, "cpu", "convert"
    )
    (only,) = func.collectives()
    assert (only.name, only.axes, only.operand_bytes) == ("psum", ("a",), 3 * 6 * 8)


def test_no_conversion_changes_the_shape() -> None:
    a, b = (Type(torch.float64, shape, ((), ())) for shape in ((2, 3), (3, 2)))
    with pytest.raises(SpecError, match=r"\[2, 3\] is not \[3, 2\]"):
        steps(a, b, Mesh(a=2))
