"""Law: optimizers of groups, frozen parameters, averages, Lion and Muon are on any mesh what they are on one device."""

import pytest
import torch
from torch import Tensor

import fx_feather as ff
import layouts
from fx_feather import optim, testing, tree

TEMPLATE = {
    "embed": ff.Param("vocab embed", (6, 8)),
    "layers": [
        {
            "up": ff.Param("embed mlp", (8, 12)),
            "down": ff.Param("mlp embed", (12, 8)),
            "norm": ff.Param("embed", (8,), init=ff.ones()),
        }
        for _ in range(2)
    ],
    "head": ff.Param("embed vocab", (8, 6)),
}
BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def layer(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x * params["norm"] @ params["up"]) @ params["down"]


def loss(params, batch):
    x = batch @ params["embed"]
    for own in params["layers"]:
        x = ff.block(layer)(own, x)
    out = ff.constrain(torch.log_softmax(x @ params["head"], -1), "batch _")
    return -(out[:, 0] * batch[:, 1]).sum(), torch.tensor(batch.shape[0])


OPTIMIZERS = {
    "lion": ff.lion(1e-2),
    "muon": ff.multi_transform(
        {"*['up']": ff.muon(0.02), "*['down']": ff.muon(0.02, nesterov=False), "*": ff.adamw(0.01)}
    ),
    "muon for all matrices": ff.multi_transform({"*['norm']": ff.sgd(0.1), "*": ff.muon(0.1, scale="match_rms_adamw")}),
    "frozen": ff.freeze(ff.chain(ff.clip_by_global_norm(0.1), ff.adamw(0.01)), "*['layers']*", "*['embed']"),
    "frozen between": ff.freeze(ff.adamw(0.01), "*['layers'][1]*"),
    "ema": ff.ema(ff.chain(ff.clip_by_global_norm(0.1), ff.adamw(0.01)), 0.9),
    "masked": ff.chain(
        optim.scale_by_adam(), ff.masked(optim.add_decayed_weights(0.3), "*['head']", "*['up']"), ff.scale(-0.01)
    ),
    "all": ff.freeze(
        ff.ema(
            ff.chain(
                ff.clip_by_global_norm(0.1),
                ff.multi_transform({"*['up']": ff.muon(0.02), "*['norm']": ff.lion(1e-3), "*": ff.adamw(0.01)}),
            ),
            0.5,
        ),
        "*['down']",
    ),
}
LAYOUTS = {
    "ddp": (ff.Mesh(a=2), layouts.ddp("a")),
    "zero1": (ff.Mesh(a=2), layouts.zero1("a")),
    "zero2": (ff.Mesh(a=4), layouts.zero2("a")),
    "fsdp": (ff.Mesh(a=4), layouts.fsdp("a")),
    "tp": (ff.Mesh(a=2), layouts.tp("a")),
    "fsdp | tp": (ff.Mesh(a=2, b=2), layouts.fsdp("a") | layouts.tp("b")),
}


# Each in two layouts, and those that hold most in all.
GRID = [(o, k) for o in OPTIMIZERS for k in LAYOUTS if k in ("zero1", "fsdp | tp") or o in ("all", "frozen", "muon")]


@pytest.mark.parametrize(("name", "layout"), GRID)
def test_groups_are_one_device(name: str, layout: str) -> None:
    mesh, table = LAYOUTS[layout]
    testing.assert_equivalent(
        loss,
        template=TEMPLATE,
        batch=BATCH,
        batch_dims="batch _",
        mesh=mesh,
        layout=table,
        optimizer=OPTIMIZERS[name],
        steps=2,
        accumulate=2 if name in ("frozen", "all") and layout in ("zero2", "fsdp | tp") else 1,
    )


def compiled(optimizer: ff.Transform) -> ff.Step:
    return ff.compile_step(
        loss,
        optimizer,
        template=TEMPLATE,
        mesh=ff.Mesh(a=2),
        layout=layouts.fsdp("a"),
        batch=BATCH.float(),
        batch_dims="batch _",
    )


def test_frozen_parameters_have_no_state_and_no_gradients() -> None:
    optimizer = ff.freeze(ff.adamw(0.01), "*['layers']*", "*['embed']")
    step = compiled(optimizer)
    state = step.init()
    assert tree.paths(state.opt) == ["['mu']['head']", "['nu']['head']", "['step']"]
    head = tree.leaves(TEMPLATE["head"])[0].numel * 4
    reduced = [c.operand_bytes for c in step.collectives() if "reduce_scatter" in str(c)]
    assert sum(reduced) == head
    # Nothing is multiplied to get their gradients: two products are the head's forward and the gradient of it alone.
    whole = compiled(ff.adamw(0.01))
    assert products(step) < products(whole)
    new, _ = step.simulate(state, BATCH.float())
    for path, a, b in zip(tree.paths(TEMPLATE), tree.leaves(state.params), tree.leaves(new.params), strict=True):
        assert torch.equal(a, b) == ("head" not in path)


def products(step: ff.Step) -> int:
    calls = [i for name in ("first", "finish") for i in step.program.sections[name].instrs]
    counted = [sum("mm" in str(n.target) for n in i.func.graph.nodes) * len(i.ins) for i in calls if i.func.graph]
    return sum(counted)


def test_the_norm_of_a_step_is_of_what_is_moved() -> None:
    _, metrics = compiled(ff.freeze(ff.sgd(0.1), "*['embed']", "*['layers']*")).simulate(
        compiled(ff.freeze(ff.sgd(0.1), "*['embed']", "*['layers']*")).init(), BATCH.float()
    )
    params = compiled(ff.sgd(0.1)).init().params
    grads = ff.value_and_grad(loss)(params, BATCH.float())[1]
    assert metrics["grad_norm"] == pytest.approx(grads["head"].norm().item(), rel=1e-5)
