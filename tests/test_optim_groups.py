"""Groups, averages, Lion and Muon on one device: beside their formulas in plain torch, and clear about mistakes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fx_feather as ff
from fx_feather import optim, tree
from fx_feather.errors import OptimizerError

SHAPES = {"wide": (4, 6), "tall": (7, 3), "square": (5, 5)}
Params = dict[str, Tensor]


def tensors(seed: int) -> Params:
    g = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in SHAPES.items()}


def ours(optimizer: ff.Transform, steps: int = 5) -> tuple[Params, Any]:
    params = tensors(0)
    state = optimizer.init(params)
    for step in range(steps):
        params, state = optimizer.step(tensors(step + 1), state, params)
    return params, state


def assert_close(a: Any, b: Any, rtol: float = 1e-12) -> None:
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-14)


@pytest.mark.parametrize(("b1", "b2", "decay"), [(0.9, 0.99, 0.1), (0.5, 0.8, 0.0)])
def test_lion_is_its_algorithm(b1: float, b2: float, decay: float) -> None:
    params, mu = tensors(0), tree.map(torch.zeros_like, tensors(0))
    for step in range(5):
        for k, g in tensors(step + 1).items():
            direction = (b1 * mu[k] + (1 - b1) * g).sign()
            params[k] = params[k] - 0.03 * (direction + decay * params[k])
            mu[k] = b2 * mu[k] + (1 - b2) * g
    got, state = ours(ff.lion(0.03, b1, b2, decay))
    assert_close((got, state["mu"]), (params, mu))


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Each singular value s becomes a s + b s^3 + c s^5."""
    u, s, vh = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for _ in range(steps):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_its_algorithm(nesterov: bool, scale: str) -> None:
    params, velocity = tensors(0), tree.map(torch.zeros_like, tensors(0))
    for step in range(5):
        for k, g in tensors(step + 1).items():
            m, n = g.shape
            velocity[k] = 0.9 * velocity[k] + 0.1 * g
            direction = 0.9 * velocity[k] + 0.1 * g if nesterov else velocity[k]
            times = math.sqrt(max(1, m / n)) if scale == "original" else 0.2 * math.sqrt(max(m, n))
            params[k] = params[k] - 0.03 * (times * newton_schulz(direction, 4) + 0.2 * params[k])
    got, _ = ours(ff.muon(0.03, 0.9, nesterov, 0.2, steps=4, scale=scale))
    assert_close(got, params, rtol=1e-10)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_is_torch_in_higher_precision(scale: str) -> None:
    """PyTorch's iterates in bfloat16, so its matrices are a few thousandths off."""
    params = {k: torch.nn.Parameter(v) for k, v in tensors(0).items()}
    optimizer = torch.optim.Muon(params.values(), lr=0.05, weight_decay=0.1, momentum=0.95, adjust_lr_fn=scale)
    for step in range(5):
        for k, g in tensors(step + 1).items():
            params[k].grad = g
        optimizer.step()
    got, _ = ours(ff.muon(0.05, scale=scale))
    for k, start in tensors(0).items():
        moved = params[k].detach() - start
        assert (got[k] - start - moved).norm() < 0.02 * moved.norm()


def test_a_gradient_of_zeros_moves_nothing_by_muon() -> None:
    params = {"w": torch.ones(3, 2)}
    got, _ = (muon := ff.muon(0.1, weight_decay=0.0)).step({"w": torch.zeros(3, 2)}, muon.init(params), params)
    assert torch.equal(got["w"], params["w"])


@pytest.mark.parametrize("optimizer", [ff.adamw(0.1), ff.chain(ff.clip_by_global_norm(0.5), ff.adamw(0.1))])
def test_the_average_is_of_what_the_optimizer_gives(optimizer: ff.Transform) -> None:
    params = mean = tensors(0)
    state = optimizer.init(params)
    for step in range(5):
        params, state = optimizer.step(tensors(step + 1), state, params)
        mean = tree.map(lambda m, p: 0.8 * m + 0.2 * p, mean, params)
    got, after = ours(ff.ema(optimizer, 0.8))
    assert_close((got, after["optimizer"], ff.averaged(after, got)), (params, state, mean))
    frozen, after = ours(ff.freeze(ff.ema(optimizer, 0.8), "*['tall']"))
    assert torch.equal(frozen["tall"], tensors(0)["tall"])
    assert torch.equal(ff.averaged(after, frozen)["tall"], frozen["tall"])
    assert not torch.equal(ff.averaged(after, frozen)["wide"], frozen["wide"])


