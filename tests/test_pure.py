"""What a trace would lose is refused by name, and what it can keep has the gradient of one device."""

import dataclasses
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import checkpoint

import fx_feather as ff
import layouts
from fx_feather import testing, tree
from fx_feather.errors import NonFiniteError, ShapeError

PARTS = ("got:", "problem:", "rule:", "fix:")
HERE = Path(__file__).name
F64 = torch.float64
TEMPLATE = {"w": ff.Param("embed mlp", (4, 8), dtype=F64)}
X = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
LAYOUTS = (ff.Layout(compute={"mlp": "a"}), ff.Layout(compute={"batch": "a"}), ff.Layout(compute={"embed": "a"}))
Inner = Callable[[torch.Tensor], torch.Tensor]


def compiled(inner: Inner, layout: ff.Layout) -> ff.Compiled:
    fn = ff.value_and_grad(loss_of(inner))
    return ff.compile(
        fn, template=TEMPLATE, mesh=ff.Mesh(a=2), layout=layout, batch=X, batch_dims="batch embed", device="cpu"
    )


def loss_of(inner: Inner) -> Callable[..., Any]:
    return lambda params, x: (inner(x @ params["w"]).sum(), torch.tensor(x.shape[0]))


def refusal(inner: Inner) -> str:
    with pytest.raises(ff.FeatherError) as error:
        compiled(inner, LAYOUTS[0])
    text = str(error.value)
    assert all(part in text for part in PARTS), text
    assert HERE in text, "the user's own line"
    assert "__init__" not in vars(BackwardCFunction), "torch is as it was"
    return text


