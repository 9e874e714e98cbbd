"""A parameter that first goes through operators of its own is reduced as any other: once a step, in the wide dtype."""

from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather import testing

DP = ff.Mesh(dp=2)
TEMPLATE = {"w": ff.Param("mlp embed", (8, 4))}
BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

# From the parameter to what data is multiplied with, [4, n].
WAYS = {
    "as it is": lambda w: w.mT,
    "transposed twice": lambda w: w.T.T.T,
    "viewed": lambda w: w.view(4, 8),
    "cut": lambda w: w[2:5].T,
    "one part of several": lambda w: w.chunk(2)[1].T,
    "scaled": lambda w: (w * 2).T,
    "squashed": lambda w: torch.tanh(w).T,
    "summed": lambda w: w.sum(0, keepdim=True).T,
}


def loss_of(way: Any) -> Any:
    def loss(params: Any, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w = way(params["w"])
        return (batch.to(w.dtype) @ w).float().square().sum(), torch.tensor(batch.shape[0])

    return loss


def reductions(way: str, layout: ff.Layout) -> list[Any]:
    step = ff.compile_step(
        loss_of(WAYS[way]),
        ff.sgd(lr=0.1),
        template=TEMPLATE,
        mesh=DP,
        layout=layout,
        batch=BATCH,
        batch_dims="batch embed",
        accumulate=2,
    )
    return [c for c in step.collectives() if c.name in ("psum", "reduce_scatter") and c.operand_bytes > 32]


@pytest.mark.parametrize("way", WAYS)
def test_one_all_reduce_a_step(way):
    (once,) = reductions(way, layouts.ddp("dp"))
    assert (once.name, once.operand_bytes) == ("psum", 8 * 4 * 4)


@pytest.mark.parametrize("way", WAYS)
def test_one_reduce_scatter_a_microbatch_in_the_wide_dtype(way):
    first, second = reductions(way, layouts.fsdp("dp") | layouts.mixed())
    assert first == second and (first.name, first.dtype, first.operand_bytes) == ("reduce_scatter", torch.float32, 128)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_one_device(way):
    for layout in (layouts.ddp("dp"), layouts.fsdp("dp"), ff.Layout(compute={"mlp": "dp"})):
        if "mlp" in layout.compute and way not in ("as it is", "transposed twice", "scaled", "squashed", "summed"):
            continue

        def loss(params: Any, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (batch @ WAYS[way](params["w"])).square().sum(), torch.tensor(batch.shape[0])

        setup: dict[str, Any] = {"template": TEMPLATE, "mesh": DP, "layout": layout, "batch": BATCH}
        testing.assert_equivalent(loss, batch_dims="batch embed", optimizer=ff.sgd(lr=0.1), accumulate=2, **setup)
