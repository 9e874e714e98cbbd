"""The laws can fail: each known mistake, planted into the pipeline, is caught by `assert_equivalent`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather import identity, testing
from fx_feather.models import llama
from fx_feather.passes import cleanup, partition, propagate, reach, reshard, stitch, training
from fx_feather.passes.plan import OpStep, Plan
from tests.laws.test_layouts import batch

MODEL = llama.LlamaConfig(
    vocab=11, layers=1, embed=6, heads=2, kv_heads=2, head_dim=2, mlp=4, qk_norm=True, dtype=torch.float64
)
Plant = Callable[[pytest.MonkeyPatch], None]


def train(mesh: ff.Mesh, layout: ff.Layout, **more: Any) -> float:
    return testing.assert_equivalent(
        llama.loss(MODEL),
        template=llama.template(MODEL),
        batch=batch(MODEL, 8, 4),
        mesh=mesh,
        layout=layout,
        **more,
    )


def replaced(patch: pytest.MonkeyPatch, module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    patch.setattr(module, name, wrap(getattr(module, name)))


def on_take(name: str, instead: Callable[..., torch.Tensor]) -> Plant:
    """Plants a mistake where a collective of that name is applied to a value in use."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def wrap(take: Any) -> Any:
            def wrong(x: torch.Tensor, step: reshard.Step, mesh: ff.Mesh, *rest: Any) -> torch.Tensor:
                return instead(take, x, step, mesh) if step.name == name else take(x, step, mesh, *rest)

            return wrong

        replaced(patch, partition, "take", wrap)

    return plant


def as_step(name: str) -> Callable[..., torch.Tensor]:
    return lambda take, x, step, mesh: take(x, dataclasses.replace(step, name=name), mesh)


def twice(take: Any, x: torch.Tensor, step: reshard.Step, mesh: ff.Mesh) -> torch.Tensor:
    return take(take(x, step, mesh), step, mesh)


def scaled(take: Any, x: torch.Tensor, step: reshard.Step, mesh: ff.Mesh) -> torch.Tensor:
    return take(x, step, mesh) / mesh.count(step.axes)


def no_sum_for_scales(patch: pytest.MonkeyPatch) -> None:
    """A norm's weight is whole but used on split data: its gradient is taken as complete."""
    patch.setattr(Plan, "varying", lambda self, root: frozenset())
    on_take("pvary", lambda take, x, step, mesh: x if x.ndim == 1 else take(x, step, mesh))(patch)


def averaged(patch: pytest.MonkeyPatch) -> None:
    """Gradients of the global mean, averaged over the ranks again."""
    replaced(patch, training, "_mean_factor", lambda mean: lambda count, dtype: mean(count, dtype) / 2)


