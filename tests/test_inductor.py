"""What inductor compiles computes what the graph says, and lets go of operands as it uses them."""

import os
import shutil
import weakref

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fx_feather as ff
import layouts
from fx_feather import tree
from fx_feather.backend import build
from fx_feather.models import llama

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)


def several(x: Tensor, y: Tensor, out: Tensor) -> list[Tensor]:
    """An operand, views of an operand and of a result, and memory that is written over."""
    a = (x * y).tanh()
    b = a @ y.mT
    made = torch.zeros_like(a)
    made.add_(a).mul_(2)
    return [x, x[1:], b.mT, a.sum(0), made, out.exp() - a]


def test_a_function_is_what_its_graph_says() -> None:
    operands = [torch.randn(4, 6, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    graph = make_fx(several)(*operands).graph
    run = build(graph, {}, "inductor")
    laid = [operands, [x.mT.contiguous().mT for x in operands], operands]
    for args in laid:
        before = [x.clone() for x in args]
        for a, b in zip(run(*args), several(*args), strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b)
        assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True)), "an operand was written to"


def test_operands_are_let_go_of() -> None:
    graph = make_fx(lambda x, y: [(x * 2 + y).relu()])(torch.ones(3), torch.ones(3)).graph
    run = build(graph, {}, "inductor")
    operands = [torch.ones(3), torch.ones(3)]
    alive = [weakref.ref(x) for x in operands]
    (out,) = run.boxed(operands)
    assert operands == [] and [r() for r in alive] == [None, None]
    assert torch.equal(out, torch.full((3,), 3.0))


def test_a_compiled_step_is_the_eager_one() -> None:
    cfg = llama.LlamaConfig(vocab=14, layers=2, embed=8, heads=2, kv_heads=1, mlp=12, dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 14, (2, 2, 4), generator=g)
    batch = {"tokens": tokens, "targets": targets, "positions": torch.arange(4).expand(2, 4).contiguous()}

    def step(**options: str) -> ff.Step:
        return ff.compile_step(
            llama.loss(cfg), ff.adamw(1e-2), template=llama.template(cfg), mesh=ff.Mesh(), layout=layouts.ddp(()),
            batch=batch, device="cpu", **options,
        )  # fmt: skip

    steps = [step(), step(backend="inductor", remat="selective")]
    states = [s.init(seed=1) for s in steps]
    for _ in range(2):
        states = [s(state, batch)[0] for s, state in zip(steps, states, strict=True)]
    both = zip(*(tree.leaves((s.params, s.opt)) for s in states), strict=True)
    for a, b in both:
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
