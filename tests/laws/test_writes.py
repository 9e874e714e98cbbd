"""The law of writes: a unit that fills buffers, also through views, has the gradients that torch.autograd gives it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject
from hypothesis import strategies as st

import fx_feather as ff
import layouts
from fx_feather import testing
from fx_feather.passes import differentiate
from fx_feather.passes.differentiate import REMAT, Place, linearize

ROWS, COLUMNS = 3, 4
Write = tuple[str, int, float]


@st.composite
def writes(draw: st.DrawFn) -> list[Write]:
    """What is done to a buffer, one after another: a kind, a row or column, a number."""
    kinds = ["row", "column", "block", "whole", "add", "mul", "masked", "copy", "read", "turn"]
    one = st.tuples(st.sampled_from(kinds), st.integers(0, 2), st.sampled_from([-2.0, 0.5, 3.0]))
    return draw(st.lists(one, min_size=1, max_size=5))


def program(ops: list[Write], x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    h = x @ w
    out, read = h * 0.1, h.sum()
    view = out
    for kind, at, number in ops:
        match kind:
            case "row":
                view[at % view.shape[0]] = h.sin().sum() * number
            case "column":
                view[:, at % view.shape[1]].copy_(view[:, 0] + h.mean() * number)
            case "block":
                view[:2, 1:3] += h[:2, 1:3]
            case "whole":
                view.fill_(number)
            case "add":
                out.add_(h, alpha=number)
            case "mul":
                view.t()[at].mul_(number)
            case "masked":
                out.masked_fill_(h > 0, number)
            case "copy":
                out[1:].copy_(h[:-1])
            case "read":
                read = read + (view * view.roll(1, 0)).sum()
            case "turn":
                view = out.t() if view is out else out
    return [out.tanh(), read]


def off(ops: list[Write], remat: str) -> float:
    """How far the gradients of a unit are off, relative to the largest."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((ROWS, 5), (5, COLUMNS)))
    cts = [torch.randn(ROWS, COLUMNS, generator=g, dtype=torch.float64), torch.ones((), dtype=torch.float64)]
    leaves = [t.clone().requires_grad_(True) for t in (x, w)]
    outs = program(ops, *leaves)
    try:
        want = torch.autograd.grad(outs, leaves, cts)
    except RuntimeError:
        reject()  # autograd refuses a write to what its backward needs, as a functional program has no reason to
    places = [Place.of(x), Place.of(w)]
    unit = linearize(lambda *xs: program(ops, *xs), places, [True, True], [True, True], "cpu", "writes").cut(remat)
    made = run(unit.forward, [x, w])
    assert unit.backward is not None
    kept = [(x, w)[i] for i in unit.keeps]
    got = run(unit.backward, [*kept, *made[unit.outputs :], *(cts[i] for i in unit.cts)])
    for a, b in zip(made, outs, strict=False):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in zip(got, want, strict=True))


def run(func: Any, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.fx.GraphModule(func.constants, func.graph).forward(*xs))


@given(writes(), st.sampled_from(REMAT))
def test_a_unit_that_writes_has_its_gradients(ops: list[Write], remat: str) -> None:
    assert off(ops, remat) < 1e-9


def test_it_fails_where_writes_are_kept_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differentiate, "writes", lambda n: set())
    with pytest.raises(AssertionError):
        off([("block", 0, 1.0)], "none")


def rotated(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft(x @ p["w"], dim=1).abs()


def circular(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.pad((x @ p["w"]).transpose(1, 2), (2, 0), mode="circular")


def solved(p: Any, x: torch.Tensor) -> torch.Tensor:
    gram = p["w"].mT @ p["w"] + torch.eye(4, dtype=torch.float64)
    return x.sum() * torch.linalg.solve(gram, p["w"].mT) + torch.linalg.cholesky(gram).sum() + torch.linalg.det(gram)


def filled(p: Any, x: torch.Tensor) -> torch.Tensor:
    region = ff.shard_map(
        _filled, mesh=ff.Mesh(dp=2), in_specs=(ff.P("dp"), ff.P()), out_specs=(ff.P("dp"), ff.P(partial="dp"))
    )
    out, total = region(x, p["w"])
    return out * total


def _filled(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x @ w
    out = torch.zeros_like(h)
    out[:, 0] = h[:, 0] * 2
    out[:, 1:] += h[:, 1:].sin()
    return out, out.sum()


@pytest.mark.parametrize(
    ("fn", "layout"),
    [
        (rotated, layouts.single()),
        (circular, layouts.ddp("dp")),
        (solved, layouts.single()),
        (filled, layouts.ddp("dp")),
    ],
)
def test_formulas_that_write_are_one_device(fn: Any, layout: ff.Layout) -> None:
    testing.assert_equivalent(
        lambda p, x: (fn(p, x).pow(2).sum(), torch.tensor(x.shape[0])),
        template={"w": ff.Param("embed mlp", (6, 4), dtype=torch.float64)},
        batch=torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        batch_dims="batch _ embed",
        mesh=ff.Mesh(dp=2),
        layout=layout,
    )
