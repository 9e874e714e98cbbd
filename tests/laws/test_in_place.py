"""The law of writes in a model: one that fills what it made, in any layout, is plain torch.autograd or is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import fx_feather as ff
import layouts
from fx_feather import functional
from fx_feather.errors import AmbiguousError

F64 = torch.float64
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
TEMPLATE = {"w": ff.Param("embed mlp", (3, 4), dtype=F64), "b": ff.Param("mlp", (4,), dtype=F64)}
LAYOUTS = (
    (ff.Mesh(dp=1), layouts.single()),
    (ff.Mesh(dp=2), layouts.fsdp("dp")),
    (ff.Mesh(tp=2), layouts.tp("tp")),
    (ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp("tp")),
)
Write = tuple[str, int]
Buffer = torch.Tensor


def _column(out: Buffer, h: torch.Tensor, k: int) -> None:
    out[:, k] = h[:, (k + 1) % 4] * 3


def _row(out: Buffer, h: torch.Tensor, k: int) -> None:
    out[k].copy_(h[(k + 1) % 4].tanh())


def _strided(out: Buffer, h: torch.Tensor, k: int) -> None:
    out[k % 2 :: 2] += h[k % 2 :: 2] ** 2


def _window(out: Buffer, h: torch.Tensor, k: int) -> None:
    out[:, 1:3] = out[:, 1:3].clone() * h[:, k % 2 : k % 2 + 2]


def _masked(out: Buffer, h: torch.Tensor, k: int) -> None:
    out.masked_fill_(h > 0, float(k))


def _chosen(out: Buffer, h: torch.Tensor, k: int) -> None:
    out[h < 0] = 0.25 * k


def _indexed(out: Buffer, h: torch.Tensor, k: int) -> None:
    out[:, torch.tensor([k, (k + 1) % 4])] = h[:, :2]


def _rows_of(out: Buffer, h: torch.Tensor, k: int) -> None:
    out[torch.tensor([3, k % 3])] += h[:1]


def _diagonal(out: Buffer, h: torch.Tensor, k: int) -> None:
    out.diagonal().add_(float(k))


def _upper(out: Buffer, h: torch.Tensor, k: int) -> None:
    out.triu_(k - 2)


def _turned(out: Buffer, h: torch.Tensor, k: int) -> None:
    out.t()[k].add_(h.t()[0])


def _halves(out: Buffer, h: torch.Tensor, k: int) -> None:
    first, second = out[:, :2], out.narrow(1, 2, 2)
    first.sub_(second)
    second.zero_()


def _flat(out: Buffer, h: torch.Tensor, k: int) -> None:
    out.view(2, 8)[k % 2].exp_()


def _relu(out: Buffer, h: torch.Tensor, k: int) -> None:
    F.relu(out, inplace=True)


def _whole(out: Buffer, h: torch.Tensor, k: int) -> None:
    out.fill_(float(k))
    out += h


def _constant(out: Buffer, h: torch.Tensor, k: int) -> None:
    table = torch.zeros(4, dtype=F64)
    with torch.no_grad():
        table[k:] = 2.0
        table.mul_(0.5)
    out *= table


def _stopped(out: Buffer, h: torch.Tensor, k: int) -> None:
    with torch.no_grad():
        scale = h.exp()
        scale.clamp_(max=2.0)
        scale[:, k] = 1.0
    out.mul_(scale)


WRITES = {f.__name__: f for f in (
    _column, _row, _strided, _window, _masked, _chosen, _indexed, _rows_of, _diagonal, _upper, _turned, _halves, _flat,
    _relu, _whole, _constant, _stopped,
)}  # fmt: skip


def loss_of(ops: list[Write], in_block: bool) -> Callable[..., Any]:
    def body(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        h = x @ w + b
        out, before = h * 0.5, h.sum() * 0
        for name, k in ops:
            before = before + out.clone().sin().sum()
            WRITES[name](out, h, k)
        return out.tanh() + before

    run = ff.block(body) if in_block else body
    return lambda p, x: (run(x, p["w"], p["b"]).pow(2).sum(), torch.tensor(x.shape[0]))


def off(ops: list[Write], in_block: bool, mesh: ff.Mesh, layout: ff.Layout) -> float:
    """How far gradients are from plain torch.autograd's, relative to the largest."""
    params = ff.init(TEMPLATE, seed=0)
    own = {k: v.clone().requires_grad_(True) for k, v in params.items()}
    loss = loss_of(ops, in_block)
    total, count = loss(own, X)
    try:
        (total / count).backward()
    except RuntimeError:
        reject()  # autograd refuses a write to what its backward needs, as a functional program has no reason to
    f = ff.compile(
        ff.value_and_grad(loss), template=TEMPLATE, mesh=mesh, layout=layout, batch=X, batch_dims="batch embed"
    )
    out, grads = f.simulate(params, X)
    torch.testing.assert_close(out["loss"], (total / count).detach(), rtol=1e-10, atol=1e-10)
    zero = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in own.items()}
    return max(float((grads[k] - g).norm() / g.norm().clamp(min=1e-3)) for k, g in zero.items())


