"""A unit of any length is cut into a forward and a backward, whatever the backward computes again."""

import sys

import pytest
import torch
from torch import fx

import fx_feather as ff
from fx_feather.models import llama
from fx_feather.passes.differentiate import REMAT, Place, linearize


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_a_chain_longer_than_the_stack_of_python(remat: str) -> None:
    length = sys.getrecursionlimit() + 100

    def chain(x: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(length):
            x = torch.sin(x)
        return [x]

    unit = linearize(chain, [Place((4,), (1,), torch.float32)], [True], [True], "cpu", "chain").cut(remat)
    assert unit.backward is not None and unit.grads == (0,)
    assert (len(unit.saved_nodes) == 0) == (remat != "none")


def layer(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    h = x @ w
    h = torch.nn.functional.silu(h).exp() * h
    return [torch.softmax(h @ w, -1)]


PLACES = [Place((4, 4), (4, 1), torch.float64)] * 2


@pytest.mark.parametrize("remat", REMAT)
def test_every_policy_has_the_gradients_of_autograd(remat: str) -> None:
    unit = linearize(layer, PLACES, [True, True], [True], "cpu", "layer").cut(remat)
    x, w, ct = (torch.randn(4, 4, dtype=torch.float64) for _ in range(3))
    made = fx.GraphModule(unit.forward.constants, unit.forward.graph).forward(x, w)
    assert unit.backward is not None
    backward = fx.GraphModule(unit.backward.constants, unit.backward.graph).forward
    got = backward(*((x, w)[i] for i in unit.keeps), *made[unit.outputs :], ct)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    want = torch.autograd.grad(layer(*leaves), leaves, ct)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_selective_keeps_matmuls_and_computes_the_rest_again() -> None:
    joint = linearize(layer, PLACES, [True, True], [True], "cpu", "layer")
    saved = {policy: joint.cut(policy).saved_nodes for policy in REMAT}
    assert {n.target for n in saved["selective"]} == {torch.ops.aten.mm.default}
    assert [len(saved[p]) for p in REMAT] == sorted((len(n) for n in saved.values()), reverse=True)
    assert not saved["full"]
    again = joint.cut("selective").backward
    assert again is not None
    # Two matmuls of the backward for each of the forward, and none of the forward's own.
    assert sum(n.target is torch.ops.aten.mm.default for n in again.graph.nodes) == 4


def test_what_is_written_over_is_not_kept() -> None:
    def writes(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [(x @ w).add_(1.0).sin()]

    unit = linearize(writes, PLACES, [True, True], [True], "cpu", "writes").cut("selective")
    x, w, ct = (torch.randn(4, 4, dtype=torch.float64) for _ in range(3))
    made = fx.GraphModule({}, unit.forward.graph).forward(x, w)
    assert unit.backward is not None
    got = fx.GraphModule({}, unit.backward.graph).forward(*((x, w)[i] for i in unit.keeps), *made[1:], ct)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    for a, b in zip(got, torch.autograd.grad(writes(*leaves), leaves, ct), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("budget", [0, 1_000, 5_000, 12_000, 1 << 30])
def test_blocks_keep_no_more_than_a_budget(budget: int) -> None:
    cfg = llama.LlamaConfig(vocab=16, layers=4, embed=8, heads=2, kv_heads=2, mlp=16)
    batch = {name: torch.zeros(2, 4, dtype=torch.int64) for name in ("tokens", "targets", "positions")}
    settings = {"template": llama.template(cfg), "mesh": ff.Mesh(), "layout": ff.Layout(), "batch": batch}

    def kept(remat: str | int) -> int:
        step = ff.compile_step(llama.loss(cfg), ff.sgd(lr=0.1), **settings, remat=remat)
        calls, total = step.program.sections["first"].instrs, 0
        backward = {v for i in calls if "backward" in i.func.name for v in i.ins[0]}
        for i in calls:
            if i.func.name.endswith(".forward"):
                nodes = i.func.graph.output_node().args[0]
                used = [n for n, v in zip(nodes, i.outs[0], strict=True) if v in backward]
                total += sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in used)
        return total

    everything, nothing = kept("none"), kept("full")
    assert nothing <= kept(budget) <= min(everything, nothing + budget)
    assert (kept(budget) == nothing) == (budget == 0)
    assert (kept(budget) == everything) == (budget == 1 << 30)
