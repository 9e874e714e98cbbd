"""Optimizers and schedules: equal to torch's, traceable, and clear about bad settings."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fx_feather import optim, tree
from fx_feather.errors import FeatherError, OptimizerError, ShapeError
from fx_feather.optim.computed import Computed
from fx_feather.trace import trace as trace_program

SHAPES = {"up": (4, 6), "norm": (6,), "scalar": (), "deep": (2, 3, 2)}
ALL = dict.fromkeys(SHAPES, True)


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for k, s in SHAPES.items()}


def ours(transform: optim.Transform, steps: int = 6) -> dict[str, Tensor]:
    params = tensors(0)
    state = transform.init(params)
    for step in range(steps):
        updates, state = transform.update(tensors(step + 1), state, params)
        params = optim.apply_updates(params, updates)
    return params


def theirs(
    make: Callable[..., torch.optim.Optimizer],
    steps: int = 6,
    max_norm: float | None = None,
    schedule: Callable[..., Any] | None = None,
) -> dict[str, Tensor]:
    params = {k: torch.nn.Parameter(v) for k, v in tensors(0).items()}
    optimizer = make(params)
    scheduler = schedule(optimizer) if schedule else None
    for step in range(steps):
        for key, grad in tensors(step + 1).items():
            params[key].grad = grad
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params.values(), max_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return {k: v.detach() for k, v in params.items()}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for key in a:
        torch.testing.assert_close({key: a[key]}, {key: b[key]}, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.5)])
def test_adamw_equals_torch(decay: float, betas: tuple[float, float]) -> None:
    expected = theirs(lambda p: torch.optim.AdamW(p.values(), lr=0.03, betas=betas, eps=1e-6, weight_decay=decay))
    assert_close(ours(optim.adamw(0.03, *betas, eps=1e-6, weight_decay=decay, decay_mask=ALL)), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_fused_step_is_the_update_added(clip: float | None, dtype: torch.dtype) -> None:
    adamw = optim.adamw(optim.linear(0.1, 0.2, 5), weight_decay=0.3)
    optimizer = adamw if clip is None else optim.chain(optim.clip_by_global_norm(clip), adamw)
    fused = plain = tensors(0, dtype)
    states = [optimizer.init(fused), optimizer.init(plain)]
    for k in range(4):
        grads = tensors(k + 1, dtype)
        before = tree.map(torch.clone, (fused, states[0]))
        given = (fused, states[0])
        fused, states[0] = optimizer.step(grads, states[0], fused)
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(given), tree.leaves(before), strict=True))
        updates, states[1] = optimizer.update(grads, states[1], plain)
        plain = optim.apply_updates(plain, updates)
        # A narrow parameter takes the same operators either way, but that clipped gradients aren't rounded; the others
        # differ by the kernel's rounding.
        eps = torch.finfo(dtype).eps
        rtol, atol = (20 * eps, 20 * eps) if dtype != torch.bfloat16 else (0, 0) if clip is None else (eps, eps / 8)
        for a, b in zip(tree.leaves((fused, states[0])), tree.leaves((plain, states[1])), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.adamw(0.1),
        optim.sgd(0.1, momentum=0.9),
        optim.clip_by_global_norm(0.5),
        optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1)),
        optim.chain(optim.clip_by_global_norm(0.5), optim.clip_by_global_norm(0.1), optim.sgd(0.1)),
        optim.chain(optim.scale(-2.0), optim.clip_by_global_norm(0.5), optim.adamw(0.1)),
        optim.chain(optim.scale_by_adam(), optim.add_decayed_weights(0.1), optim.scale(-0.1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("factor", [0.25, -3.0])
def test_a_factor_is_as_good_as_gradients_multiplied_by_it(optimizer: optim.Transform, factor: float) -> None:
    params, grads = tensors(0, torch.float64), tensors(1, torch.float64)
    state, number = optimizer.init(params), torch.tensor(factor, dtype=torch.float64)
    got = optimizer.step(grads, state, params, number)
    want = optimizer.step(tree.map(lambda g: g * factor, grads), state, params)
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_a_norm_is_taken_of_what_is_multiplied_already(size: float) -> None:
    """Squares of sums leave the range of float32 where those of their mean don't."""
    params, grads = tensors(0, torch.float32), tensors(1, torch.float32)
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1))
    want = optimizer.step(grads, optimizer.init(params), params)
    sums = tree.map(lambda g: g * size, grads)
    got = optimizer.step(sums, optimizer.init(params), params, torch.tensor(1 / size))
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b)


