"""Specs and types: each true element in one place, round trips, the one notation, and refusals."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fx_feather.errors import ShapeError, SpecError
from fx_feather.mesh import Mesh
from fx_feather.spec import P, Type, assemble, extent, local_size, pad_to, shard, slices

AXES = ("a", "b", "c")


@st.composite
def typed(draw: st.DrawFn, states: str = "VPRI", least: int = 0) -> tuple[Type, Mesh]:
    """Any type on a mesh of up to 27 ranks: sizes seldom divide, axes come in any order."""
    mesh = Mesh(**{a: draw(st.integers(1, 3)) for a in AXES[: draw(st.integers(1, 3))]})
    shape = tuple(draw(st.lists(st.integers(least, 7), max_size=3)))
    dims: list[tuple[str, ...]] = [() for _ in shape]
    kinds: dict[str, list[str]] = {"P": [], "R": []}
    for axis in draw(st.permutations(mesh.axes)):
        state = draw(st.sampled_from(states))
        if state == "V" and shape:
            dims[draw(st.integers(0, len(shape) - 1))] += (axis,)
        elif state in kinds:
            kinds[state].append(axis)
    return Type(torch.float64, shape, tuple(dims), frozenset(kinds["P"]), frozenset(kinds["R"])), mesh


def whole(t: Type) -> torch.Tensor:
    """A tensor whose elements all differ and none of which is zero."""
    return torch.arange(1, 1 + torch.Size(t.shape).numel(), dtype=t.dtype).reshape(t.shape)


@settings(deadline=None)
@given(typed())
def test_assembling_the_shards_gives_the_whole(case: tuple[Type, Mesh]) -> None:
    t, mesh = case
    parts = [shard(whole(t), t, mesh, r) for r in range(mesh.size)]
    assert all(tuple(p.shape) == t.local_shape(mesh) and p.is_contiguous() for p in parts)
    assert torch.equal(assemble(parts, t, mesh), whole(t))


@settings(deadline=None)
@given(typed(), st.integers(0, 1000))
def test_partial_parts_add_up(case: tuple[Type, Mesh], seed: int) -> None:
    t, mesh = case
    axes = tuple(sorted(t.partial))
    terms = torch.randn(mesh.count(axes), *t.shape, dtype=t.dtype, generator=torch.Generator().manual_seed(seed))
    split = t.with_(partial=frozenset())
    parts = [shard(terms[mesh.index(r, axes)], split, mesh, r) for r in range(mesh.size)]
    torch.testing.assert_close(assemble(parts, t, mesh), terms.sum(0), rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(typed(states="V"))
def test_each_true_element_is_in_exactly_one_shard(case: tuple[Type, Mesh]) -> None:
    t, mesh = case
    found = torch.zeros(t.shape)
    idle = {a for a in mesh.axes if a not in t.sharded}
    for rank in range(mesh.size):
        if not any(mesh.coords(rank)[a] for a in idle):
            found[slices(t, mesh, rank)] += 1
    assert torch.equal(found, torch.ones(t.shape))


@settings(deadline=None)
@given(typed(states="VI", least=1))
def test_padding_is_zero_and_none_where_even(case: tuple[Type, Mesh]) -> None:
    t, mesh = case
    parts = [shard(whole(t), t, mesh, r) for r in range(mesh.size)]
    true = [sum(s.stop - s.start == 0 for s in slices(t, mesh, r)) == 0 for r in range(mesh.size)]
    for rank, (part, has) in enumerate(zip(parts, true, strict=True)):
        count = torch.Size([s.stop - s.start for s in slices(t, mesh, rank)]).numel()
        assert int((part != 0).sum()) == count and bool(count) == has
    assert t.even(mesh) == all(bool((p != 0).all()) for p in parts)


@settings(deadline=None)
@given(st.integers(0, 40), st.permutations(AXES), st.tuples(*[st.integers(1, 4)] * 3))
def test_parts_follow_each_other_without_gaps(n: int, axes: list[str], sizes: tuple[int, ...]) -> None:
    mesh = Mesh(**dict(zip(AXES, sizes, strict=True)))
    (group,) = mesh.groups(tuple(axes))
    at = 0
    for rank in group:
        start, count = extent(n, axes, mesh, rank)
        assert (start, 0 <= count <= local_size(n, axes, mesh)) == (at, True)
        at += count
    assert at == n


def test_a_part_is_the_ceiling_nested_from_major_to_minor() -> None:
    mesh = Mesh(a=2, b=2)
    assert local_size(5, ("a", "b"), mesh) == 2
    assert [extent(5, ("a", "b"), mesh, r) for r in range(4)] == [(0, 2), (2, 1), (3, 2), (5, 0)]
    assert [extent(5, ("b", "a"), mesh, r) for r in range(4)] == [(0, 2), (3, 2), (2, 1), (5, 0)]


def test_padding_is_at_the_end_of_each_dim() -> None:
    assert pad_to(torch.ones(1, 2), (2, 3)).tolist() == [[1, 1, 0], [0, 0, 0]]
    assert pad_to(torch.ones(2, dtype=torch.bool), (3,)).tolist() == [True, True, False]
    assert pad_to(torch.ones(0, 2), (1, 2)).tolist() == [[0, 0]]
    assert pad_to(torch.tensor(3), ()).item() == 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float16])
def test_every_dtype_goes_round(dtype: torch.dtype) -> None:
    x, mesh = torch.tensor([1, 0, 1, 1, 0]).to(dtype), Mesh(a=2, b=2)
    t = Type(dtype, (5,), (("a",),), partial=frozenset({"b"}))
    out = assemble([shard(x, t, mesh, r) for r in range(4)], t, mesh)
    assert out.dtype == dtype and torch.equal(out, x)


def test_a_partial_value_is_held_by_the_first_rank_alone() -> None:
    t, mesh = Type(torch.float64, (2,), ((),), partial=frozenset({"a"})), Mesh(a=2, b=2)
    parts = [shard(whole(t), t, mesh, r).tolist() for r in range(4)]
    assert parts == [[1, 2], [1, 2], [0, 0], [0, 0]]


@settings(deadline=None)
@given(typed())
def test_the_cotangent_of_the_cotangent_is_the_type(case: tuple[Type, Mesh]) -> None:
    t, mesh = case
    pair = {"V": "V", "I": "I", "R": "partial", "partial": "R"}
    assert t.cotangent().cotangent() == t
    assert all(t.cotangent().state(a) == pair[t.state(a)] for a in mesh.axes)


@settings(deadline=None)
@given(typed())
def test_every_axis_is_in_one_state(case: tuple[Type, Mesh]) -> None:
    t, mesh = case
    for a in mesh.axes:
        assert (t.state(a) == "V") == (a in t.sharded) == (t.dim_of(a) is not None)
        assert (t.state(a) != "I") == (a in t.axes)
    spec = t.spec()
    assert spec.padded(len(t.shape)) == t.dims and frozenset(spec.partial) == t.partial


@pytest.mark.parametrize(
    ("t", "text"),
    [
        (Type(torch.bfloat16, (4096, 11008), (("fsdp",), ("tp",))), "bf16[4096@fsdp, 11008@tp]"),
        (Type(torch.float32, (8, 4), (("dp", "fsdp"), ())), "f32[8@(dp,fsdp), 4]"),
        (Type(torch.float64, (4,), ((),), frozenset({"tp"})), "f64[4]{partial=tp}"),
        (Type(torch.float16, (), (), frozenset({"tp", "dp"})), "f16[]{partial=dp,tp}"),
        (Type(torch.int64, (4,), ((),), replicated=frozenset({"tp"})), "i64[4]"),
        (Type(torch.uint8, (1,), ((),)), "uint8[1]"),
    ],
)
def test_the_one_notation(t: Type, text: str) -> None:
    assert repr(t) == t.show() == text


def test_states_are_shown_when_asked_for() -> None:
    t = Type(torch.int32, (4,), ((),), frozenset({"b"}), frozenset({"a"}))
    assert t.show(states=True) == "i32[4]{partial=b}{R=a}"


def test_the_type_of_a_whole_tensor() -> None:
    t = Type.whole(torch.zeros(2, 3), names=("batch", "embed"))
    assert (repr(t), t.axes, t.names) == ("f32[2, 3]", frozenset(), ("batch", "embed"))
    assert t == Type.whole(torch.zeros(2, 3)), "names are for messages"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P(), "P()"),
        (P("dp"), "P('dp')"),
        (P("dp", None, ("a", "b")), "P('dp', None, ('a', 'b'))"),
        (P(None, partial="tp"), "P(None, partial='tp')"),
        (P(partial=("a", "b")), "P(partial=('a', 'b'))"),
    ],
)
def test_a_spec_prints_as_it_is_written(spec: P, text: str) -> None:
    assert repr(spec) == text
    assert eval(text, {"P": P}) == spec and hash(eval(text, {"P": P})) == hash(spec)


def test_the_order_of_axes_counts_in_a_dim_and_not_in_a_sum() -> None:
    assert P(("a", "b")) != P(("b", "a"))
    assert P(partial=("a", "b")) == P(partial=("b", "a"))
    assert hash(P(partial=("a", "b"))) == hash(P(partial=("b", "a")))


@pytest.mark.parametrize(
    "make",
    [
        lambda: P("dp", "dp"),
        lambda: P(("dp", "tp"), "dp"),
        lambda: P(("dp", "dp")),
        lambda: P("dp", partial="dp"),
        lambda: P(partial=("dp", "dp")),
    ],
)
def test_an_axis_used_twice_is_refused(make) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    text = str(caught.value)
    assert "axis 'dp' is used 2 times" in text and "leave 'dp' on one dim only" in text, text


def test_all_axes_used_twice_are_named() -> None:
    with pytest.raises(SpecError, match="axis 'a' is used 2 times, axis 'b' is used 2 times"):
        P(("a", "b"), ("b", "a"))


def test_a_spec_longer_than_its_tensor_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        P("a", None, "b").padded(1)
    text = str(caught.value)
    assert "names 3 dims, the tensor has 1" in text and "fix:     P('a')" in text, text


@pytest.mark.parametrize(
    ("sizes", "got"),
    [((3, 1), "rank 1 holds [1]"), ((2, 2), "rank 0 holds [2]; rank 1 holds [2]"), ((3,), "1 parts"), ((), "0 parts")],
)
def test_parts_of_wrong_sizes_are_refused(sizes: tuple[int, ...], got: str) -> None:
    t, mesh = Type(torch.float32, (5,), (("dp",),)), Mesh(dp=2)
    with pytest.raises(ShapeError) as caught:
        assemble([torch.ones(n) for n in sizes], t, mesh)
    text = str(caught.value)
    assert f"got:     {got}" in text and "each of 2 ranks must hold [3]" in text and "f32[5@dp]" in text, text


@pytest.mark.parametrize("shape", [(4,), (5, 1), ()])
def test_a_whole_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    t = Type(torch.float32, (5,), (("dp",),))
    with pytest.raises(ShapeError) as caught:
        shard(torch.ones(shape), t, Mesh(dp=2), 0)
    text = str(caught.value)
    assert f"shape {list(shape)} is not [5]" in text and "Mesh(dp=2)" in text, text


def test_the_number_of_ranks_never_changes_the_number_of_elements() -> None:
    for n, k in itertools.product(range(12), range(1, 9)):
        mesh = Mesh(dp=k)
        assert sum(extent(n, ("dp",), mesh, r)[1] for r in range(k)) == n
