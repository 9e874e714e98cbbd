"""A torch.autograd.Function in a model: its own backward is the gradient, in any layout, block and remat."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import fx_feather as ff
import layouts

F64 = torch.float64
TEMPLATE = {
    "w": ff.Param("embed mlp", (4, 6), dtype=F64, init=ff.normal(0.5)),
    "v": ff.Param("mlp embed", (6, 4), dtype=F64, init=ff.normal(0.5)),
    "s": ff.Param("mlp", (6,), dtype=F64, init=ff.normal(0.5)),
}
LAYOUTS: dict[str, tuple[ff.Mesh, ff.Layout]] = {
    "single": (ff.Mesh(), layouts.single()),
    "ddp": (ff.Mesh(dp=2), layouts.ddp("dp")),
    "fsdp": (ff.Mesh(dp=2), layouts.fsdp("dp")),
    "tp": (ff.Mesh(tp=2), layouts.tp("tp")),
    "fsdp | tp": (ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp("tp")),
    "seq": (ff.Mesh(sp=2), ff.Layout(compute={"seq": "sp"})),
}


class Rounded(torch.autograd.Function):
    """Straight through: its derivative is 0 nearly everywhere, and its backward the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, steps: int) -> torch.Tensor:
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:
        return ct, None


rounded = Rounded.apply  # as many do, at import


class Clipped(torch.autograd.Function):
    """The identity, whose gradient is clipped by a value that the forward saves."""

    @staticmethod
    def forward(x: torch.Tensor, limit: float) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.limit = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ct: torch.Tensor) -> Any:
        return ct.clamp(-ctx.limit, ctx.limit), None


class Linear(torch.autograd.Function):
    """x @ w, with a gradient of w that is twice as large as it should be, and three results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, unused: Any = None) -> Any:
        y = x @ w
        sign = y > 0
        ctx.save_for_backward(x, w, y)
        ctx.mark_non_differentiable(sign)
        return y, sign, y.square()

    @staticmethod
    def backward(ctx: Any, ct: Any, _: Any, ct2: Any) -> Any:
        x, w, y = ctx.saved_tensors
        assert ctx.needs_input_grad[1]
        ct = ct + 2 * y * ct2
        return ct @ w.t(), 2 * torch.einsum("bsi,bso->io", x, ct)


class Scaled(torch.autograd.Function):
    """A broadcast parameter, an attribute of the context, and no gradient for one operand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        ctx.e = torch.exp(s)
        ctx.x = x
        return x * ctx.e

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:
        return None, ct * ctx.x * ctx.e * 0.5


