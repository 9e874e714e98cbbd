"""What inductor compiles computes what the graph says, and lets go of operands as it uses them."""

import operator
import os
import shutil
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import fx_feather as ff
import layouts
from fx_feather import tree
from fx_feather.backend import build
from fx_feather.errors import BackendError
from fx_feather.models import llama
from fx_feather.passes import matmul

aten = torch.ops.aten

TIGHT = {"rtol": 1e-10, "atol": 1e-12}

compiles = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)


def several(x: Tensor, y: Tensor, out: Tensor) -> list[Tensor]:
    """An operand, views of an operand and of a result, and memory that is written over."""
    a = (x * y).tanh()
    b = a @ y.mT
    made = torch.zeros_like(a)
    made.add_(a).mul_(2)
    return [x, x[1:], b.mT, a.sum(0), made, out.exp() - a]


@compiles
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


@compiles
def test_the_same_tensor_may_come_twice() -> None:
    graph = make_fx(lambda x, y: [(x * 2 + y).relu()])(torch.ones(3), torch.ones(3)).graph
    run = build(graph, {}, "inductor")
    one, five = torch.ones(3), torch.full((3,), 5.0)
    assert torch.equal(run(one, one)[0], torch.full((3,), 3.0))
    assert torch.equal(run(one, five)[0], torch.full((3,), 7.0))


seen: list[bool] = []
alive: list[weakref.ref[Tensor]] = []


@torch.library.custom_op("fx_feather_test::look", mutates_args=())
def look(x: Tensor) -> Tensor:
    """Notes which operands of the function are still there."""
    seen.extend(r() is not None for r in alive)
    return x.clone()


@look.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@compiles
def test_operands_are_freed_as_they_are_used_up() -> None:
    op = torch.ops.fx_feather_test.look.default
    graph = make_fx(lambda x, y: [op((x @ y).relu()) @ y])(torch.ones(3, 3), torch.ones(3, 3)).graph
    run = build(graph, {}, "inductor")
    run(torch.ones(3, 3), torch.ones(3, 3))
    operands = [torch.ones(3, 3), torch.ones(3, 3)]
    alive[:] = [weakref.ref(x) for x in operands]
    seen.clear()
    (out,) = run.boxed(operands)
    assert seen == [False, True], "x is used up before the look, y is not"
    assert torch.equal(out, torch.full((3, 3), 9.0))


def collective(x: Tensor) -> Tensor:
    """Stands for one."""
    return x + 0


def collective_of_many(xs: list[Tensor]) -> list[Tensor]:
    """Stands for one that takes and gives several values."""
    return [x + 0 for x in xs]


@compiles
def test_what_is_between_collectives_is_compiled_in_pieces() -> None:
    """Pieces that give one tensor, items of what gives several on either side, and a list through a collective."""

    def build_graph(own: Any, own_many: Any) -> fx.Graph:
        g = fx.Graph()
        x, y = g.placeholder("x"), g.placeholder("y")
        a = g.call_function(aten.relu.default, (g.call_function(aten.mul.Tensor, (x, y)),))
        b = g.call_function(aten.exp.default, (g.call_function(own, (a,)),))
        top = g.call_function(aten.max.dim, (g.call_function(aten.tanh.default, (b,)), 1))
        c = g.call_function(own, (y,))
        values, places = (g.call_function(operator.getitem, (top, i)) for i in (0, 1))
        d = g.call_function(aten.add.Tensor, (g.call_function(aten.sum.dim_IntList, (c, [1])), values))
        many = g.call_function(own_many, ([d, g.call_function(aten.neg.default, (d,))],))
        last = [g.call_function(operator.getitem, (many, i)) for i in (0, 1)]
        e = g.call_function(aten.mul.Tensor, (g.call_function(aten.sin.default, (last[0],)), last[1]))
        g.output([e, places, d])
        return g

    operands = [torch.randn(4, 6, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    graph = build_graph(collective, collective_of_many)
    want = fx.GraphModule({}, graph)(*operands)
    for _ in range(2):
        for a, b in zip(build(graph, {}, "inductor")(*operands), want, strict=True):
            torch.testing.assert_close(a, b)


@compiles
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float64, {"remat": "selective"}),
        pytest.param(
            torch.float32,
            {"matmul": "onednn"},
            marks=[
                pytest.mark.deep,
                pytest.mark.skipif(not ff.has_onednn(), reason="this PyTorch has no linear operator of oneDNN"),
            ],
        ),
    ],
)
def test_a_compiled_step_is_the_eager_one(
    dtype: torch.dtype, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "LEAST_WORK", 1)
    cfg = llama.LlamaConfig(vocab=14, layers=2, embed=8, heads=2, kv_heads=1, mlp=12, dtype=dtype)
    g = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 14, (2, 2, 4), generator=g)
    batch = {"tokens": tokens, "targets": targets, "positions": torch.arange(4).expand(2, 4).contiguous()}

    def loss(params: Any, batch: Any) -> Any:
        # What is drawn is the same too.
        dropped = torch.nn.functional.dropout(params["embed"], 0.1)
        return llama.loss(cfg)({**params, "embed": dropped}, batch)

    def step(**options: str) -> ff.Step:
        return ff.compile_step(
            loss, ff.sgd(1e-1), template=llama.template(cfg), mesh=ff.Mesh(), layout=layouts.ddp(()),
            batch=batch, device="cpu", **options,
        )  # fmt: skip

    steps = [step(), step(backend="inductor", **options)]
    states = [s.init(seed=1) for s in steps]
    for _ in range(2):
        states = [s(state, batch)[0] for s, state in zip(steps, states, strict=True)]
    both = zip(*(tree.leaves((s.params, s.opt)) for s in states), strict=True)
    for a, b in both:
        torch.testing.assert_close(a, b, **({"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else TIGHT))


def test_without_a_compiler_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of modules of its own
        from torch._inductor import config
    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    graph = make_fx(lambda x: [x.sin() * 0.37 + x.cos()])(torch.ones(3)).graph
    with pytest.raises(BackendError) as error:
        build(graph, {}, "inductor")(torch.ones(3))
    assert all(part in str(error.value) for part in ("got:", "problem:", "rule:", "fix:"))
    assert "there is no C++ compiler that works" in str(error.value)
