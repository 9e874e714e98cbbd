"""The layout table: how rows are joined, which axis wins, what a parameter becomes, and refusals."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fx_feather.errors import LayoutError, ShapeError
from fx_feather.layout import Layout, Precision, Store, check_divides
from fx_feather.mesh import Mesh
from fx_feather.spec import Type

DIMS = ("batch", "embed", "mlp", "vocab")
AXES = ("a", "b", "c")


@st.composite
def tables(draw: st.DrawFn, axes: tuple[str, ...] = AXES) -> dict[str, tuple[str, ...]]:
    rows = draw(st.lists(st.sampled_from(DIMS), unique=True, max_size=4))
    return {dim: tuple(draw(st.lists(st.sampled_from(axes), unique=True, max_size=2))) for dim in rows}


def layouts(axes: tuple[str, ...] = AXES) -> st.SearchStrategy[Layout]:
    stores = st.builds(Store, tables(axes), tables(axes), tables(axes))
    return st.builds(Layout, compute=tables(axes), store=stores)


def rows(layout: Layout) -> list[list[tuple[str, tuple[str, ...]]]]:
    """All rows with their order, which `==` of dicts would ignore."""
    return [list(table.items()) for table in layout.tables()]  # type: ignore[arg-type]


@settings(deadline=None)
@given(layouts(("a",)), layouts(("b",)), layouts(("c",)))
def test_composing_is_associative_with_an_empty_layout_as_its_unit(x: Layout, y: Layout, z: Layout) -> None:
    assert rows((x | y) | z) == rows(x | (y | z))
    assert rows(Layout() | x) == rows(x) == rows(x | Layout())


@settings(deadline=None)
@given(layouts(), st.lists(st.sampled_from(DIMS), unique=True, min_size=1))
def test_an_axis_splits_at_most_one_dim_of_a_tensor(layout: Layout, names: list[str]) -> None:
    types = layout.param_types(tuple(names), (8,) * len(names), torch.float32)
    for t in (types.compute, types.store, types.grads, types.opt):
        used = [a for d in t.dims for a in d]
        assert len(used) == len(set(used))
        for own, inner in zip(t.dims, types.compute.dims, strict=True):
            assert own[: len(inner)] == inner, "at rest a dim is split further than in use, never otherwise"


def test_the_left_layout_is_major() -> None:
    both = Layout(compute={"batch": "replica"}) | Layout(compute={"batch": "shard"})
    assert both.compute == {"batch": ("replica", "shard")}
    assert both.value_dims(("batch", "embed")) == (("replica", "shard"), ())


def test_rows_keep_their_order_and_new_ones_come_last() -> None:
    both = Layout(compute={"mlp": "a", "batch": "a"}) | Layout(compute={"vocab": "b", "mlp": "b"})
    assert list(both.compute.items()) == [("mlp", ("a", "b")), ("batch", ("a",)), ("vocab", ("b",))]


def test_earlier_rows_win() -> None:
    names = ("batch", "seq", "mlp")
    assert Layout(compute={"mlp": "tp", "seq": "tp"}).value_dims(names) == ((), (), ("tp",))
    assert Layout(compute={"seq": "tp", "mlp": "tp"}).value_dims(names) == ((), ("tp",), ())
    assert Layout(compute={"mlp": "tp", "seq": ("tp", "cp")}).value_dims(names) == ((), ("cp",), ("tp",))


def test_what_is_in_use_wins_over_what_rests() -> None:
    layout = Layout(compute={"mlp": "a"}, store=Store(params={"embed": ("a", "b")}))
    types = layout.param_types(("embed", "mlp"), (8, 6), torch.float32)
    assert (repr(types.compute), repr(types.store)) == ("f32[8, 6@a]", "f32[8@b, 6@a]")


def test_a_dim_that_no_row_names_is_whole() -> None:
    layout = Layout(compute={"batch": "dp"})
    assert layout.value_dims(("batch", "_", "seq")) == (("dp",), (), ())
    assert layout.value_dims(()) == ()


def test_an_override_holds_instead_of_the_layout_for_the_paths_it_matches() -> None:
    layout = Layout(
        compute={"mlp": "tp"},
        overrides={
            "*['router']*": Layout(),
            "['layers'][?]['mlp']['up']": Layout(compute={"embed": "tp"}),
        },
    )

    def at(path: str) -> str:
        return repr(layout.param_types(("embed", "mlp"), (8, 6), torch.float32, path).compute)

    assert at("['layers'][3]['router']['w']") == "f32[8, 6]"
    assert at("['layers'][3]['mlp']['up']") == "f32[8@tp, 6]"
    assert at("['layers'][13]['mlp']['up']") == "f32[8, 6@tp]", "? is one character"
    assert at("") == at("['layers'][3]['mlp']['down']") == "f32[8, 6@tp]"


def test_overrides_of_one_pattern_are_joined() -> None:
    left = Layout(overrides={"*w": Layout(compute={"mlp": "a"}), "*v": Layout()})
    both = left | Layout(overrides={"*w": Layout(compute={"mlp": "b"})})
    assert list(both.overrides) == ["*w", "*v"]
    assert both.overrides["*w"].compute == {"mlp": ("a", "b")}


def test_the_right_precision_wins_field_by_field() -> None:
    bf16, f32 = torch.bfloat16, torch.float32
    both = Layout(precision=Precision(bf16, bf16)) | Layout(precision=Precision(reduce=f32))
    assert both.precision == Precision(bf16, f32)
    assert (Layout(precision=Precision(bf16)) | Layout()).precision == Precision(bf16)


def test_a_layout_prints_what_it_has() -> None:
    assert repr(Layout()) == "Layout(compute={}, store=Store(params={}, grads={}, opt={}))"
    text = repr(Layout(overrides={"*w": Layout()}, precision=Precision(torch.bfloat16)))
    assert "overrides={'*w': Layout(" in text and "precision=Precision(compute=torch.bfloat16, reduce=None)" in text


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda: Layout(compute={"batch": ("dp", "dp")}), "Layout(compute=...)"),
        (lambda: Layout(compute={"batch": "dp"}) | Layout(compute={"batch": "dp"}), "Layout(compute=...)"),
        (lambda: Store(params={"batch": ("dp", "dp")}), "Layout(store.params=...)"),
        (lambda: Store(grads={"batch": ("dp", "dp")}), "Layout(store.grads=...)"),
        (lambda: Store(opt={"batch": "dp"}) | Store(opt={"batch": "dp"}), "Layout(store.opt=...)"),
    ],
)
def test_an_axis_used_twice_for_one_dim_is_refused(make, call: str) -> None:
    with pytest.raises(LayoutError) as caught:
        make()
    text = str(caught.value)
    assert text.startswith(call), text
    assert "got:     batch -> ('dp', 'dp')" in text and "axis 'dp' is used 2 times for dim 'batch'" in text, text
    assert "fix:     'batch': ('dp',)" in text, text


def test_all_axes_used_twice_are_named_at_once() -> None:
    with pytest.raises(LayoutError, match="2 problems") as caught:
        Layout(compute={"batch": ("a", "a"), "mlp": ("b", "b", "b")})
    assert "'b' is used 3 times for dim 'mlp'" in str(caught.value)


def test_dims_of_the_model_and_of_this_package_are_known() -> None:
    layout = Layout(compute={"batch": "dp", "expert": "tp", "patch": "tp"}, store=Store(opt={"embed": "dp"}))
    layout.check_axes(Mesh(dp=2, tp=2))
    layout.check_dims(["patch"])


@pytest.mark.parametrize(
    ("layout", "problem", "fix"),
    [
        (Layout(compute={"emebd": "dp"}), "has a dim 'emebd'", "did you mean 'embed'"),
        (Layout(compute={"patches": "dp"}), "has a dim 'patches'", "did you mean 'patch'"),
        (Layout(store=Store(opt={"kv_head": "dp"})), "has a dim 'kv_head'", "did you mean 'kv_heads'"),
        (Layout(overrides={"*": Layout(compute={"zzz": "dp"})}), "has a dim 'zzz'", "known: 'batch', 'embed'"),
        (Layout(compute={"_": "dp"}), "has a dim '_'", "known: 'batch'"),
    ],
)
def test_dims_that_do_not_exist_are_refused(layout: Layout, problem: str, fix: str) -> None:
    with pytest.raises(LayoutError) as caught:
        layout.check_dims(["patch", "_"])
    text = str(caught.value)
    assert problem in text and fix in text.split("fix:")[1], text


@pytest.mark.parametrize(
    ("layout", "problem", "fix"),
    [
        (Layout(compute={"batch": "fsdpp"}), "'fsdpp' is not one of the axes ['dp', 'fsdp']", "did you mean 'fsdp'?"),
        (Layout(store=Store(params={"embed": ("dp", "x")})), "'x' is not one of the axes", "Mesh(..., x=2)"),
        (Layout(overrides={"*": Layout(store=Store(opt={"embed": "y"}))}), "'y' is not one", "Mesh(..., y=2)"),
    ],
)
def test_axes_that_do_not_exist_are_refused(layout: Layout, problem: str, fix: str) -> None:
    with pytest.raises(LayoutError) as caught:
        layout.check_axes(Mesh(dp=2, fsdp=2))
    text = str(caught.value)
    assert problem in text and fix in text.split("fix:")[1], text


def test_all_unknown_names_are_listed_once_each() -> None:
    layout = Layout(compute={"foo": "x", "bar": "dp"}, store=Store(opt={"foo": "x"}, params={"foo": "x", "bar": "y"}))
    with pytest.raises(LayoutError, match="2 problems") as caught:
        layout.check_dims([])
    assert "has a dim 'foo'" in str(caught.value) and "has a dim 'bar'" in str(caught.value)
    with pytest.raises(LayoutError, match="2 problems") as caught:
        layout.check_axes(Mesh(dp=2))
    assert "axis 'x' on Mesh(dp=2)" in str(caught.value) and "axis 'y' on Mesh(dp=2)" in str(caught.value)


def value(names: str, shape: tuple[int, ...], layout: Layout) -> Type:
    return Type(torch.float32, shape, layout.value_dims(names.split()), names=tuple(names.split()))


TP = Layout(compute=dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "tp"))


@pytest.mark.parametrize(
    ("names", "shape", "layout", "problem", "fix"),
    [
        ("embed kv_heads", (8, 2), TP, "dim 1 (kv_heads) has size 2, axis 'tp' has size 4", "kv_heads of size 4,"),
        ("embed kv_heads", (8, 6), TP, "dim 1 (kv_heads) has size 6, axis 'tp' has size 4", "size 4 or 8,"),
        ("mlp embed", (11, 8), TP, "dim 0 (mlp) has size 11, axis 'tp' has size 4", "whose size divides 11"),
        ("batch", (6,), Layout({"batch": ("dp", "tp")}), "size 6, axes ['dp', 'tp'] have size 8", "size 8,"),
    ],
)  # fmt: skip
def test_values_in_use_that_do_not_divide_are_refused_with_both_numbers(
    names: str, shape: tuple[int, ...], layout: Layout, problem: str, fix: str
) -> None:
    with pytest.raises(ShapeError) as caught:
        check_divides([("params['w']", value(names, shape, layout))], Mesh(dp=2, tp=4))
    text = str(caught.value)
    assert problem in text and fix in text.split("fix:")[1], text
    assert text.startswith("split of params['w'], dims ") and "Mesh(dp=2, tp=4)" in text, text


def test_values_that_divide_and_a_padded_vocabulary_pass() -> None:
    mesh = Mesh(dp=2, tp=4)
    good = [("embed kv_heads", (7, 8)), ("vocab embed", (257, 8)), ("vocab", (3,)), ("heads mlp", (4, 3)), ("", ())]
    check_divides([(names, value(names, shape, TP)) for names, shape in good], mesh)


def test_all_values_that_do_not_divide_are_listed_at_once() -> None:
    bad = [(name, value(names, (3,), TP)) for name, names in (("k", "kv_heads"), ("up", "mlp"), ("e", "vocab"))]
    with pytest.raises(ShapeError, match="2 problems") as caught:
        check_divides(bad, Mesh(tp=2))
    assert "split of k," in str(caught.value) and "split of up," in str(caught.value)


def test_a_value_without_names_is_refused_by_its_place() -> None:
    with pytest.raises(ShapeError, match=r"dim 0 \(\?\) has size 3, axis 'dp' has size 2"):
        check_divides([("x", Type(torch.float32, (3,), (("dp",),)))], Mesh(dp=2))


def test_an_axis_that_is_no_name_is_refused() -> None:
    with pytest.raises(LayoutError, match="2 is no name of a mesh axis"):
        Layout(compute={"batch": 2})  # type: ignore[dict-item]


def test_an_override_gets_the_rows_of_the_layouts_it_is_composed_with() -> None:
    apart = Layout(compute={"mlp": "tp"}, overrides={"*['router']*": Layout()})
    both = apart | Layout(compute={"batch": "dp"}, store=Store(params={"embed": "dp"}))
    types = both.param_types(("embed", "mlp"), (8, 8), torch.float32, "['router']['w']")
    assert (types.compute.dims, types.store.dims) == (((), ()), (("dp",), ()))
    other = both.param_types(("embed", "mlp"), (8, 8), torch.float32, "['up']")
    assert (other.compute.dims, other.store.dims) == (((), ("tp",)), (("dp",), ("tp",)))


def test_an_override_with_a_precision_is_refused() -> None:
    with pytest.raises(LayoutError, match="precision is one for the whole step"):
        Layout(overrides={"*": Layout(precision=Precision(compute=torch.bfloat16))})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout(compute=3), "Layout(compute=...)"),  # type: ignore[arg-type]
        (lambda: Layout(store={"embed": "dp"}), "dict is not Store"),  # type: ignore[arg-type]
        (lambda: Layout(overrides={"*": 3}), "int is not Layout"),  # type: ignore[dict-item]
        (lambda: Precision(compute="bf16"), "str is not dtype"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_table_is_refused_by_name(make: Callable[[], object], words: str) -> None:
    with pytest.raises(LayoutError) as e:
        make()
    assert words in str(e.value) and "fix:" in str(e.value)