def test_adamw_decays_matrices_only_by_default() -> None:
    def grouped(p: dict[str, Tensor]) -> torch.optim.Optimizer:
        flat, deep = [p["norm"], p["scalar"]], [p["up"], p["deep"]]
        return torch.optim.AdamW(
            [{"params": flat, "weight_decay": 0.0}, {"params": deep, "weight_decay": 0.1}], lr=0.03
        )

    expected = theirs(grouped)
    ours_default = ours(optim.adamw(0.03, b2=0.999))
    assert_close(ours_default, expected)
    by_function = optim.adamw(0.03, b2=0.999, decay_mask=lambda params: tree.map(lambda p: p.ndim >= 2, params))
    assert_close(ours(by_function), expected)


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_equals_torch(momentum: float, nesterov: bool, decay: float) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov, "weight_decay": decay}
    assert_close(ours(optim.sgd(**settings, decay_mask=ALL)), theirs(lambda p: torch.optim.SGD(p.values(), **settings)))


@pytest.mark.parametrize("max_norm", [0.5, 1e3, math.inf])
def test_clipping_equals_torch(max_norm: float) -> None:
    chained = optim.chain(optim.clip_by_global_norm(max_norm), optim.sgd(0.1, momentum=0.9))
    expected = theirs(lambda p: torch.optim.SGD(p.values(), lr=0.1, momentum=0.9), max_norm=max_norm)
    assert_close(ours(chained), expected)


def test_clipping_reports_the_norm_before() -> None:
    params, grads = tensors(0), tensors(1)
    clip = optim.clip_by_global_norm(0.5)
    clipped, state = clip.update(grads, clip.init(params), params)
    flat = torch.cat([g.flatten() for g in grads.values()])
    torch.testing.assert_close(state["norm"], flat.norm(), rtol=1e-14, atol=0)
    assert optim.global_norm(clipped) == pytest.approx(0.5, rel=1e-5)


def test_parts_chain_to_the_whole() -> None:
    parts = optim.chain(optim.scale_by_adam(), optim.add_decayed_weights(0.1), optim.scale(-0.03))
    assert_close(ours(parts), ours(optim.adamw(0.03)))
    scheduled = optim.chain(
        optim.trace(0.9, nesterov=True), optim.scale_by_schedule(lambda t: -optim.cosine(0.1, 4)(t))
    )
    assert_close(ours(scheduled), ours(optim.sgd(optim.cosine(0.1, 4), momentum=0.9, nesterov=True)))


def test_norm_is_over_all_elements() -> None:
    values = tensors(2)
    flat = torch.cat([v.flatten() for v in values.values()])
    torch.testing.assert_close(optim.global_norm(values), flat.norm(), rtol=1e-14, atol=0)
    assert optim.global_norm(values, ord=math.inf) == flat.abs().max()
    assert optim.global_norm({}) == 0
    assert optim.global_norm({"none": torch.empty(0), "one": -torch.ones(1)}, ord=math.inf) == 1


def test_norm_of_narrow_values_is_summed_wide() -> None:
    values = {"w": torch.full((70_000,), 0.5, dtype=torch.bfloat16)}
    assert optim.global_norm(values).dtype == torch.float32
    assert optim.global_norm(values) == pytest.approx(0.5 * math.sqrt(70_000), rel=1e-6)
    assert optim.global_norm({"big": torch.full((4,), 300.0, dtype=torch.float16)}) == 600.0


SCHEDULERS: list[tuple[optim.Schedule, Callable[[Any], Any]]] = [
    (optim.constant(0.1), lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=1.0, total_iters=3)),
    (optim.linear(0.05, 0.1, 5), lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.5, 1.0, total_iters=5)),
    (optim.cosine(0.1, 12, end=0.01), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 12, eta_min=0.01)),
    (
        optim.warmup_cosine(0.1, 4, 12, end=0.01),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LambdaLR(o, lambda t: (t + 1) / 5),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 8, eta_min=0.01),
            ],
            milestones=[4],
        ),
    ),
    (
        optim.warmup_linear(0.1, 4, 12, end=0.02),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LambdaLR(o, lambda t: (t + 1) / 5),
                torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=8),
            ],
            milestones=[4],
        ),
    ),
    (
        optim.wsd(0.1, 3, 4, 5, end=0.0),
        lambda o: torch.optim.lr_scheduler.LambdaLR(
            o, lambda t: (t + 1) / 4 if t < 3 else 1.0 if t < 7 else max(0.0, 1 - (t - 7) / 5)
        ),
    ),
]


