"""Operators of one's own: by the vjp of their rule they have, in every layout, the gradients of one device."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fx_feather as ff
from fx_feather import tree
from fx_feather.errors import RuleError
from fx_feather.rules import RULES

PARTS = ("got:", "problem:", "rule:", "fix:")
HERE = Path(__file__).name
F64 = torch.float64
MESH = ff.Mesh(a=2, b=2)
TEMPLATE = {
    "w": ff.Param("embed mlp", (4, 8), init=ff.normal(0.5), dtype=F64),
    "v": ff.Param("mlp", (8,), init=ff.normal(1.0), dtype=F64),
}
X = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
LAYOUTS = {
    "batch and mlp": ff.Layout(compute={"batch": "a", "mlp": "b"}),
    "the contraction": ff.Layout(compute={"batch": "a", "embed": "b"}),
    "at rest": ff.Layout(compute={"batch": "a"}, store=ff.Store(params={"embed": "a", "mlp": "b"})),
}

LIBRARY = torch.library.Library("test_custom", "DEF")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], key: str = "CPU") -> None:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, key)
    if key != "CompositeImplicitAutograd":
        torch.library.register_fake(f"test_custom::{name}", fake, lib=LIBRARY)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return x.relu().square()


def scaled(x: torch.Tensor, s: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return x * s * by


define("bare(Tensor x) -> Tensor", squared_relu, torch.empty_like)
define("explicit(Tensor x) -> Tensor", squared_relu, torch.empty_like, "CompositeExplicitAutograd")
define(
    "bare_backward(Tensor x, Tensor ct) -> Tensor", lambda x, ct: 2 * x.relu() * ct, lambda x, ct: x.new_empty(x.shape)
)
define("scaled(Tensor x, Tensor s, *, float by=1.0) -> Tensor", scaled, lambda x, s, by=1.0: x.new_empty(x.shape))
define("mix(Tensor[] xs, Tensor i) -> (Tensor, Tensor, Tensor)",
       lambda xs, i: (xs[0] * xs[1], xs[0].argmax(1), xs[1].square().sum(1)),
       lambda xs, i: (xs[0].new_empty(xs[0].shape), xs[0].new_empty(xs[0].shape[0], dtype=torch.int64),
                      xs[0].new_empty(xs[0].shape[0])))  # fmt: skip


@torch.library.custom_op("test_custom::registered", mutates_args=())
def registered(x: torch.Tensor) -> torch.Tensor:
    return squared_relu(x)


@torch.library.custom_op("test_custom::formless", mutates_args=())
def formless(x: torch.Tensor) -> torch.Tensor:
    return squared_relu(x)


@torch.library.custom_op("test_custom::fakeless", mutates_args=())
def fakeless(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


registered.register_fake(torch.empty_like)
registered.register_autograd(
    lambda ctx, ct: ct * 2 * ctx.saved_tensors[0].relu(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
formless.register_fake(torch.empty_like)
OPS = torch.ops.test_custom


@pytest.fixture(autouse=True)
def _no_rules() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def loss_of(inner: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda params, x: (inner(x @ params["w"], params["v"]).sum(), torch.tensor(x.shape[0]))


def compiled(inner: Callable[..., torch.Tensor], layout: ff.Layout) -> ff.Compiled:
    fn = ff.value_and_grad(loss_of(inner))
    return ff.compile(fn, template=TEMPLATE, mesh=MESH, layout=layout, batch=X, batch_dims="batch embed", device="cpu")


def check(inner: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], layout: ff.Layout) -> None:
    """Loss and gradients are those of the same function in plain operators, on one device and on ranks."""
    params = ff.init(TEMPLATE, seed=0)
    want = ff.value_and_grad(loss_of(reference))(params, X)
    for got in (ff.value_and_grad(loss_of(inner))(params, X), compiled(inner, layout).simulate(params, X)):
        for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(RuleError) as error:
        call()
    text = str(error.value)
    assert all(part in text for part in PARTS), text
    return text


def squared_relu_vjp(ct: torch.Tensor, result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ct * 2 * x.relu()


each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_kind = pytest.mark.parametrize("name", ["bare", "explicit", "registered", "formless"])


@each_kind
@each_layout
def test_a_handwritten_backward_is_used(name, layout) -> None:
    ff.rule(f"test_custom::{name}", "... -> ...", vjp=squared_relu_vjp)
    op = getattr(OPS, name)
    check(lambda h, v: op(h) * v, lambda h, v: squared_relu(h) * v, layout)
    check(lambda h, v: op.default(h * v), lambda h, v: squared_relu(h * v), layout)


@each_layout
def test_a_backward_may_be_an_operator_that_torch_cannot_differentiate(layout) -> None:
    ff.rule("test_custom::bare", "... -> ...", vjp=lambda ct, y, x: OPS.bare_backward(x, ct))
    check(lambda h, v: OPS.bare(h) * v, lambda h, v: squared_relu(h) * v, layout)


@each_layout
def test_an_operand_that_others_broadcast_gets_its_whole_sum(layout) -> None:
    def vjp(ct: torch.Tensor, y: torch.Tensor, x: torch.Tensor, s: torch.Tensor, *, by: float = 1.0) -> Any:
        return ct * s * by, (ct * x * by).sum(0)

    ff.rule("test_custom::scaled", "b m, m -> b m", linear="0|1", vjp=vjp)
    check(lambda h, v: OPS.scaled(h, v, by=3.0).exp(), lambda h, v: scaled(h, v, 3.0).exp(), layout)
    g = compiled(lambda h, v: OPS.scaled(h, v, by=3.0), LAYOUTS["the contraction"])
    assert [c.name for c in g.collectives()].count("psum") >= 1, "a pending sum passes through what is linear"


def test_several_results_lists_and_integers() -> None:
    def vjp(cts: Any, results: Any, xs: list[torch.Tensor], i: torch.Tensor) -> Any:
        product, argmax, squares = cts
        assert argmax is None and results[1].dtype == torch.int64
        return product * xs[1], product * xs[0] + 2 * xs[1] * squares[:, None], None

    def inner(mix: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def run(h: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            product, at, squares = mix([h.sin(), h], torch.arange(4))
            return product.sum() + squares.exp().sum() + at.sum() * v.sum()

        return run

    ff.rule("test_custom::mix", "b !m, b !m, b -> b !m, b, b", vjp=vjp)
    plain = inner(lambda xs, i: (xs[0] * xs[1], xs[0].argmax(1), xs[1].square().sum(1)))
    check(inner(OPS.mix), plain, LAYOUTS["at rest"])


def test_none_is_no_gradient() -> None:
    ff.rule("test_custom::bare", "... -> ...", vjp=lambda ct, y, x: None)
    check(lambda h, v: OPS.bare(h) * v + h, lambda h, v: squared_relu(h).detach() * v + h, LAYOUTS["batch and mlp"])


def test_an_operator_in_a_region() -> None:
    ff.rule("test_custom::registered", "... -> ...", vjp=squared_relu_vjp)

    def region(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return ff.shard_map(
            lambda h: ff.psum(op(h).sum(0), "a"), mesh=MESH, in_specs=ff.P("a", "b"), out_specs=ff.P("b")
        )

    check(lambda h, v: region(registered)(h) * v, lambda h, v: region(squared_relu)(h) * v, LAYOUTS["batch and mlp"])


def test_the_vjp_of_a_vjp() -> None:
    ff.rule("test_custom::registered", "... -> ...", vjp=squared_relu_vjp)

    def penalty(op: Callable[..., torch.Tensor]) -> torch.Tensor:
        loss = ff.value_and_grad(lambda p, x: (op(x @ p).exp().sum(), torch.tensor(1)))
        return torch.func.grad(lambda p: loss(p, X)[1].square().sum())(torch.full((4, 8), 0.3, dtype=F64))

    torch.testing.assert_close(penalty(registered), penalty(squared_relu), rtol=1e-11, atol=1e-12)


@each_kind
def test_an_operator_without_a_vjp_is_named(name) -> None:
    op = getattr(OPS, name)
    ff.rule(f"test_custom::{name}", "... -> ...")
    params, layout = ff.init(TEMPLATE, seed=0), LAYOUTS["batch and mlp"]
    for call in (
        lambda: compiled(lambda h, v: op(h) * v, layout),
        lambda: ff.value_and_grad(loss_of(lambda h, v: op(h) * v))(params, X),
    ):
        text = refusal(call)
        assert f"the gradient of test_custom::{name}" in text
        assert f'ff.rule("test_custom::{name}", pattern, vjp=fn)' in text
    assert HERE in refusal(lambda: compiled(lambda h, v: op(h) * v, layout))
    # What asks for no gradient needs none.
    check(lambda h, v: op(h.detach()) * v, lambda h, v: squared_relu(h).detach() * v, layout)


def test_an_aten_operator_without_a_derivative_is_named() -> None:
    text = refusal(lambda: compiled(lambda h, v: torch.igamma(h.exp(), h.exp()) * v, LAYOUTS["batch and mlp"]))
    assert "the gradient of loss" in text and 'ff.rule("aten::igamma", pattern, vjp=fn)' in text


@pytest.mark.parametrize(
    ("vjp", "problem"),
    [
        (lambda ct, y, x: (ct, ct), "2 gradients for 1 tensor operands"),
        (lambda ct, y, x: ct.sum(0), "number 0 is f64["),
        (lambda ct, y, x: ct.float(), "number 0 is f32["),
        (lambda ct, y, x: 1.0, "number 0 is float"),
    ],
)
def test_gradients_that_do_not_fit(vjp, problem) -> None:
    ff.rule("test_custom::bare", "... -> ...", vjp=vjp)
    text = refusal(lambda: compiled(lambda h, v: OPS.bare(h) * v, LAYOUTS["batch and mlp"]))
    assert problem in text and "the vjp of the rule for test_custom.bare" in text


def test_an_operator_without_a_rule_gets_a_pattern_to_paste() -> None:
    text = refusal(lambda: compiled(lambda h, v: OPS.scaled(h, v), LAYOUTS["batch and mlp"]))
    assert HERE in text and 'ff.rule("test_custom::scaled", "!a !b, !b -> !a !b")' in text


def test_an_operator_that_does_not_say_its_shapes() -> None:
    LIBRARY.define("shapeless(Tensor x) -> Tensor")
    LIBRARY.impl("shapeless", torch.clone, "CPU")
    for name in ("shapeless", "fakeless"):
        op = getattr(OPS, name)
        text = refusal(lambda op=op: compiled(lambda h, v: op(h) * v, LAYOUTS["batch and mlp"]))
        assert f"test_custom::{name} in" in text and HERE in text
        assert f'torch.library.register_fake("test_custom::{name}", fn)' in text
