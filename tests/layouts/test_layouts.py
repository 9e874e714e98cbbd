"""The named layouts: what each makes of a decoder, alone and composed over up to three axes."""

import itertools

import pytest
import torch

import layouts
from fx_feather.errors import LayoutError, ShapeError
from fx_feather.layout import Layout, check_divides
from fx_feather.mesh import Mesh
from fx_feather.models.llama import LlamaConfig, template
from fx_feather.spec import Type

SIZES = {"batch": 8, "seq": 16, "residual_seq": 16, "embed": 64, "heads": 8, "kv_heads": 4, "head_dim": 9}
SIZES |= {"mlp": 96, "vocab": 257}


def types(layout: Layout, names: str) -> tuple[str, str, str, str]:
    """A parameter in use, at rest, its gradient and its optimizer state, in the one notation."""
    dims = tuple(names.split())
    t = layout.param_types(dims, tuple(SIZES[d] for d in dims), torch.float32)
    return repr(t.compute), repr(t.store), repr(t.grads), repr(t.opt)


def value(layout: Layout, names: str) -> Type:
    dims = tuple(names.split())
    return Type(torch.bfloat16, tuple(SIZES[d] for d in dims), layout.value_dims(dims), names=dims)


WHOLE = {
    "embed heads head_dim": "f32[64, 8, 9]",
    "vocab embed": "f32[257, 64]",
    "embed": "f32[64]",
    "head_dim": "f32[9]",
}
EMBED = {
    "embed heads head_dim": "f32[64@x, 8, 9]",
    "vocab embed": "f32[257, 64@x]",
    "embed": "f32[64@x]",
    "head_dim": "f32[9]",
}
TENSOR = {
    "embed heads head_dim": "f32[64, 8@x, 9]",
    "embed kv_heads head_dim": "f32[64, 4@x, 9]",
    "heads head_dim embed": "f32[8@x, 9, 64]",
    "embed mlp": "f32[64, 96@x]",
    "mlp embed": "f32[96@x, 64]",
    "vocab embed": "f32[257@x, 64]",
    "embed": "f32[64]",
    "head_dim": "f32[9]",
}
BOTH = {
    "embed heads head_dim": "f32[64@s, 8@t, 9]",
    "heads head_dim embed": "f32[8@t, 9, 64@s]",
    "vocab embed": "f32[257@t, 64@s]",
    "embed": "f32[64@s]",
    "head_dim": "f32[9]",
}
BOTH_IN_USE = {
    "embed heads head_dim": "f32[64, 8@t, 9]",
    "heads head_dim embed": "f32[8@t, 9, 64]",
    "vocab embed": "f32[257@t, 64]",
    "embed": "f32[64]",
    "head_dim": "f32[9]",
}