@pytest.mark.parametrize(("schedule", "scheduler"), SCHEDULERS, ids=lambda x: str(x) if "(" in repr(x)[:20] else "")
def test_schedules_equal_torch(schedule: optim.Schedule, scheduler: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    other = scheduler(optimizer)
    for step in range(12):
        assert schedule(step).dtype == torch.float64
        assert float(schedule(torch.tensor(step))) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-15
        )
        optimizer.step()
        other.step()


def test_training_with_a_schedule_equals_torch() -> None:
    expected = theirs(
        lambda p: torch.optim.AdamW(p.values(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.1),
        steps=10,
        max_norm=0.7,
        schedule=SCHEDULERS[3][1],
    )
    adamw = optim.adamw(optim.warmup_cosine(0.1, 4, 12, end=0.01), decay_mask=ALL)
    assert_close(ours(optim.chain(optim.clip_by_global_norm(0.7), adamw), steps=10), expected)


@given(
    st.integers(0, 5), st.integers(0, 5), st.integers(1, 5), st.floats(0.1, 1), st.floats(0, 0.1), st.integers(0, 20)
)
def test_schedules_stay_between_their_ends(
    warmup: int, stable: int, decay: int, peak: float, end: float, step: int
) -> None:
    total = warmup + stable + decay
    for schedule in (
        optim.warmup_cosine(peak, warmup, total, end),
        optim.warmup_linear(peak, warmup, total, end),
        optim.wsd(peak, warmup, stable, decay, end),
    ):
        value = float(schedule(step))
        assert (0 if step < warmup else end - 1e-15) <= value <= peak * (1 + 1e-15)
        assert float(schedule(warmup)) == pytest.approx(peak)
        assert float(schedule(total + step)) == pytest.approx(end)


OPTIMIZERS = [
    optim.adamw(optim.wsd(0.1, 1, 2, 3)),
    optim.sgd(0.1),
    optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.warmup_cosine(0.1, 2, 6))),
    optim.chain(optim.trace(0.9), optim.scale_by_schedule(optim.warmup_linear(1.0, 2, 6)), optim.scale(-0.1)),
    optim.chain(optim.scale_by_adam(), optim.add_decayed_weights(0.1), optim.scale(-0.1)),
]


def step_of(transform: optim.Transform) -> Callable[..., Any]:
    def step(grads: tree.Tree, state: tree.Tree, params: tree.Tree) -> Any:
        updates, state = transform.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize("transform", OPTIMIZERS, ids=repr)
def test_a_step_is_traced_on_fake_tensors_and_replays(transform: optim.Transform) -> None:
    params, step = tensors(0), step_of(transform)
    args, treedef = tree.flatten((tensors(1), transform.init(params), params))
    mode = FakeTensorMode()
    flat = make_fx(lambda *xs: tree.leaves(step(*tree.unflatten(treedef, xs))), pre_dispatch=True)
    with mode:
        graph = flat(*(mode.from_tensor(x) for x in args))
    mutating = [n for n in graph.graph.nodes if n.op == "call_function" and n.target._schema.is_mutable]
    assert not mutating
    for advance in range(3):
        real = step(*tree.unflatten(treedef, args))
        for a, b in zip(graph(*args), tree.leaves(real), strict=True):
            assert torch.equal(a, b)
        args = tree.leaves((tensors(advance + 2), real[1], real[0]))


@pytest.mark.parametrize("transform", OPTIMIZERS, ids=repr)
def test_state_keeps_structure_shapes_and_dtypes(transform: optim.Transform) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        params = tensors(0, dtype)
        before = transform.init(params)
        new, after = step_of(transform)(tensors(1, dtype), before, params)
        updates, _ = transform.update(tensors(1, dtype), before, params)
        # A 0-dim leaf is as wide as the others: the float64 scalars of a schedule don't widen it.
        assert len({u.dtype for u in tree.leaves(updates)}) == 1
        for name, (a, b) in {"state": (before, after), "params": (params, new)}.items():
            tree.check_same(a, b, call="step", name=name)
            kinds = [[(x.shape, x.dtype) for x in tree.leaves(t)] for t in (a, b)]
            assert kinds[0] == kinds[1]


def test_statistics_of_narrow_parameters_are_wide() -> None:
    params = tensors(0, torch.bfloat16)
    state = optim.adamw(0.1).init(params)
    assert {x.dtype for x in tree.leaves((state["mu"], state["nu"]))} == {torch.float32}
    assert tree.paths(state)[:2] == ["['mu']['deep']", "['mu']['norm']"]
    assert (state["step"].dtype, state["step"].shape) == (torch.int64, ())


