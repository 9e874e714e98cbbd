"""Rates that Python computes, in compiled steps: right on every mesh, and refused before anything is written over."""

import dataclasses
import math

import pytest
import torch

import fx_feather as ff
from fx_feather import optim, testing, tree
from fx_feather.errors import NonFiniteError, OptimizerError

TEMPLATE = {"w": ff.Param("embed mlp", (4, 6), dtype=torch.float64), "b": ff.Param("mlp", (6,), dtype=torch.float64)}
BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LAYOUT = ff.Layout(compute={"batch": "dp"}, store=ff.Store({"mlp": "dp"}, {"mlp": "dp"}, {"mlp": "dp"}))


def loss(params, batch):
    return (torch.tanh(batch @ params["w"] + params["b"]) ** 2).sum(), torch.tensor(batch.shape[0])


def rate(step: int) -> float:
    return 0.2 if step < 1 else 0.1 * math.cos(step) + 0.1


@pytest.mark.parametrize(
    "optimizer",
    [
        ff.sgd(rate, momentum=0.9),
        ff.adamw(rate),
        ff.chain(ff.clip_by_global_norm(0.1), ff.adamw(rate)),
        ff.chain(optim.scale_by_adam(), optim.scale_by_schedule(lambda step: -rate(step))),
    ],
    ids=lambda o: o.text[:30],
)
def test_python_computes_the_rate_of_each_step(optimizer):
    testing.assert_equivalent(
        loss,
        template=TEMPLATE,
        batch=BATCH,
        batch_dims="batch embed",
        mesh=ff.Mesh(dp=2),
        layout=LAYOUT,
        optimizer=optimizer,
    )


def infinite(at: int) -> ff.Transform:
    """Updates that are infinite at one step."""

    def update(grads, state, params):
        factor = torch.where(state["step"] == at, math.inf, 1.0)
        return tree.map(lambda g: g * factor.to(g.dtype), grads), {"step": state["step"] + 1}

    return ff.Transform(lambda params: {"step": torch.zeros((), dtype=torch.int64)}, update)


def test_a_norm_in_mid_chain_that_is_not_finite_is_an_error_and_the_state_is_there():
    step = ff.compile_step(
        loss,
        ff.chain(infinite(1), ff.clip_by_global_norm(0.1), ff.adamw(0.1)),
        template=TEMPLATE,
        mesh=ff.Mesh(dp=2),
        layout=LAYOUT,
        batch=BATCH,
        batch_dims="batch embed",
    )
    state, _ = step.simulate(step.init(seed=0), BATCH)
    with pytest.raises(NonFiniteError, match=r"clip_by_global_norm\(max_norm=0.1\): the norm of what it clips"):
        step.simulate(state, BATCH)
    names = [step.program.sections[k].instrs for k in ("check", "update")]
    counts = [sum("finite" in str(n.target) for i in instrs for n in i.func.graph.nodes) for instrs in names]
    assert counts[0] and not counts[1]


def test_a_norm_in_mid_chain_may_leave_the_range_of_float32():
    """Its square does, which is no reason to multiply all by 0."""
    template = tree.map(lambda p: dataclasses.replace(p, dtype=torch.float32), TEMPLATE)
    settings = {"mesh": ff.Mesh(dp=2), "layout": LAYOUT, "batch": BATCH.float(), "batch_dims": "batch embed"}
    new = []
    for factor in (1.0, 1e30):
        optimizer = ff.chain(ff.scale(factor), ff.clip_by_global_norm(1e-3 * factor), ff.scale(1 / factor), ff.sgd(1.0))
        step = ff.compile_step(loss, optimizer, template=template, **settings)
        new.append(step.simulate(step.init(seed=0), BATCH.float())[0].params)
    for a, b in zip(tree.leaves(new[0]), tree.leaves(new[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_bad_rate_leaves_the_state_as_it_was(backend):
    rates = [0.1, math.inf]
    step = ff.compile_step(
        loss,
        ff.chain(ff.clip_by_global_norm(0.1), ff.adamw(lambda k: rates[k])),
        template=TEMPLATE,
        mesh=ff.Mesh(dp=2),
        layout=LAYOUT,
        batch=BATCH,
        batch_dims="batch embed",
        backend=backend,
    )
    state, _ = step.simulate(step.init(seed=0), BATCH)
    before = [x.clone() for x in tree.leaves((state.params, state.opt))]
    with pytest.raises(OptimizerError, match=r"adamw\(\.\.\.\), whose schedule is [\s\S]*inf at step 1"):
        step.simulate(state, BATCH)
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves((state.params, state.opt)), strict=True))
    rates[1] = 0.05
    assert step.simulate(state, BATCH)[0].step == 2
    checks = [i.func for i in step.program.sections["check"].instrs]
    assert any("scheduled" in str(n.target) for f in checks for n in f.graph.nodes)