@pytest.mark.parametrize(
    ("layout", "compute", "store", "grads", "opt"),
    [
        pytest.param(layouts.single(), WHOLE, WHOLE, WHOLE, WHOLE, id="single"),
        pytest.param(layouts.mixed(), WHOLE, WHOLE, WHOLE, WHOLE, id="mixed"),
        pytest.param(layouts.ddp("x"), WHOLE, WHOLE, WHOLE, WHOLE, id="ddp"),
        pytest.param(layouts.zero1("x"), WHOLE, WHOLE, WHOLE, EMBED, id="zero1"),
        pytest.param(layouts.zero2("x"), WHOLE, WHOLE, EMBED, EMBED, id="zero2"),
        pytest.param(layouts.fsdp("x"), WHOLE, EMBED, EMBED, EMBED, id="fsdp"),
        pytest.param(layouts.zero3("x"), WHOLE, EMBED, EMBED, EMBED, id="zero3"),
        pytest.param(layouts.hsdp("r", "x"), WHOLE, EMBED, EMBED, EMBED, id="hsdp"),
        pytest.param(layouts.tp("x"), TENSOR, TENSOR, TENSOR, TENSOR, id="tp"),
        pytest.param(layouts.tp_sp("x"), TENSOR, TENSOR, TENSOR, TENSOR, id="tp_sp"),
        pytest.param(layouts.cp("x"), WHOLE, WHOLE, WHOLE, WHOLE, id="cp"),
        pytest.param(layouts.ddp("d") | layouts.tp("x"), TENSOR, TENSOR, TENSOR, TENSOR, id="ddp|tp"),
        pytest.param(layouts.zero1("s") | layouts.tp("t"), *[BOTH_IN_USE] * 3, BOTH, id="zero1|tp"),
        pytest.param(layouts.zero2("s") | layouts.tp_sp("t"), *[BOTH_IN_USE] * 2, BOTH, BOTH, id="zero2|tp_sp"),
        pytest.param(layouts.fsdp("s") | layouts.tp("t"), BOTH_IN_USE, *[BOTH] * 3, id="fsdp|tp"),
        pytest.param(layouts.tp("t") | layouts.fsdp("s"), BOTH_IN_USE, *[BOTH] * 3, id="tp|fsdp"),
        pytest.param(layouts.hsdp("r", "s") | layouts.tp_sp("t"), BOTH_IN_USE, *[BOTH] * 3, id="hsdp|tp_sp"),
    ],
)
def test_the_types_of_parameters(layout: Layout, compute: dict, store: dict, grads: dict, opt: dict) -> None:
    for names, text in compute.items():
        assert types(layout, names) == (text, store[names], grads[names], opt[names])


@pytest.mark.parametrize(
    ("layout", "residual", "hidden", "logits"),
    [
        (layouts.single(), "bf16[8, 16, 64]", "bf16[8, 16, 96]", "bf16[8, 16, 257]"),
        (layouts.ddp("d"), "bf16[8@d, 16, 64]", "bf16[8@d, 16, 96]", "bf16[8@d, 16, 257]"),
        (layouts.fsdp("d"), "bf16[8@d, 16, 64]", "bf16[8@d, 16, 96]", "bf16[8@d, 16, 257]"),
        (layouts.hsdp("r", "s"), "bf16[8@(r,s), 16, 64]", "bf16[8@(r,s), 16, 96]", "bf16[8@(r,s), 16, 257]"),
        (layouts.tp("t"), "bf16[8, 16, 64]", "bf16[8, 16, 96@t]", "bf16[8, 16, 257@t]"),
        (layouts.tp_sp("t"), "bf16[8, 16@t, 64]", "bf16[8, 16, 96@t]", "bf16[8, 16, 257@t]"),
        (layouts.cp("c"), "bf16[8, 16@c, 64]", "bf16[8, 16@c, 96]", "bf16[8, 16@c, 257]"),
        (layouts.cp("c") | layouts.tp_sp("t"), "bf16[8, 16@(c,t), 64]", "bf16[8, 16@c, 96@t]", "bf16[8, 16@c, 257@t]"),
        (
            layouts.hsdp("r", "s") | layouts.tp_sp("t"),
            "bf16[8@(r,s), 16@t, 64]",
            "bf16[8@(r,s), 16, 96@t]",
            "bf16[8@(r,s), 16, 257@t]",
        ),
    ],
)
def test_the_types_of_values(layout: Layout, residual: str, hidden: str, logits: str) -> None:
    assert repr(value(layout, "batch residual_seq embed")) == residual
    assert repr(value(layout, "batch seq mlp")) == hidden
    assert repr(value(layout, "batch seq vocab")) == logits


def test_several_axes_serve_as_one() -> None:
    assert types(layouts.fsdp(("a", "b")), "vocab embed")[1] == "f32[257, 64@(a,b)]"
    assert types(layouts.tp(("a", "b")), "vocab embed")[1] == "f32[257@(a,b), 64]"
    assert repr(value(layouts.ddp(("a", "b")), "batch seq")) == "bf16[8@(a,b), 16]"