@given(
    st.lists(st.tuples(st.sampled_from(sorted(WRITES)), st.integers(0, 3)), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from(LAYOUTS),
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_model_that_writes_is_plain_torch(ops: list[Write], in_block: bool, where: Any) -> None:
    try:
        distance = off(ops, in_block, *where)
    except AmbiguousError as e:
        if Path(__file__).name not in str(e):
            raise
        return  # some writes need a dim whole: a diagonal, a flat view
    assert distance < 1e-9


@pytest.mark.parametrize("name", sorted(WRITES))
def test_each_write_compiles_where_its_dims_are_whole(name: str) -> None:
    assert off([(name, 1)], False, *LAYOUTS[0]) < 1e-9


def test_it_fails_where_views_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "written", lambda n: set())
    with pytest.raises((AssertionError, ff.FeatherError)):
        assert off([("_column", 1)], False, *LAYOUTS[0]) < 1e-9


def refused(fn: Callable[..., torch.Tensor]) -> str:
    with pytest.raises(ff.FeatherError) as caught:
        ff.compile(
            lambda p, x: fn(p["w"], x), template=TEMPLATE, mesh=ff.Mesh(dp=1), layout=layouts.single(), batch=X,
            batch_dims="batch embed",
        )  # fmt: skip
    text = str(caught.value)
    assert Path(__file__).name in text and "fix:" in text
    return text


TABLE = torch.ones(4, dtype=F64)


def _detached_and_not(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = x @ w
    h.detach().mul_(2)
    return h


def _detached_before_it_has_one(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = torch.ones_like(x @ w)
    before = h.detach()
    h.mul_(x @ w)
    return h * before


def _inside_a_transform(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    def cubes(w: torch.Tensor) -> torch.Tensor:
        h = w.clone()
        h[0] = w[1] * 2
        return (h**3).sum()

    return x @ torch.func.grad(cubes)(w)


def _behind_the_gradient(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = x @ w
    with torch.no_grad():
        h.mul_(2)
    return h


def _constrained_and_not(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = x @ w
    y = ff.constrain(h, "batch mlp")
    y.add_(1)
    return h


def test_a_write_to_what_comes_from_outside_is_refused_by_name() -> None:
    assert "a write to p['w'], which comes from outside" in refused(lambda w, x: w.mul_(2))
    assert "a write to p['w']" in refused(lambda w, x: w[0].zero_())
    assert "a write to x, " in refused(lambda w, x: F.relu(x, inplace=True) @ w)
    assert "a write to h, " in refused(lambda w, x: ff.block(lambda h: h.add_(1))(x @ w))
    assert "a write to a tensor from outside" in refused(lambda w, x: x @ w + TABLE.mul_(2))
    both = refused(lambda w, x: x.add_(1) @ w.mul_(2))
    assert "2 problems" in both and "(mul)" in both and "(add)" in both
    assert torch.equal(TABLE, torch.ones(4, dtype=F64)), "nothing was written"


def region(inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    each = ff.shard_map(inner, mesh=ff.Mesh(dp=1), in_specs=ff.P(), out_specs=ff.P())
    return lambda w, x: each(w, x)


def _filled_behind(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x @ w)
    with torch.no_grad():
        out.copy_(x @ w)
    return out


def test_per_rank_code_writes_to_what_it_made() -> None:
    assert "a write to argument" in refused(region(lambda w, x: x @ w.mul_(2)))
    assert "a write where no gradient is wanted, in per-rank code" in refused(region(_filled_behind))


def test_a_write_behind_a_gradient_is_refused() -> None:
    assert "used detached and with its gradient" in refused(_detached_and_not)
    assert "a write where no gradient is wanted" in refused(_behind_the_gradient)
    assert "used constrained and unconstrained" in refused(_constrained_and_not)
    assert "used detached and with its gradient" in refused(_detached_before_it_has_one)


def test_a_write_whose_gradient_torch_has_wrong_is_refused() -> None:
    assert "1 gradient would be wrong" in refused(_inside_a_transform)
    assert "1 gradient would be wrong" in refused(lambda w, x: (x @ w).contiguous().as_strided((1,), (1,)).zero_())