class Both(torch.autograd.Function):
    """A sum over a dim that may be split, and a value of the other operand alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> Any:
        ctx.save_for_backward(x, s, t)
        return (x * s).sum(-1), t * t

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor, ct2: torch.Tensor) -> Any:
        x, s, t = ctx.saved_tensors
        return ct.unsqueeze(-1) * s, (ct.unsqueeze(-1) * x).sum((0, 1)), 3 * t * ct2


def both(p: Any, x: Any) -> Any:
    y, t = Both.apply(x @ p["w"], p["s"], p["v"].sum(0))
    return y.sin().unsqueeze(-1) * t.exp() + t


def alone(p: Any, x: Any) -> Any:
    _, t = Both.apply(x @ p["w"], p["s"], p["v"].sum(0))
    return t.expand_as(x)


def straight(p: Any, x: Any) -> Any:
    return rounded(torch.tanh(x @ p["w"]), 4) @ rounded(p["v"], 8)


def clipped(p: Any, x: Any) -> Any:
    return Clipped.apply(Clipped.apply(x @ p["w"], 0.05).sin() @ p["v"], 0.02)


def linear(p: Any, x: Any) -> Any:
    y, sign, square = Linear.apply(x, p["w"])
    return (torch.where(sign, y, 0.1 * y) + square) @ p["v"]


def scaled(p: Any, x: Any) -> Any:
    return Scaled.apply(x @ p["w"], p["s"]) @ p["v"] + x


def blocked(p: Any, x: Any) -> Any:
    layer = ff.block(lambda q, x: scaled(q, linear(q, x)))
    return layer(p, layer(p, x))


def checkpointed(p: Any, x: Any) -> Any:
    x = checkpoint(lambda x: straight(p, x), x, use_reentrant=False, preserve_rng_state=False)
    return checkpoint(lambda x: F.silu(x @ p["w"]) @ p["v"], x, use_reentrant=False)


def inside(p: Any, x: Any) -> Any:
    """On values that are pending sums, and on one of the batch alone."""
    return Clipped.apply((x @ p["w"]).mean(-1, keepdim=True), 0.01) * Clipped.apply(x, 1.0) + rounded(x, 2) @ (
        p["w"] @ p["v"]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("model", "remat"),
    [
        *((m, "none") for m in (straight, clipped, linear, scaled, blocked, checkpointed, inside, both, alone)),
        (linear, "full"),
        (blocked, "full"),
    ],
)
def test_its_own_backward_is_the_gradient(model: Any, layout: str, remat: str) -> None:
    mesh, table = LAYOUTS[layout]
    batch = torch.randn(4, 6, 4, dtype=F64, generator=torch.Generator().manual_seed(0))

    def loss(p: Any, x: Any) -> Any:
        return (model(p, x) * x).sum(), torch.tensor(3.0)

    step = ff.compile_step(
        loss, ff.sgd(lr=1.0), template=TEMPLATE, mesh=mesh, layout=table, batch=batch, batch_dims="batch seq embed",
        accumulate=2 if layout == "ddp" else 1, remat=remat,
    )  # fmt: skip
    params = ff.init(TEMPLATE, 1)
    leaves = {k: v.clone().requires_grad_(True) for k, v in params.items()}
    if layout == "ddp":
        total, count = (a + b for a, b in zip(*(loss(leaves, x) for x in batch.chunk(2)), strict=True))
    else:
        total, count = loss(leaves, batch)
    # A backward that isn't linear in its cotangent sees that of the sum.
    total.backward()
    new, metrics = step.run_whole(ff.State(params, step.init(seed=0).opt, 0, True), batch)
    assert metrics["loss"] == pytest.approx((total / count).item(), rel=1e-12)
    for k, v in leaves.items():
        want = torch.zeros_like(v) if v.grad is None else v.grad / count
        torch.testing.assert_close(params[k] - new.params[k], want, rtol=1e-10, atol=1e-12)


def test_it_is_what_it_was_outside_of_a_trace() -> None:
    x = torch.tensor([0.3], requires_grad=True)
    rounded(x, 2).sum().backward()
    assert x.grad == 1.0
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:
        return ct * 2


class Short(Rounded):
    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:
        return ct


class Misshapen(Rounded):
    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:
        return ct[:, :1, :1, None], None


class Untensored(Rounded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, steps: int) -> Any:
        return x * 2, steps


class Drawn(Rounded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, steps: int) -> Any:
        return F.dropout(x, 0.5)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: Writes.apply(x * 1), ["Writes.apply", "mark_dirty"]),
        (lambda x: Short.apply(x, 1), ["1 gradients of backward", "2 arguments"]),
        (lambda x: Misshapen.apply(x, 1), ["a gradient of shape"]),
        (lambda x: Untensored.apply(x, 1)[0], ["results of type int"]),
        (lambda x: Drawn.apply(x, 1), ["random numbers"]),
        (lambda x: torch.func.vmap(lambda y: rounded(y, 2))(x), ["setup_context"]),
    ],
)
def test_what_is_refused(fn: Any, words: list[str]) -> None:
    batch = torch.ones(4, 6, 4, dtype=F64)
    with pytest.raises(ff.FeatherError) as e:
        ff.compile_step(
            lambda p, x: ((fn(x @ p["w"]) @ p["v"]).sum(), torch.tensor(1.0)), ff.sgd(lr=0.1), template=TEMPLATE,
            mesh=ff.Mesh(dp=2), layout=layouts.ddp("dp"), batch=batch, batch_dims="batch seq embed",
        )  # fmt: skip
    assert all(w in str(e.value) for w in (*words, "problem:", "test_functions.py")), str(e.value)