def test_the_order_of_composition_says_which_axis_is_major() -> None:
    left, right = layouts.ddp("r") | layouts.fsdp("s"), layouts.fsdp("s") | layouts.ddp("r")
    assert repr(value(left, "batch")) == "bf16[8@(r,s)]"
    assert repr(value(right, "batch")) == "bf16[8@(s,r)]"
    assert left == layouts.hsdp("r", "s")
    assert types(left, "vocab embed") == types(right, "vocab embed")


def test_an_axis_of_both_parts_goes_to_the_earlier_row() -> None:
    assert repr(value(layouts.ddp("x") | layouts.tp("x"), "batch seq mlp")) == "bf16[8@x, 16, 96]"
    assert repr(value(layouts.tp("x") | layouts.ddp("x"), "batch seq mlp")) == "bf16[8, 16, 96@x]"
    assert repr(value(layouts.tp_sp("x"), "batch residual_seq mlp")) == "bf16[8, 16, 96@x]"
    # A weight that tensor parallel splits over the axis already is not split over it again at rest.
    both = layouts.fsdp("x") | layouts.tp("x")
    assert types(both, "embed mlp")[1] == "f32[64, 96@x]" and types(both, "embed")[1] == "f32[64@x]"


def test_a_stage_adds_a_row_to_the_stage_before() -> None:
    stages = [f("x").store for f in (layouts.ddp, layouts.zero1, layouts.zero2, layouts.fsdp)]
    row = {"embed": ("x",), "latent": ("x",)}
    assert [s.opt for s in stages] == [{}, row, row, row]
    assert [s.grads for s in stages] == [{}, {}, row, row]
    assert [s.params for s in stages] == [{}, {}, {}, row]
    assert len({repr(f("x").compute) for f in (layouts.ddp, layouts.zero1, layouts.zero2, layouts.fsdp)}) == 1


def test_each_layout_has_a_usual_axis() -> None:
    assert layouts.ddp() == layouts.ddp("dp") and layouts.zero1() == layouts.zero1("dp")
    assert layouts.zero2() == layouts.zero2("dp") and layouts.fsdp() == layouts.fsdp("fsdp")
    assert layouts.hsdp() == layouts.hsdp("replica", "shard") and layouts.zero3() == layouts.fsdp()
    assert layouts.cp() == layouts.cp("cp")
    assert layouts.tp() == layouts.tp("tp") and layouts.tp_sp() == layouts.tp_sp("tp")


def test_mixed_precision_is_kept_in_any_order() -> None:
    for layout in (layouts.mixed() | layouts.fsdp("x"), layouts.fsdp("x") | layouts.mixed()):
        assert (layout.precision.compute, layout.precision.reduce) == (torch.bfloat16, torch.float32)
    low = layouts.mixed(compute=torch.float16, reduce=torch.bfloat16)
    assert (low.precision.compute, low.precision.reduce) == (torch.float16, torch.bfloat16)


DATA = [layouts.ddp, layouts.zero1, layouts.zero2, layouts.fsdp]
TENSORS = [layouts.tp, layouts.tp_sp]
MODEL = LlamaConfig(vocab=257, layers=1, embed=40, heads=8, kv_heads=4, head_dim=6, mlp=24, qk_norm=True)


@pytest.mark.parametrize(
    ("outer", "inner", "tensor"), list(itertools.product(DATA, DATA, TENSORS)), ids=lambda f: f.__name__
)
def test_every_composition_over_three_axes_holds_a_model_and_splits_what_it_may(outer, inner, tensor) -> None:
    mesh = Mesh(a=3, b=2, t=2)
    layout = outer("a") | inner("b") | tensor("t") | layouts.mixed()
    layout.check_axes(mesh)
    layout.check_dims([])
    leaves = [template(MODEL)["layers"][0]["attention"]["q"], template(MODEL)["embed"], template(MODEL)["norm"]]
    for leaf in leaves:
        t = layout.param_types(leaf.dim_names, leaf.shape, leaf.dtype)
        check_divides([("leaf", t.compute)], mesh)
        owed = {a for a, f in (("a", outer), ("b", inner)) if f is not layouts.ddp}
        assert t.opt.sharded - t.compute.sharded == owed
        assert t.store.sharded <= t.grads.sharded <= t.opt.sharded
        assert t.compute.sharded == ({"t"} if len(leaf.dim_names) > 1 else set())