def test_update_is_added_before_it_is_rounded() -> None:
    # A little more than half a unit of bfloat16 at 1; rounded first it would be exactly half, and be lost.
    params = {"w": torch.tensor([1.0], dtype=torch.bfloat16)}
    update = {"w": torch.tensor([0.00392])}
    assert optim.apply_updates(params, update)["w"] == torch.tensor(1.0078125, dtype=torch.bfloat16)


def test_a_program_holds_each_leaf_kind_once() -> None:
    params = {"layers": [{"up": torch.ones(4, 6), "norm": torch.ones(6)} for _ in range(12)]}
    transform = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.warmup_cosine(0.1, 2, 6)))
    program = trace_program(step_of(transform), (params, transform.init(params), params))
    names = [unit.name for unit in program.units]
    for name in ("adamw", "scale", "sum_squares", "apply_updates"):
        assert names.count(name) == 2, names


def test_a_nan_gradient_is_not_hidden_by_clipping() -> None:
    params = {"w": torch.zeros(2)}
    clip = optim.clip_by_global_norm(1.0)
    clipped, state = clip.update({"w": torch.tensor([math.nan, 1.0])}, clip.init(params), params)
    assert state["norm"].isnan()
    assert clipped["w"].isnan().all()


BAD: list[tuple[Callable[[], Any], list[str]]] = [
    (lambda: optim.adamw(lr=-1.0), ["adamw(lr=-1.0, b1=0.9", "lr is -1.0", "finite and not negative", "lr=3e-4"]),
    (lambda: optim.sgd(torch.tensor([0.1])), ["lr is tensor([0.1000])"]),
    (lambda: optim.sgd(1e39), ["lr is 1e+39"]),
    (lambda: optim.adamw(lr=math.nan), ["lr is nan"]),
    (lambda: optim.adamw(lr="1e-3"), ["lr is '1e-3'"]),  # type: ignore[arg-type]
    (lambda: optim.adamw(0.1, b1=1.0, b2=-0.1), ["2 problems", "b1 is 1.0", "b2 is -0.1", "at least 0 and below 1"]),
    (lambda: optim.adamw(-1.0, eps=0.0, weight_decay=-1.0), ["3 problems", "lr is -1.0", "eps is 0.0"]),
    (lambda: optim.adamw(0.1, eps=1e-50), ["eps is 1e-50", "also in float32"]),
    (lambda: optim.sgd(0.1, momentum=1.5), ["momentum is 1.5"]),
    (lambda: optim.sgd(0.1, nesterov=True), ["Nesterov's momentum needs momentum > 0", "nesterov=False"]),
    (lambda: optim.sgd(0.1, weight_decay=math.inf), ["weight_decay is inf"]),
    (lambda: optim.clip_by_global_norm(0.0), ["max_norm is 0.0", "math.inf never clips", "max_norm=1.0"]),
    (lambda: optim.clip_by_global_norm(math.nan), ["max_norm is nan"]),
    (lambda: optim.scale(math.nan), ["factor is nan"]),
    (lambda: optim.scale_by_schedule(0.1), ["schedule is 0.1", "ff.scale(0.1)"]),  # type: ignore[arg-type]
    (lambda: optim.scale_by_adam(b1=2.0), ["b1 is 2.0"]),
    (lambda: optim.add_decayed_weights(-0.1), ["weight_decay is -0.1"]),
    (lambda: optim.trace(-0.5), ["momentum is -0.5"]),
    (lambda: optim.chain(optim.adamw(0.1), optim.sgd), ["argument 1 is <function sgd", "call each"]),  # type: ignore[arg-type]
    (lambda: optim.global_norm({}, ord=1), ["ord is 1", "the norms are 2 and math.inf"]),
    (lambda: optim.warmup_cosine(0.1, 20, 10), ["warmup_steps 20 > total_steps 10", "warmup_steps=1"]),
    (lambda: optim.warmup_linear(-0.1, -1, 0), ["3 problems", "peak is -0.1", "total_steps is 0"]),
    (lambda: optim.wsd(0.1, 1, 1, 0), ["decay is 0", "an integer of at least 1"]),
    (lambda: optim.linear(0.1, math.inf, 3), ["end is inf"]),
    (lambda: optim.cosine(0.1, 2.5), ["steps is 2.5"]),  # type: ignore[arg-type]
    (lambda: optim.constant(-1.0), ["value is -1.0", "finite and not negative"]),
]


@pytest.mark.parametrize(("make", "said"), BAD, ids=[said[0] for _, said in BAD])
def test_bad_settings_are_named(make: Callable[[], Any], said: list[str]) -> None:
    with pytest.raises(OptimizerError) as caught:
        make()
    for part in said:
        assert part in str(caught.value)