def test_an_average_of_narrow_weights_is_wide() -> None:
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    state = ff.ema(ff.sgd(0.1)).init(params)
    assert state["ema"]["w"].dtype == torch.float32
    assert ff.averaged(state, params)["w"].dtype == torch.bfloat16


def test_each_group_is_moved_as_if_it_were_alone() -> None:
    chosen = {
        "*['wide']": ff.muon(0.1),
        "*['tall']": ff.lion(0.01),
        "*": ff.chain(ff.clip_by_global_norm(1), ff.sgd(0.1)),
    }
    got, state = ours(ff.multi_transform(chosen))
    for key, (pattern, optimizer) in zip(["wide", "tall", "square"], chosen.items(), strict=True):
        params = {key: tensors(0)[key]}
        alone = optimizer.init(params)
        for step in range(5):
            params, alone = optimizer.step({key: tensors(step + 1)[key]}, alone, params)
        assert_close((got[key], state[pattern]), (params[key], alone))


def test_updates_added_are_the_fused_step() -> None:
    optimizer = ff.freeze(ff.ema(ff.multi_transform({"*['wide']": ff.muon(0.1), "*": ff.adamw(0.1)})), "*['tall']")
    params, state = tensors(0), optimizer.init(tensors(0))
    for step in range(5):
        updates, state = optimizer.update(tensors(step + 1), state, params)
        params = ff.apply_updates(params, updates)
    assert_close((params, state), ours(optimizer), rtol=1e-11)


def test_a_mask_lets_other_updates_pass() -> None:
    transform = ff.masked(ff.scale(3.0), "*['wide']", "*['s*']")
    updates, _ = transform.update(tensors(1), transform.init(tensors(0)), tensors(0))
    assert_close(updates, {k: g if k == "tall" else 3 * g for k, g in tensors(1).items()})


BAD: list[tuple[Callable[[], Any], list[str]]] = [
    (
        lambda: ff.freeze(ff.sgd(0.1), "*['wyde']*").init(tensors(0)),
        ["freeze(sgd(lr=0.1", "pattern \"*['wyde']*\"", "no path matches it", "such as \"['wide']\""],
    ),
    (lambda: ff.freeze(ff.sgd(0.1), "*").init(tensors(0)), ["all 3 parameters match", "something to move"]),
    (lambda: ff.freeze(ff.sgd(0.1)), ["no pattern", "0 patterns"]),
    (
        lambda: ff.freeze("*['wide']", ff.sgd(0.1)),
        ["2 problems", "a str in the place of a transform", "a Transform as a"],
    ),  # type: ignore[arg-type]
    (
        lambda: ff.multi_transform({"*['wide']": ff.sgd(0.1), "*['old']": ff.sgd(0.1)}).init(tensors(0)),
        [
            "2 problems",
            "no path matches it",
            "params['square'] and 1 more",
            "2 of 3 parameters match no pattern",
            '"*"',
        ],
    ),
    (
        lambda: ff.multi_transform({"*": ff.sgd(0.1), "*['wide']": ff.sgd(0.1)}).init(tensors(0)),
        ["all that it matches an earlier pattern took", "put it before the others"],
    ),
    (lambda: ff.masked(ff.scale(2.0), "wide").init(tensors(0)), ["pattern 'wide'", "the nearest paths are ['wide']"]),
    (
        lambda: ff.muon(0.1).init({"w": torch.ones(2, 2), "b": torch.ones(2), "experts": torch.ones(2, 2, 2)}),
        ["2 problems", "muon(...) at params['b']", "shape [2, 2, 2]", "only matrices", "ff.multi_transform({"],
    ),
    (lambda: ff.muon(0.1, momentum=1.0, steps=0, scale="rms"), ["3 problems", "match_rms_adamw", "steps is 0"]),  # type: ignore[arg-type]
    (lambda: ff.lion(-1, b1=1.0), ["2 problems", "lr is -1", "b1 is 1.0"]),
    (lambda: ff.ema(ff.sgd(0.1), decay=1.0), ["decay is 1.0"]),
    (lambda: ff.ema(0.9), ["optimizer is 0.9"]),  # type: ignore[arg-type]
    (lambda: ff.averaged(ff.sgd(0.1).init(tensors(0)), tensors(0)), ["0 moving averages", "ff.ema(ff.adamw(3e-4))"]),
    (lambda: optim.ema(ff.sgd(lambda step: math.inf)), ["inf at step 0"]),
]


@pytest.mark.parametrize(("make", "said"), BAD, ids=range(len(BAD)))
def test_mistakes_are_named(make: Callable[[], Any], said: list[str]) -> None:
    with pytest.raises(OptimizerError) as caught:
        make()
    for part in said:
        assert part in str(caught.value)