@pytest.mark.parametrize(
    ("make", "dim"),
    [
        (lambda: layouts.hsdp("x", "x"), "batch"),
        (lambda: layouts.fsdp("x") | layouts.fsdp("x"), "batch"),
        (lambda: layouts.ddp("x") | layouts.zero1("x"), "batch"),
        (lambda: layouts.tp("x") | layouts.tp_sp("x"), "heads"),
        (lambda: layouts.ddp(("x", "y", "x")), "batch"),
    ],
)
def test_an_axis_used_twice_is_refused(make, dim: str) -> None:
    with pytest.raises(LayoutError, match=f"axis 'x' is used 2 times for dim '{dim}'"):
        make()


@pytest.mark.parametrize(
    ("layout", "mesh", "problem", "fix"),
    [
        (layouts.ddp("dp"), Mesh(tp=2), "'dp' is not one of the axes ['tp']", "Mesh(..., dp=2)"),
        (layouts.fsdp(), Mesh(fsdb=2), "'fsdp' is not one of the axes ['fsdb']", "did you mean 'fsdb'?"),
        (layouts.tp_sp("tp"), Mesh(dp=2), "'tp' is not one of the axes ['dp']", "Mesh(..., tp=2)"),
        (layouts.hsdp(), Mesh(shard=2), "'replica' is not one of the axes ['shard']", "Mesh(..., replica=2)"),
    ],
)
def test_a_layout_that_does_not_fit_its_mesh_is_refused(layout: Layout, mesh: Mesh, problem: str, fix: str) -> None:
    with pytest.raises(LayoutError) as caught:
        layout.check_axes(mesh)
    text = str(caught.value)
    assert problem in text and fix in text.split("fix:")[1], text


def test_a_row_of_an_unknown_dim_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(LayoutError) as caught:
        (layouts.tp() | Layout(compute={"head": "tp"})).check_dims(["embed"])
    text = str(caught.value)
    assert "has a dim 'head'" in text and "did you mean 'heads'" in text.split("fix:")[1], text


def test_fewer_kv_heads_than_ranks_are_shared() -> None:
    params = [(("embed", "kv_heads", "head_dim"), (64, 2, 9)), (("embed", "heads", "head_dim"), (64, 8, 9))]
    tp = layouts.tp("tp")
    assert tp.fitted(Mesh(tp=2), params) == tp and tp.fitted(Mesh(tp=4), params).compute["kv_heads"] == ()
    assert tp.fitted(Mesh(tp=3), params) == tp, "3 and 2: refused by check_divides"
    two = layouts.tp(("a", "b")).fitted(Mesh(a=2, b=2), params)
    assert two.compute["kv_heads"] == ("a",) and two.compute["heads"] == ("a", "b")


def test_kv_heads_that_do_not_divide_are_refused_with_both_numbers() -> None:
    layout, mesh = layouts.tp("tp"), Mesh(tp=8)
    names = ("embed heads head_dim", "embed kv_heads head_dim", "mlp embed", "vocab embed")
    with pytest.raises(ShapeError) as caught:
        check_divides([(n, value(layout, n)) for n in names], mesh)
    text = str(caught.value)
    assert "dim 1 (kv_heads) has size 4, axis 'tp' has size 8" in text, text
    assert "bf16[64, 4@tp, 9] on Mesh(tp=8)" in text and "kv_heads of size 8" in text, text
    assert "problems" not in text, "heads and mlp divide, and the vocabulary is padded"


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"dim 1 \(residual_seq\) has size 16, axis 'tp' has size 3"):
        check_divides([("x", value(layouts.tp_sp(), "batch residual_seq embed"))], Mesh(tp=3))
