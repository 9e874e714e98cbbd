"""Tensors from outside: the same everywhere, split on demand, as they were when the function was compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather import constants, testing

F64 = torch.float64
G = torch.Generator().manual_seed(0)
X = torch.randn(4, 3, generator=G, dtype=F64)
TABLE, SLOPES = (torch.randn(s, generator=G, dtype=F64) for s in ((4, 4), (4,)))
AT, MASK, SCALE = torch.tensor([3, 1, 0, 2]), TABLE > 0, torch.tensor(3.0, dtype=F64)
SEVERAL = (SLOPES, SLOPES * 1, TABLE[0].clone(), TABLE[1].clone())
TEMPLATE = {"w": ff.Param("embed mlp", (3, 4), dtype=F64)}
LAYOUTS = (
    (ff.Mesh(dp=1), layouts.single()),
    (ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp("tp") | ff.Layout(unused_ok=("batch",))),
)
Inner = Callable[[torch.Tensor], torch.Tensor]


def loss_of(inner: Inner) -> Callable[..., Any]:
    return lambda p, x: (inner(x @ p["w"]).pow(2).sum(), torch.tensor(x.shape[0]))


def _blocks(h: torch.Tensor) -> torch.Tensor:
    f = ff.block(lambda h: h * TABLE)
    return f(f(h)) + ff.block(lambda h, t: h * t + SLOPES)(h, TABLE)


def _each_its_own(h: torch.Tensor) -> torch.Tensor:
    return sum(ff.block(lambda h, t=t: h.sin() * t, "same")(h) for t in SEVERAL)


def _around_blocks(h: torch.Tensor) -> torch.Tensor:
    return ff.block(torch.sin)(h * TABLE) * TABLE + TABLE.sum()


def _filled(h: torch.Tensor) -> torch.Tensor:
    y = h + 0
    y += TABLE
    y[MASK] = 0.5
    return y * SLOPES.clone().mul_(2)


def _region(h: torch.Tensor) -> torch.Tensor:
    return ff.constrain(h, "_ _") * TABLE


INNER: list[Inner] = [
    lambda h: h * TABLE + SLOPES,
    lambda h: h[AT] * SCALE,
    lambda h: torch.where(MASK, h, TABLE),
    lambda h: h @ TABLE,
    lambda h: h * torch.nn.Parameter(TABLE, requires_grad=False),
    _blocks, _each_its_own, _around_blocks, _filled, _region,
]  # fmt: skip


@pytest.mark.parametrize("where", LAYOUTS, ids=lambda w: repr(w[0]))
@pytest.mark.parametrize("inner", INNER)
def test_a_tensor_from_outside_is_a_constant(inner: Inner, where: Any) -> None:
    params = ff.init(TEMPLATE, seed=0)
    own = {"w": params["w"].clone().requires_grad_(True)}
    total, count = loss_of(inner)(own, X)
    (total / count).backward()
    f = ff.compile(
        ff.value_and_grad(loss_of(inner)), template=TEMPLATE, mesh=where[0], layout=where[1], batch=X,
        batch_dims="_ embed" if inner is INNER[1] else "batch embed",
    )  # fmt: skip
    out, grads = f.simulate(params, X)
    torch.testing.assert_close(out["loss"], (total / count).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads["w"], own["w"].grad, rtol=1e-11, atol=1e-12)


def test_steps_with_a_constant_are_one_device() -> None:
    testing.assert_equivalent(
        loss_of(_blocks), template=TEMPLATE, batch=X, batch_dims="batch embed", mesh=ff.Mesh(dp=2),
        layout=layouts.fsdp("dp"),
    )  # fmt: skip


def compiled(inner: Inner) -> ff.Compiled:
    return ff.compile(
        lambda p, x: inner(x @ p["w"]), template=TEMPLATE, mesh=ff.Mesh(tp=2), layout=layouts.tp("tp"), batch=X,
        batch_dims="batch embed",
    )  # fmt: skip


def test_a_constant_is_what_it_was_when_the_function_was_compiled() -> None:
    table, params = TABLE.clone(), ff.init(TEMPLATE, seed=0)
    f = compiled(lambda h: h * table)
    table.zero_()
    torch.testing.assert_close(f.simulate(params, X), X @ params["w"] * TABLE, rtol=1e-12, atol=1e-12)


def refused(inner: Inner) -> str:
    with pytest.raises(ff.FeatherError) as caught:
        compiled(inner)
    text = str(caught.value)
    assert "test_constants.py" in text and "fix:" in text
    return text


def test_a_constant_that_can_be_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = TABLE.clone().requires_grad_(True)
    assert "1 gradient would be lost" in refused(lambda h: h * weight)
    assert "1 gradient would be lost" in refused(lambda h: ff.block(lambda h: h * weight)(h))
    assert "pass the tensor to the block as an argument" in refused(lambda h: ff.block(lambda x: x * h)(h))
    sparse = torch.eye(4, dtype=F64).to_sparse()
    assert "torch.sparse_coo" in refused(lambda h: torch.sparse.mm(sparse, h))
    monkeypatch.setattr(constants, "CONSTANT_BYTES", 100)
    text = refused(lambda h: h * TABLE + SLOPES)
    assert "128 bytes are more than 100" in text and "pass it in the parameters or the batch" in text
    compiled(lambda h: h * SLOPES)


def test_a_tensor_from_outside_in_an_update_is_refused() -> None:
    scaled = ff.Transform(lambda p: {}, lambda g, s, p: ({"w": g["w"] * TABLE[:3]}, s))
    with pytest.raises(ff.FeatherError, match="1 tensor is closed over") as caught:
        ff.compile_step(
            loss_of(torch.sin), scaled, template=TEMPLATE, mesh=ff.Mesh(dp=2), layout=layouts.ddp("dp"), batch=X,
            batch_dims="batch embed",
        )  # fmt: skip
    assert "test_constants.py" in str(caught.value) and "keep the tensor in the optimizer's state" in str(caught.value)