def test_gradients_of_another_structure_or_shape_are_refused() -> None:
    params, transform = tensors(0), optim.adamw(0.1)
    state, grads = transform.init(params), tensors(1)
    with pytest.raises(ShapeError, match=r"grads with 3 leaves[^$]*missing: \['up'\]"):
        transform.update({k: v for k, v in grads.items() if k != "up"}, state, params)
    with pytest.raises(FeatherError) as caught:
        transform.update(grads | {"up": torch.ones(6), "norm": torch.ones(1)}, state, params)
    assert "2 problems" in str(caught.value)
    assert "adamw.update at params['norm']" in str(caught.value)
    assert "shape [6], where the parameter has [4, 6]" in str(caught.value)


@pytest.mark.parametrize("optimizer", [optim.adamw, optim.sgd])
@pytest.mark.parametrize("lr", [0, 0.0, torch.tensor(0.0), optim.constant(0.0), lambda step: 0])
def test_a_rate_of_0_moves_nothing(optimizer: Callable[..., optim.Transform], lr: Any) -> None:
    assert_close(ours(optimizer(lr)), tensors(0))


def test_a_function_prints_by_its_name() -> None:
    def halving(step: int) -> float:
        return 0.5**step

    assert repr(optim.sgd(halving)).startswith("sgd(lr=test_a_function_prints_by_its_name.<locals>.halving, momentum")
    assert repr(optim.lion(0.1)).startswith("lion(lr=0.1, b1")


def test_a_function_has_one_name_in_programs_however_often_it_is_given() -> None:
    """Ranks compare their programs; one of them may make an optimizer more often than others."""

    def rate(step: int) -> float:
        return 0.1 + self[0] * step

    self = [0.0]
    once, twice = Computed(rate, "adamw(...)"), Computed(rate, "adamw(...)")
    other = Computed(lambda step: 0.1, "adamw(...)")
    assert once.name == twice.name != other.name and other(5) == once(5) == 0.1
    made = [Computed(lambda step, by=by: 0.1 + by * step, "adamw(...)") for by in (1, 2)]
    assert [float(rate(1)) for rate in made] == [1.1, 2.1]


def test_a_rate_may_be_a_tensor_without_dims() -> None:
    assert_close(ours(optim.adamw(torch.tensor(0.25))), ours(optim.adamw(0.25)))


RATES: list[Callable[[Any], Any]] = [
    lambda step: 0.1 * math.cos(0.2 * step),
    lambda step: 0.1 if step < 3 else 0.05,
    lambda step: {0: 0.3, 1: 0.2}.get(step, 0.1),
    lambda step: 0.1 * torch.cos(0.2 * step.to(torch.float64)),
    lambda step: torch.where(step < 3, 0.1, 0.05),
    lambda step: optim.cosine(0.1, 10)(step) * 2,
    lambda step: 1 / (1 + step),
    lambda step: torch.tensor(0.1),
]


@pytest.mark.parametrize("rate", RATES)
def test_a_schedule_may_be_any_function_of_the_step(rate: Callable[[Any], Any]) -> None:
    def value(step: int) -> float:
        try:
            return float(rate(step))
        except (TypeError, AttributeError):
            return float(rate(torch.tensor(step)))

    params = tensors(0)
    for step in range(6):
        params = tree.map(lambda p, g, step=step: p - value(step) * g, params, tensors(step + 1))
    assert_close(ours(optim.sgd(rate)), params)
    assert_close(ours(optim.scale_by_schedule(lambda step: -value(step))), params)


BAD_RATES: list[tuple[Callable[[Any], Any], list[str]]] = [
    (lambda step: math.nan, ["nan at step 0"]),
    (lambda step: -0.1, ["-0.1 at step 0", "not below 0"]),
    (lambda step: 1e39, ["1e+39 at step 0", "the size of a float32"]),
    (lambda step: torch.ones(2), ["a tensor of shape [2]"]),
    (lambda step: step.missing, ["'missing'", "as an int and as a tensor"]),
]


@pytest.mark.parametrize(("rate", "said"), BAD_RATES)
def test_a_bad_schedule_is_named(rate: Callable[[Any], Any], said: list[str]) -> None:
    with pytest.raises(OptimizerError) as caught:
        optim.adamw(rate)
    for part in ["adamw(...), whose schedule is <lambda> (", "test_optim.py:", *said]:
        assert part in str(caught.value)


def test_a_mask_of_another_structure_is_refused() -> None:
    params, transform = tensors(0), optim.adamw(0.1, decay_mask={"up": True})
    with pytest.raises(ShapeError, match="decay_mask with 1 leaves"):
        transform.update(tensors(1), transform.init(params), params)
