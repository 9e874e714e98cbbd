"""Communication runs beside computation: what is moved, started early and awaited late gives the same values."""

import itertools
import operator
from typing import Any

import pytest
import torch
from torch import fx

import fx_feather as ff
import layouts
from fx_feather.deferred import Pending, deferred, started, values
from fx_feather.models import llama
from fx_feather.passes.interleave import interleave
from fx_feather.passes.overlap import is_gather
from fx_feather.program import BY_OP, Func

CFG = llama.LlamaConfig(vocab=16, layers=4, embed=8, heads=2, kv_heads=2, mlp=16)
BATCH = {name: torch.zeros(4, 4, dtype=torch.int64) for name in ("tokens", "targets", "positions")}
aten = torch.ops.aten


def step(layout: ff.Layout, mesh: ff.Mesh, **options: Any) -> ff.Step:
    template = llama.template(CFG)
    return ff.compile_step(
        llama.loss(CFG), ff.sgd(lr=0.1), template=template, mesh=mesh, layout=layout, batch=BATCH, **options
    )


def gathers(step: ff.Step) -> tuple[list[str], int]:
    """The calls of the forward and backward, gathers in capitals, and the most bytes that wait for their use."""
    section, names, ahead, most = step.program.sections["first"], [], {}, 0
    for i in section.instrs:
        for v in (v for row in i.ins for v in row):
            ahead = {outs: n for outs, n in ahead.items() if v not in outs}
        if is_gather(i.func):
            results = i.func.graph.output_node().args[0]
            size = sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in results)
            ahead |= dict.fromkeys(i.outs, size)
            most = max(most, sum(ahead.values()))
        names.append("GATHER" if is_gather(i.func) else i.func.name)
    return [n for n in names if n == "GATHER" or ("layer." in n and "reduce" not in n)], most


def test_a_block_is_gathered_while_the_one_before_runs() -> None:
    names, _ = gathers(step(layouts.fsdp("dp"), ff.Mesh(dp=2)))
    compute = [k for k, n in enumerate(names) if n == "layer.forward"]
    assert len(compute) == CFG.layers
    # Two gathers come before the first block: its own, and that of the next.
    assert names[: compute[0]].count("GATHER") >= 2
    assert all(b - a == 2 for a, b in itertools.pairwise(compute)), names
    plain, _ = gathers(step(layouts.fsdp("dp"), ff.Mesh(dp=2), prefetch_bytes=0))
    assert sorted(plain) == sorted(names)
    assert all(plain[k - 1] == "GATHER" for k, n in enumerate(plain) if n == "layer.forward")


@pytest.mark.parametrize("budget", [0, 2000, 6000, 1 << 30])
def test_no_more_waits_than_the_budget(budget: int) -> None:
    _, least = gathers(step(layouts.fsdp("dp"), ff.Mesh(dp=2), prefetch_bytes=0))
    _, most = gathers(step(layouts.fsdp("dp"), ff.Mesh(dp=2), prefetch_bytes=budget))
    # One gather is always there when its use begins.
    assert most <= least + budget
    assert (most > least) == (budget >= 2000)


def test_moving_calls_keeps_every_bit() -> None:
    plain = step(layouts.fsdp("dp"), ff.Mesh(dp=2), prefetch_bytes=0)
    ahead = step(layouts.fsdp("dp"), ff.Mesh(dp=2), prefetch_bytes=1 << 30)
    (a, of_a), (b, of_b) = (s.simulate(s.init(seed=1), BATCH) for s in (plain, ahead))
    assert of_a == of_b
    assert all(torch.equal(x, y) for x, y in zip(*map(ff.tree.leaves, (a.params, b.params)), strict=True))


def graph_of(build: Any) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A graph over one operand of four elements; `build` gives its results by name, and `call` keeps what each is."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")

    def call(target: Any, *args: Any) -> fx.Node:
        n = graph.call_function(target, args)
        mutable = getattr(getattr(target, "_schema", None), "is_mutable", False)
        n.meta["val"] = args[0].meta["val"] if mutable else torch.empty(4, device="meta")
        return n

    named = build(call, x)
    graph.output(list(named.values()))
    return graph, named


PSUM = next(op for op, c in BY_OP.items() if c.name == "psum")


def test_what_a_collective_does_not_need_comes_after_it() -> None:
    def build(call: Any, x: fx.Node) -> dict[str, fx.Node]:
        weight = call(aten.mul.Tensor, x, x)
        down = call(aten.neg.default, x)
        return {"total": call(PSUM, down, "tp", 2), "weight": weight}

    graph, named = graph_of(build)
    interleave(graph)
    graph.lint()
    order = list(graph.nodes)
    assert order.index(named["total"]) < order.index(named["weight"])