def floored_count(patch: pytest.MonkeyPatch) -> None:
    """The count divided by the axis and floored, then made whole again."""
    replaced(patch, training, "_mean_factor", lambda mean: lambda count, dtype: mean(count // 4 * 4, dtype))


def stale_order(patch: pytest.MonkeyPatch) -> None:
    """A bucket taken apart in another order than it was filled in, where the sizes allow it."""

    def wrap(split: Any) -> Any:
        def wrong(flat: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
            parts = split(flat, sizes)
            for i, size in enumerate(sizes):
                j = sizes.index(size)
                if j != i:
                    parts[i], parts[j] = parts[j], parts[i]
                    break
            return parts

        return wrong

    replaced(patch, reshard, "_split_flat", wrap)


def unreduced(patch: pytest.MonkeyPatch) -> None:
    """Each rank's own part of its own gradient: the scatter without the sum."""
    replaced(
        patch,
        reshard,
        "steps",
        lambda steps: (
            lambda src, dst, mesh: [
                dataclasses.replace(s, name="pscatter") if s.name == "reduce_scatter" else s
                for s in steps(src, dst, mesh)
            ]
        ),
    )


def last_microbatch_alone(patch: pytest.MonkeyPatch) -> None:
    """Sums over microbatches that are overwritten."""
    patch.setattr(
        stitch.Stitcher, "add", lambda self, a, b: self.small(lambda x, y: [y + 0], [a, b], self.types[a], "last")
    )


def linear_in(op: Any) -> Plant:
    """An operator that is not linear in its first operand passes for one that is: a pending sum goes through."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def wrap(lookup: Any) -> Any:
            def wrong(call: Any) -> Any:
                rule = lookup(call)
                if rule is None or call.target is not op:
                    return rule
                linear = (frozenset({0}),)
                return dataclasses.replace(rule, shard=lambda c: dataclasses.replace(rule.shard(c), linear=linear))

            return wrong

        replaced(patch, propagate, "lookup", wrap)

    return plant


DP, TP = ff.Mesh(dp=2), ff.Mesh(tp=2)
SGD = ff.sgd(lr=0.1)

MISTAKES: dict[str, tuple[Plant, ff.Mesh, ff.Layout, dict[str, Any]]] = {
    "a pvary dropped": (on_take("pvary", lambda take, x, step, mesh: x), TP, layouts.tp("tp"), {}),
    "a pvary doubled": (on_take("pvary", twice), TP, layouts.tp("tp"), {}),
    "a sum divided by the ranks": (on_take("psum", scaled), TP, layouts.tp("tp"), {}),
    "a gather whose backward does not reduce": (
        on_take("all_gather", as_step("all_gather_invariant")), TP, layouts.tp_sp("tp"), {},
    ),
    "a reduce-scatter that does not reduce": (
        on_take("reduce_scatter", as_step("pscatter")), TP, layouts.tp_sp("tp"), {},
    ),
    "no sum for a norm under sequence parallel": (no_sum_for_scales, TP, layouts.tp_sp("tp"), {}),
    "no sum for a q/k-norm under tensor parallel": (no_sum_for_scales, TP, layouts.tp("tp"), {}),
    "gradients averaged over ranks again": (averaged, DP, layouts.ddp("dp"), {"optimizer": SGD, "steps": 1}),
    "gradients averaged, under Adam": (averaged, DP, layouts.ddp("dp"), {"optimizer": ff.adamw(lr=1e-3), "steps": 1}),
    "a count divided and floored": (floored_count, DP, layouts.ddp("dp"), {"optimizer": SGD, "steps": 1}),
    "a bucket in a stale order": (stale_order, DP, layouts.ddp("dp"), {}),
    "a gather in a stale order": (stale_order, DP, layouts.fsdp("dp"), {}),
    "FSDP's gradients not reduced": (unreduced, DP, layouts.fsdp("dp"), {}),
    "the last microbatch alone": (last_microbatch_alone, DP, layouts.ddp("dp"), {"accumulate": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, mesh, layout, settings = MISTAKES[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="values are off by more than rtol"):
        train(mesh, layout, **settings)


def small(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ p["up"] @ p["down"]


def relu_of_partial(p: Any, x: torch.Tensor) -> Any:
    return small(p, x).relu().sum(), torch.tensor(x.shape[0])


def scalar_on_partial(p: Any, x: torch.Tensor) -> Any:
    return ((small(p, x) + 10.0).sin()).sum(), torch.tensor(x.shape[0])


def power_of_partial(p: Any, x: torch.Tensor) -> Any:
    return (small(p, x) ** 2).sum(), torch.tensor(x.shape[0])


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (relu_of_partial, torch.ops.aten.relu.default),
        (power_of_partial, torch.ops.aten.pow.Tensor_Scalar),
        (scalar_on_partial, torch.ops.aten.add.Tensor),
    ],
)
def test_a_pending_sum_through_what_is_not_linear_is_caught(
    loss: Any, op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "template": {"up": ff.Param("embed mlp", (3, 4)), "down": ff.Param("mlp embed", (4, 3))},
        "batch": torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),
        "batch_dims": "batch embed",
        "mesh": TP,
        "layout": layouts.tp("tp"),
    }
    testing.assert_equivalent(loss, **settings)
    linear_in(op)(monkeypatch)
    with pytest.raises(AssertionError, match="values are off by more than rtol"):
        testing.assert_equivalent(loss, **settings)


def hands_a_pending_sum_on(patch: pytest.MonkeyPatch) -> None:
    """What an operator takes of a parameter is replaced by what it comes in as, a pending sum too."""

    def assume(self: Plan, root: Any, t: ff.Type) -> None:
        self.types[root] = t
        for n, step in self.steps.items():
            if isinstance(step, OpStep) and len(step.operands) == 1 and step.operands[0][0] == root:
                step.operands = [(root, t)]
                step.results = tuple(r.with_(replicated=t.replicated) for r in step.results)
                for i, result in enumerate(step.results):
                    self.assume((n, i), result)

    patch.setattr(Plan, "assume", assume)


def leaves_infinite_padding(patch: pytest.MonkeyPatch) -> None:
    """What an operator chooses is also chosen for padding."""
    patch.setattr(partition, "_chooses", lambda call: False)


def ignores_strides(patch: pytest.MonkeyPatch) -> None:
    """An edit of a graph is made though later views were traced on other strides."""
    patch.setattr(cleanup, "_takes", lambda user, operand, value: True)


def scaled_by_its_mean(p: Any, x: torch.Tensor) -> Any:
    return (x @ (p["w"] * p["w"].abs().mean().clamp(min=1e-5))).pow(2).sum(), torch.tensor(x.shape[0])


def masked_scores(p: Any, x: torch.Tensor) -> Any:
    scores = x @ p["w"]
    open_ = torch.where(scores == 0.5, float("-inf"), scores)  # in padding alone, which functions see as 0.5
    return (open_ * p["scale"]).sum(), torch.tensor(x.shape[0])


def mean_over_a_middle_dim(p: Any, x: torch.Tensor) -> Any:
    return (x.view(2, 2, 3) @ p["w"]).mean(1).pow(2).sum(), torch.tensor(x.shape[0])


VOCAB = {"w": ff.Param("embed vocab", (3, 5)), "scale": ff.Param("_", (1,))}
WIDE = {"w": ff.Param("embed mlp", (3, 4))}


@pytest.mark.parametrize(
    ("plant", "loss", "template", "mesh", "layout"),
    [
        (hands_a_pending_sum_on, scaled_by_its_mean, WIDE, TP, layouts.tp("tp")),
        (leaves_infinite_padding, masked_scores, VOCAB, TP, layouts.tp("tp")),
        (ignores_strides, mean_over_a_middle_dim, WIDE, ff.Mesh(dp=1), layouts.single()),
    ],
    ids=["a pending sum handed on", "infinite padding", "strides ignored"],
)
def test_what_one_program_in_many_meets_is_caught(
    plant: Plant, loss: Any, template: Any, mesh: ff.Mesh, layout: ff.Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "template": template,
        "batch": torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),
        "batch_dims": "batch embed",
        "mesh": mesh,
        "layout": layout,
    }
    testing.assert_equivalent(loss, **settings)
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError), match=r"off by more than rtol|view size is not compatible"):
        testing.assert_equivalent(loss, **settings)


def complex_values_stop_cotangents(patch: pytest.MonkeyPatch) -> None:
    """Only floating-point values carry a cotangent from block to block."""
    patch.setattr(reach, "takes_gradient", lambda x: x.is_floating_point())


def counts_are_constants(patch: pytest.MonkeyPatch) -> None:
    """A count that depends on parameters is taken for a constant."""
    patch.setattr(reach, "_refuse_count", lambda: None)


def objects_are_what_they_were(patch: pytest.MonkeyPatch) -> None:
    """A block is known by the objects that it reads, and not by what they hold."""
    patch.setattr(identity, "_may_change", lambda x: False)


def complex_between_blocks(p: Any, x: torch.Tensor) -> Any:
    pair = ff.block(lambda h: torch.complex(h, 2 * h), "pair")
    square = ff.block(lambda z: torch.view_as_real(z**2), "square")
    return square(pair(x @ p["w"])).sum() + p["w"].sum(), torch.tensor(x.shape[0])


def normalised_by_its_gates(p: Any, x: torch.Tensor) -> Any:
    gate = torch.sigmoid(x @ p["w"])
    return (gate * gate).sum(), gate.sum()


class Scaled:
    """A part whose setting changes between calls."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return h.sin() * self.scale


def called_twice(p: Any, x: torch.Tensor) -> Any:
    part = Scaled()
    block, h = ff.block(part, "part"), x @ p["w"]
    first, part.scale = block(h), 3.0
    return (first + block(h)).sum(), torch.tensor(x.shape[0])


@pytest.mark.parametrize(
    ("plant", "loss"),
    [
        (complex_values_stop_cotangents, complex_between_blocks),
        (counts_are_constants, normalised_by_its_gates),
        (objects_are_what_they_were, called_twice),
    ],
    ids=["complex values", "a count with a gradient", "an object that changes"],
)
def test_what_a_trace_loses_is_caught(plant: Plant, loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    template = {"w": ff.Param("embed mlp", (3, 4), dtype=torch.float64)}
    params = ff.init(template, seed=0)
    leaf = params["w"].clone().requires_grad_(True)
    total, count = loss({"w": leaf}, x)
    (want,) = torch.autograd.grad(total / count, leaf)

    def off() -> float:
        f = ff.compile(
            ff.value_and_grad(loss), template=template, mesh=TP, layout=layouts.tp("tp"), batch=x,
            batch_dims="batch embed",
        )  # fmt: skip
        return float((f.simulate(params, x)[1]["w"] - want).norm() / want.norm())

    if plant is counts_are_constants:
        with pytest.raises(ff.FeatherError, match="a count that depends on the parameters"):
            off()
    else:
        assert off() < 1e-12
    plant(monkeypatch)
    assert off() > 0.1


def test_no_mistake_no_complaint() -> None:
    assert train(ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp_sp("tp"), optimizer=SGD) < 1e-12


def test_the_message_names_the_worst_leaf_and_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    averaged(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        train(DP, layouts.ddp("dp"), optimizer=SGD, steps=1)
    text = str(caught.value)
    for part in (
        "assert_equivalent(loss_fn, mesh=Mesh(dp=2)",
        "got:",
        "problem:",
        "rule:",
        "fix:",
        "step 1['grad_norm']",
    ):
        assert part in text
    assert "0.5 of the true one" in text
    assert "2 times too small: look for a sum over 'dp' left out, or a mean in its place" in text
