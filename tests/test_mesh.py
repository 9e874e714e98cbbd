"""The mesh: row-major ranks, groups that cut it into equal parts, and messages that name what is wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fx_feather.errors import MeshError
from fx_feather.mesh import Mesh, as_axes

meshes = st.dictionaries(st.sampled_from(("pp", "dp", "cp", "tp")), st.integers(1, 3)).map(lambda d: Mesh(**d))


@st.composite
def meshes_and_axes(draw: st.DrawFn) -> tuple[Mesh, tuple[str, ...]]:
    mesh = draw(meshes)
    order = draw(st.permutations(mesh.axes))
    return mesh, tuple(order[: draw(st.integers(0, len(order)))])


@settings(deadline=None)
@given(meshes)
def test_coords_and_rank_are_inverse(mesh: Mesh) -> None:
    assert [mesh.rank(**mesh.coords(r)) for r in range(mesh.size)] == list(range(mesh.size))


@settings(deadline=None)
@given(meshes)
def test_ranks_are_row_major_over_all_axes(mesh: Mesh) -> None:
    assert [mesh.index(r, mesh.axes) for r in range(mesh.size)] == list(range(mesh.size))


@settings(deadline=None)
@given(meshes_and_axes())
def test_groups_hold_each_rank_once_in_index_order(case: tuple[Mesh, tuple[str, ...]]) -> None:
    mesh, axes = case
    groups = mesh.groups(axes)
    assert sorted(r for g in groups for r in g) == list(range(mesh.size))
    for group in groups:
        assert len(group) == mesh.count(axes)
        assert [mesh.index(r, axes) for r in group] == list(range(len(group)))
        assert all(mesh.group(r, axes) == group for r in group)


@settings(deadline=None)
@given(meshes_and_axes())
def test_ordered_gives_the_axes_outermost_first(case: tuple[Mesh, tuple[str, ...]]) -> None:
    mesh, axes = case
    assert mesh.ordered(axes) == tuple(a for a in mesh.sizes if a in axes)


def test_a_mesh_of_two_axes() -> None:
    mesh = Mesh(dp=2, tp=3)
    assert (mesh.axes, mesh.shape, mesh.size, mesh["tp"], "tp" in mesh, "pp" in mesh) == (
        ("dp", "tp"),
        (2, 3),
        6,
        3,
        True,
        False,
    )
    assert mesh.groups("tp") == [[0, 1, 2], [3, 4, 5]]
    assert mesh.groups("dp") == [[0, 3], [1, 4], [2, 5]]
    assert mesh.groups(("tp", "dp")) == [[0, 3, 1, 4, 2, 5]]
    assert mesh.groups(()) == [[0], [1], [2], [3], [4], [5]]
    assert mesh.rank(tp=2) == 2


def test_a_mesh_without_axes_is_one_rank() -> None:
    mesh = Mesh()
    assert (mesh.size, mesh.axes, mesh.coords(0), mesh.groups(())) == (1, (), {}, [[0]])


def test_the_order_of_axes_is_part_of_a_mesh() -> None:
    assert Mesh(dp=2, tp=2) == Mesh(dp=2, tp=2)
    assert hash(Mesh(dp=2, tp=2)) == hash(Mesh(dp=2, tp=2))
    assert Mesh(dp=2, tp=2) != Mesh(tp=2, dp=2)
    assert Mesh(dp=2) != "Mesh(dp=2)"


def test_axes_are_a_tuple_of_names() -> None:
    assert as_axes(None) == ()
    assert as_axes("dp") == ("dp",)
    assert as_axes(("dp", "tp")) == ("dp", "tp")


@pytest.mark.parametrize(
    ("sizes", "problem", "fix"),
    [
        ({"tp": 0}, "axis 'tp' has size 0, which is not a positive integer", "tp=1, or no axis 'tp'"),
        ({"dp": 2, "tp": -1}, "axis 'tp' has size -1", "tp=1"),
        ({"tp": 2.0}, "axis 'tp' has size 2.0", "tp=1"),
        ({"tp": True}, "axis 'tp' has size True", "tp=1"),
        ({"tp": "2"}, "axis 'tp' has size '2'", "tp=1"),
        ({"a,b": 2}, "'a,b' is not a Python name", "a name such as 'a_b'"),
        ({"2d": 2}, "'2d' is not a Python name", "a name such as '_2d'"),
        ({"": 2}, "'' is not a Python name", "a name such as 'dp'"),
    ],
)
def test_impossible_axes_are_refused(sizes: dict, problem: str, fix: str) -> None:
    with pytest.raises(MeshError) as caught:
        Mesh(**sizes)
    text = str(caught.value)
    assert problem in text and f"fix:     {fix}" in text, text


def test_all_impossible_axes_are_named_at_once() -> None:
    with pytest.raises(MeshError, match="2 problems") as caught:
        Mesh(dp=0, ok=2, tp=-3)
    assert "'dp' has size 0" in str(caught.value) and "'tp' has size -3" in str(caught.value)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(MeshError, match=rf"rank {rank} is outside 0\.\.3"):
        Mesh(dp=2, tp=2).coords(rank)


def test_a_position_outside_is_refused() -> None:
    with pytest.raises(MeshError) as caught:
        Mesh(dp=2, tp=3).rank(dp=2, tp=1)
    text = str(caught.value)
    assert "2 is outside 0..1 on axis 'dp'" in text and "Mesh(dp=2, tp=3).rank(dp=0, tp=1)" in text, text


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m["fsdpp"],
        lambda m: m.count(("tp", "fsdpp")),
        lambda m: m.groups("fsdpp"),
        lambda m: m.index(0, "fsdpp"),
        lambda m: m.rank(fsdpp=1),
        lambda m: m.check(["fsdpp"]),
    ],
)
def test_an_unknown_axis_is_refused_with_the_nearest_name(use) -> None:
    with pytest.raises(MeshError) as caught:
        use(Mesh(fsdp=2, tp=2))
    text = str(caught.value)
    assert "'fsdpp' is not one of the axes ['fsdp', 'tp']" in text and "did you mean 'fsdp'?" in text, text
