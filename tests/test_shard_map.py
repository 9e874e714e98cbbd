"""Manual regions that run on their own: every way of taking a gradient gives that of the function of whole values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fx_feather as ff
from fx_feather import tree

F64 = torch.float64
MESH = ff.Mesh(a=2, b=2)
X = torch.randn(8, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
W = torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
Fn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def local(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ff.psum(torch.tanh(x @ w).pow(3).sum(0), "a")


def whole(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).pow(3).sum(0)


REGION = ff.shard_map(local, mesh=MESH, in_specs=(ff.P("a"), ff.P(None, "b")), out_specs=ff.P("b"))


def _backward(f: Fn) -> Any:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    f(x, w).exp().sum().backward()
    return x.grad, w.grad


def _twice(f: Fn) -> Any:
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x, W).exp().sum(), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), x)


WAYS: dict[str, Callable[[Fn], Any]] = {
    "backward": _backward,
    "backward twice": _twice,
    "grad": lambda f: torch.func.grad(lambda x, w: f(x, w).exp().sum(), argnums=(0, 1))(X, W),
    "grad of one": lambda f: torch.func.grad(lambda w: f(X, w).exp().sum())(W),
    "vjp": lambda f: torch.func.vjp(f, X, W)[1](torch.arange(6, dtype=F64)),
    "grad of grad": lambda f: torch.func.grad(
        lambda x: torch.func.grad(lambda y: f(y, W).exp().sum())(x).square().sum()
    )(X),
    "value_and_grad": lambda f: ff.value_and_grad(lambda p, x: (f(x, p).sum(), torch.tensor(2)))(W, X),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_gradients_of_a_region_on_its_own(way) -> None:
    for a, b in zip(tree.leaves(way(REGION)), tree.leaves(way(whole)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_gradients_taken_inside() -> None:
    def inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        g = torch.func.grad(lambda v: ff.psum(torch.tanh(x @ v).sum(), "a"))(w)
        return ff.psum((g * w).sum(), "b")

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.func.grad(lambda v: torch.tanh(x @ v).sum())(w) * w).sum()

    f = ff.shard_map(inside, mesh=MESH, in_specs=(ff.P("a"), ff.P(None, "b")), out_specs=ff.P())
    for way in ("grad", "backward", "vjp"):
        if way == "vjp":
            got, want = f(X, W), reference(X, W)
        else:
            got, want = WAYS[way](f), WAYS[way](reference)
        for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_no_gradient_where_none_is_wanted() -> None:
    def inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ w)
        with torch.no_grad():
            scale = ff.psum(y.square().sum(), ("a", "b"))
        return ff.psum((y * scale).sum(0), "a")

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ w)
        return (y * y.square().sum().detach()).sum(0)

    f = ff.shard_map(inside, mesh=MESH, in_specs=(ff.P("a"), ff.P(None, "b")), out_specs=ff.P("b"))
    for way in ("grad", "backward", "vjp"):
        for a, b in zip(tree.leaves(WAYS[way](f)), tree.leaves(WAYS[way](reference)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        assert not f(X.clone().requires_grad_(), W).requires_grad