class SquaredRelu(torch.autograd.Function):
    """Its backward is not the derivative of its forward, so that losing it shows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.relu().square()

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor) -> torch.Tensor:
        return cts[0]


by_name = SquaredRelu.apply  # as models often write it: taken from the class before anything is traced


def test_an_autograd_function_is_refused_in_a_region_too() -> None:
    f = ff.shard_map(lambda x: ff.psum(by_name(x), "a"), mesh=ff.Mesh(a=2), in_specs=ff.P("a"), out_specs=ff.P())
    with pytest.raises(ff.FeatherError, match=r"SquaredRelu\.apply at"):
        f(X)


def test_autograd_functions_work_in_other_threads_and_afterwards() -> None:
    inside, done, found = threading.Event(), threading.Event(), []

    def other() -> None:
        inside.wait(60)
        x = X.clone().requires_grad_()
        by_name(x).sum().backward()
        found.append(x.grad)
        done.set()

    def inner(h: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert done.wait(60)
        return h.exp()

    thread = threading.Thread(target=other)
    thread.start()
    compiled(inner, LAYOUTS[0])
    thread.join()
    assert torch.equal(found[0], torch.ones_like(X))
    assert "__init__" not in vars(BackwardCFunction)
    compiled(by_name, LAYOUTS[0])
    assert "__init__" not in vars(BackwardCFunction)
    x = X.clone().requires_grad_()
    by_name(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(X))


def _backward(h: torch.Tensor) -> torch.Tensor:
    x = h.new_ones(3).requires_grad_()
    x.exp().sum().backward()
    return h * x.grad.sum()


def _hook(h: torch.Tensor) -> torch.Tensor:
    h.register_hook(lambda ct: ct * 2)
    return h


def _autocast(h: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (h @ h.T).double()


# torch.func.jvp itself loads scripts that torch has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
@pytest.mark.parametrize(
    ("inner", "problem", "fix"),
    [
        (
            torch.vmap(torch.func.hessian(lambda row: (row**3).sum())),
            "1 function can't be traced through",
            "torch.func.jacrev of torch.func.grad",
        ),
        (
            torch.no_grad()(torch.func.grad(lambda h: (h**4).sum())),
            "1 gradient would be there nevertheless",
            ".detach(), outside of torch.no_grad",
        ),
        (_backward, "1 call of requires_grad_ would be lost", "ff.value_and_grad"),
        (lambda h: h * torch.zeros(8, requires_grad=True), "requires_grad=True would be lost", "ff.value_and_grad"),
        (_hook, "1 call of register_hook would be lost", "vjp=fn"),
        (_autocast, "1 context would be lost", "ff.Precision(compute=torch.bfloat16)"),
    ],
)
def test_what_a_trace_would_lose_is_refused(inner, problem, fix) -> None:
    # The line of a lambda that torch calls is the line that called torch.
    text = refusal(lambda h: inner(h))
    assert problem in text and fix in text


def _no_grad(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        k = h.exp()
    return h * k


def _enabled_inside(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        k = h.exp()
        with torch.enable_grad():
            m = h.sin()
        n = m * 2
    return h * k + m + h * n


def _inference(h: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        k = h.exp()
    return h * k.clone()


def _handed_on(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        k, v = h.contiguous(), h.unsqueeze(0)
        d = h.to(torch.float64)
    return h * k + d.exp() * v[0]


def _pulled(h: torch.Tensor) -> torch.Tensor:
    out, pull = torch.func.vjp(lambda x: x.tanh() * x, h)
    return pull(out.sin())[0]


def _rows(h: torch.Tensor) -> torch.Tensor:
    # A block and a constraint inside of a transform are part of it.
    return torch.vmap(lambda row: ff.constrain(ff.block(torch.sin)(row), "mlp"))(h)


def _filled_rows(h: torch.Tensor) -> torch.Tensor:
    def fill(row: torch.Tensor) -> torch.Tensor:
        out = row * 2
        out += row.exp()
        return out

    out = torch.vmap(fill)(h)
    out.mul_(h)
    return out * torch.vmap(torch.cos)(h).detach()


def _beside_blocks(h: torch.Tensor) -> torch.Tensor:
    inner = ff.block(torch.func.grad(lambda x: (x**3).sum()))
    with torch.no_grad():
        k = torch.vmap(torch.exp)(h)
    return inner(h) + ff.block(torch.sin)(inner(h * 0.1)) * k


def _recursive():
    def power(h: torch.Tensor, n: int = 3) -> torch.Tensor:
        return h * power(h, n - 1) if n else h

    return power


@torch.no_grad()
def _decorated(h: torch.Tensor) -> torch.Tensor:
    return h.exp()


def _around_a_block(h: torch.Tensor) -> torch.Tensor:
    f = ff.block(torch.exp, "exp")
    with torch.no_grad():
        k = f(h)
        same = ff.block(lambda x: x, "same")(h)
    return f(h) * k + same.sin()


def _disabled_autocast(h: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return h.exp()


KEPT: list[Inner] = [
    lambda h: h * h.detach(),
    _no_grad,
    _enabled_inside,
    _inference,
    _handed_on,
    lambda h: h * _decorated(h),
    lambda h: h * ff.block(_decorated, "decorated")(h),
    _around_a_block,
    _disabled_autocast,
    lambda h: ff.block(_recursive())(h),
    torch.func.grad(lambda h: h.exp().sum()),
    lambda h: torch.func.jvp(torch.exp, (h,), (h,))[1],
    torch.vmap(torch.func.grad(lambda row: (row.sin() * row).sum())),
    torch.vmap(torch.func.jacrev(torch.func.grad(lambda row: (row**3).sum()))),
    _pulled,
    _rows,
    _filled_rows,
    _beside_blocks,
]


@pytest.mark.parametrize("inner", KEPT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_no_gradient_is_wanted_there_is_none(inner, layout) -> None:
    params = ff.init(TEMPLATE, seed=1)
    want = ff.value_and_grad(loss_of(inner))(params, X)
    got = compiled(inner, layout).simulate(params, X)
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_checkpoint_is_its_function() -> None:
    params = ff.init(TEMPLATE, seed=1)
    got = compiled(lambda h: checkpoint(torch.exp, h, use_reentrant=False), LAYOUTS[1]).simulate(params, X)
    for a, b in zip(tree.leaves(got), tree.leaves(ff.value_and_grad(loss_of(torch.exp))(params, X)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_compiling_under_no_grad_changes_nothing() -> None:
    params = ff.init(TEMPLATE, seed=1)
    with torch.no_grad():
        g = compiled(torch.exp, LAYOUTS[0])
        got = g.simulate(params, X)[1]["w"]
    torch.testing.assert_close(got, ff.value_and_grad(loss_of(torch.exp))(params, X)[1]["w"], rtol=1e-12, atol=1e-12)


class Scaled:
    """A part of a model with a setting that changes between calls."""

    def __init__(self) -> None:
        self.scale, self.inner = 1.0, {"power": [1]}

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return (h * self.scale) ** self.inner["power"][0]

    def method(self, h: torch.Tensor) -> torch.Tensor:
        return h.sin() * self.scale


FACTOR = 1.0


def _reads_its_module(h: torch.Tensor) -> torch.Tensor:
    return h.cos() * FACTOR


@dataclasses.dataclass
class Settings:
    scale: float


def _what_changes(h: torch.Tensor) -> torch.Tensor:
    global FACTOR
    part, settings, chosen = Scaled(), Settings(1.0), {1}
    blocks = [
        ff.block(part, "object"), ff.block(part.method), ff.block(lambda x: x * settings.scale),
        ff.block(_reads_its_module), ff.block(lambda x: x * max(chosen)),
    ]  # fmt: skip
    out = sum(f(h) for f in blocks)
    part.scale, part.inner["power"], settings.scale, FACTOR = 3.0, [2], 5.0, 7.0
    chosen.add(9)
    out = out + sum(f(h) for f in blocks)
    FACTOR = 1.0
    return out


def _complex_block(h: torch.Tensor) -> torch.Tensor:
    z = ff.block(lambda x: torch.complex(x, 2 * x), "pair")(h)
    with torch.no_grad():
        turned = z * 1j
    return torch.view_as_real(ff.block(lambda z, t: z**2 * t, "square")(z, turned)).sum(-1)


SETTINGS = types.SimpleNamespace(scale=1.0, deeper=[types.SimpleNamespace(power=1)])


def _helper(h: torch.Tensor) -> torch.Tensor:
    return h.sin() * FACTOR * SETTINGS.deeper[0].power


def _what_a_module_holds(h: torch.Tensor) -> torch.Tensor:
    global FACTOR
    blocks = [
        ff.block(lambda x: x * SETTINGS.scale, "namespace"), ff.block(lambda x: _helper(x), "helper"),
        ff.block(lambda x: next(y * SETTINGS.deeper[0].power for y in [x]), "nested"),
    ]  # fmt: skip
    out = sum(f(h) for f in blocks)
    SETTINGS.scale, SETTINGS.deeper[0].power, FACTOR = 3.0, 2, 7.0
    out = out + sum(f(h) for f in blocks)
    SETTINGS.scale, SETTINGS.deeper[0].power, FACTOR = 1.0, 1, 1.0
    return out


@pytest.mark.parametrize(
    "inner",
    [_what_changes, _what_a_module_holds, _complex_block, lambda h: h * h.data, lambda h: h * h.exp().data],
)
def test_what_a_trace_sees_is_what_happens(inner: Inner) -> None:
    testing.assert_equivalent(
        lambda p, x: (inner(x @ p["w"]).sum(), torch.tensor(x.shape[0])),
        template={"w": ff.Param("embed mlp", (3, 4), dtype=torch.float64)},
        batch=torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        batch_dims="batch embed",
        mesh=ff.Mesh(dp=2),
        layout=layouts.fsdp("dp"),
    )


def _stepped(loss: Any) -> tuple[Any, torch.Tensor]:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    return ff.compile_step(
        loss, ff.sgd(lr=0.1), template={"w": ff.Param("embed mlp", (3, 4))}, batch=x, batch_dims="batch embed",
        mesh=ff.Mesh(dp=2), layout=layouts.ddp("dp"), accumulate=2,
    ), x  # fmt: skip


def test_whether_a_gradient_is_wanted_is_no_question_of_a_trace() -> None:
    with pytest.raises(ff.FeatherError, match=r"x\.requires_grad in .*test_pure\.py:\d+: _stepped") as caught:
        _stepped(lambda p, x: (p["w"].sum(), torch.tensor(1)) if p["w"].requires_grad else None)
    assert "x.detach() where no gradient is wanted" in str(caught.value)


def test_a_count_that_depends_on_parameters_is_refused_and_detached_is_a_constant() -> None:
    def gated(p: Any, x: torch.Tensor, detach: bool) -> Any:
        gate = torch.sigmoid(x @ p["w"])
        count = gate.sum()
        return (gate * gate).sum(), count.detach() if detach else count

    with pytest.raises(ShapeError, match="depends on the parameters") as caught:
        _stepped(lambda p, x: gated(p, x, False))
    assert "count.detach()" in str(caught.value)
    step, x = _stepped(lambda p, x: gated(p, x, True))
    state = step.init(seed=0)
    _, metrics = step.simulate(state, x)
    assert metrics["count"] == pytest.approx(float(gated(state.params, x, True)[1]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.float16, torch.int32])
def test_counts_of_narrow_dtypes_are_added_wide(dtype: torch.dtype) -> None:
    step, x = _stepped(lambda p, x: ((x @ p["w"]).sum(), (x.sum() * 0 + 100).to(dtype)))
    _, metrics = step.simulate(step.init(seed=0), x)
    # What the count is of a part of the batch is not for a rank to add: x.sum() is resolved first.
    assert metrics["count"] == 2 * (1 if dtype == torch.bool else 100)


def test_a_negative_count_is_refused() -> None:
    step, x = _stepped(lambda p, x: ((x @ p["w"]).sum(), torch.tensor(-3)))
    state = step.init(seed=0)
    with pytest.raises(NonFiniteError, match="the count is -6: it can't normalise a sum"):
        step.simulate(state, x)
    assert state.params is not None