def test_nothing_moves_across_a_write_of_what_it_reads() -> None:
    def build(call: Any, x: fx.Node) -> dict[str, fx.Node]:
        a = call(aten.neg.default, x)
        before = call(aten.mul.Tensor, a, a)  # of the old value, needed by no collective
        call(aten.exp_.default, a)
        return {"total": call(PSUM, a, "tp", 2), "before": before, "after": call(aten.abs.default, a)}

    graph, _ = graph_of(build)
    interleave(graph)
    order = {n.target: k for k, n in enumerate(graph.nodes)}
    assert order[aten.mul.Tensor] < order[aten.exp_.default] < order[PSUM] < order[aten.abs.default]


def fake_collective(log: list[str], reads: bool) -> Any:
    """A collective that takes its operand when it starts, or only when it is awaited."""

    def start(x: torch.Tensor) -> Any:
        log.append("start")
        taken = x if reads else x.clone()

        def wait() -> torch.Tensor:
            log.append("wait")
            return taken * 10

        return wait

    start.fresh, start.reads = True, reads

    def run(x: torch.Tensor) -> torch.Tensor:
        return start(x)()

    run.start, run.fresh = start, True
    return run


@pytest.mark.parametrize("reads", [False, True])
def test_a_deferred_call_starts_at_once_and_ends_where_it_is_used(reads: bool) -> None:
    log: list[str] = []

    def build(call: Any, x: fx.Node) -> dict[str, fx.Node]:
        a = call(aten.neg.default, x)
        total = call(fake_collective(log, reads), a)
        # In place of `a`, if nobody looked at it any more.
        return {"b": call(aten.exp.default, a), "c": call(aten.add.Tensor, total, x)}

    graph, _ = graph_of(build)
    begin = deferred(graph, {})
    assert begin is not None
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    env: dict[int, Any] = {0: x}
    env.update(dict.fromkeys((1, 2), Pending(begin(x), (1, 2))))
    assert log == ["start"]
    c, b = values(env, (2, 1))
    assert log == ["start", "wait"]
    assert torch.equal(b, (-x).exp()) and torch.equal(c, -10 * x + x)
    assert torch.equal(x, torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_a_chain_of_collectives_can_not_wait() -> None:
    def build(call: Any, x: fx.Node) -> dict[str, fx.Node]:
        return {"second": call(PSUM, call(aten.neg.default, call(PSUM, x, "tp", 2)), "tp", 2)}

    assert not Func("chain", graph_of(build)[0]).can_wait()

    def alone(call: Any, x: fx.Node) -> dict[str, fx.Node]:
        return {"a": call(PSUM, x, "tp", 2), "b": call(PSUM, call(aten.neg.default, x), "tp", 2)}

    assert Func("beside", graph_of(alone)[0]).can_wait()


def test_where_memory_is_written_over_nothing_waits() -> None:
    def build(psum: Any) -> Any:
        def inner(call: Any, x: fx.Node) -> dict[str, fx.Node]:
            c = call(aten.neg.default, x)
            w = call(aten.add.Tensor, call(psum, c, "tp", 2) if psum is PSUM else call(psum, c), c)
            call(aten.exp_.default, c)
            return {"w": w, "c": c}

        return inner

    assert not Func("writes", graph_of(build(PSUM))[0]).can_wait()
    graph, _ = graph_of(build(fake_collective([], True)))
    before = [n.target for n in graph.nodes]
    started(graph)
    assert [n.target for n in graph.nodes] == before


def test_within_a_function_a_collective_is_awaited_at_its_first_use() -> None:
    log: list[str] = []

    def build(call: Any, x: fx.Node) -> dict[str, fx.Node]:
        total = call(fake_collective(log, True), x)
        other = call(lambda y: (log.append("compute"), y + 1)[1], x)
        return {"sum": call(operator.add, total, other)}

    graph, _ = graph_of(build)
    started(graph)
    graph.lint()
    (got,) = fx.GraphModule({}, graph).forward(torch.ones(4))
    assert log == ["start", "compute", "wait"]
    assert torch.equal(got, torch.full((4,), 12.0))


@pytest.mark.parametrize("bad", [-1, 1.5, "1 MiB", True])
def test_a_budget_is_a_number_of_bytes(bad: Any) -> None:
    with pytest.raises(ff.FeatherError, match="prefetch_bytes"):
        step(layouts.fsdp("dp"), ff.Mesh(dp=2), prefetch_bytes=bad)
