"""A pointwise function that runs tile by tile gives what its operators give on whole values."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fx_feather.backend import build, consuming, overwriting, tiled, together
from fx_feather.record import record
from fx_feather.tiles import TILE

N = 2 * TILE + 5  # the last tile is a short one


def graph_of(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args).graph


def forward(graph):
    return fx.GraphModule({}, graph).forward


X, Y = torch.randn(N), torch.randn(N)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y, s: [(x * y + x).exp(), x * s.exp()],
        lambda x, y, s: [(x * y).tanh().to(torch.bfloat16), x > y],
        lambda x, y, s: [x, (x + y) * (s * 2 + 1)],
        lambda x, y, s: (lambda n: [n, (n * 2).exp() + s, n.sqrt()])(x * x + y * y),  # read after it was written
        lambda x, y, s: (lambda n: [n, n])((x * y + s).exp()),
    ],
)
def test_tiles_keep_every_bit(fn) -> None:
    args = (X, Y, torch.tensor(0.5))
    graph = graph_of(fn, *args)
    run = tiled(graph, forward(graph))
    assert run is not None
    for got, want in zip(run(*args), forward(graph)(*args), strict=True):
        assert torch.equal(got, want) and got.dtype == want.dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_a_sum_is_as_good_as_that_of_the_whole(dtype) -> None:
    x = torch.ones(40 * TILE, dtype=dtype)
    graph = graph_of(lambda x: [(x.clone() & x.clone() if dtype == torch.bool else x * x * x).sum()], x)
    run = tiled(graph, forward(graph))
    assert run is not None
    (got,), (want,) = run(x), forward(graph)(x)
    assert torch.equal(got, want) and got.dtype == want.dtype


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, s: (lambda total: [total, x * 2 / total])(x.sum()),  # the sum is needed inside
        lambda x, s: [x * 2 + 1, (s * 3).sum()],  # a sum of one value, which each tile would add
        lambda x, s: [x * 2 + 1, s * 3],
        lambda x, s: [x.cumsum(0) * 2 + 1],
        lambda x, s: [x[:5] * 2 + 1],
    ],
)
def test_what_tiles_would_change_is_run_whole(fn) -> None:
    args = (X, torch.tensor(0.5))
    graph = graph_of(fn, *args)
    for got, want in zip(build(graph, {}, "eager")(*args), forward(graph)(*args), strict=True):
        assert torch.equal(got, want)


def test_values_in_another_order_are_run_whole() -> None:
    x = torch.randn(64, 2048).t()
    graph = graph_of(lambda x: [(x * 2 + 1).exp()], x)
    (got,), (want,) = build(graph, {}, "eager")(x), forward(graph)(x)
    assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("may", [{0, 1, 2, 3}, {2}, {1}, set()])
@pytest.mark.parametrize("size", [8, 2 * TILE + 5])
def test_a_fused_kernel_writes_over_what_nobody_else_reads(kept: bool, may: set[int], size: int) -> None:
    """The gradient too, in whose place the kernel leaves the factor times it."""

    def step(p, g, factor, mu, nu, lr, t):
        new = torch.ops.fx_feather.adamw(p, g, factor, mu, nu, lr, t, 0.9, 0.95, 1e-8, 0.0)[:3]
        return [*new, p] if kept else [*new]

    def values():
        p, g, mu, nu = torch.rand(4, size, generator=torch.Generator().manual_seed(0)).unbind()
        return [x.clone() for x in (p, g, torch.tensor(0.3), mu, nu, torch.tensor(0.1), torch.tensor(1.0))]

    graph = record(step, [torch.empty_like(x, device="meta") for x in values()]).graph
    form = overwriting(graph)
    assert form is not None and not form.whole
    assert set(form.over) == ({1, 3, 4} if kept else {0, 1, 3, 4})
    may = {k + (k > 1) for k in may} & set(form.over)
    want, given = build(graph, {}, "eager")(*values()), values()
    got = form.run(list(given), may)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    changed = {k for k, (x, before) in enumerate(zip(given, values(), strict=True)) if not torch.equal(x, before)}
    assert changed == may


@pytest.mark.parametrize("size", [TILE, 2 * TILE])
def test_what_runs_in_tiles_runs_so_whoever_holds_its_operands(size: int) -> None:
    """A sum of tiles has other bits than one of the whole: ranks that hold values for longer would drift apart."""
    graph = record(lambda x, y: [x * y * 2, (y * y).sum()], [torch.empty(size, device="meta") for _ in "xy"]).graph
    assert (consuming(graph, {}, (0,)) is None) == (size == 2 * TILE)


def test_a_backward_writes_over_what_was_kept_for_it() -> None:
    def backward(kept, weight, ct):
        return [ct * kept, (ct * kept) @ weight]

    def values():
        return [torch.full((3, 3), float(k + 1)) for k in range(3)]

    graph = record(backward, [torch.empty_like(x, device="meta") for x in values()]).graph
    assert consuming(graph, {}, ()) is None
    form = consuming(graph, {}, (0, 1))
    assert form is not None and form.over == (0,)
    kept, weight, ct = values()
    operands = [kept, weight, ct]
    for a, b in zip(form.run(operands, form.over), backward(*values()), strict=True):
        assert torch.equal(a, b)
    assert not operands, "operands are let go"
    assert torch.equal(weight, values()[1]) and torch.equal(ct, values()[2]) and not torch.equal(kept, values()[0])


def adamw_of(p, g, factor, mu, nu, lr, t):
    return torch.ops.fx_feather.adamw(p, g, factor, mu, nu, lr, t, 0.9, 0.95, 1e-8, 0.0)


def adamw_operands(seed: int) -> list[torch.Tensor]:
    p, g, mu, nu = torch.rand(4, 40, generator=torch.Generator().manual_seed(seed)).unbind()
    return [p.clone(), g.clone(), FACTOR, mu.clone(), nu.clone(), RATE, STEP]


FACTOR, RATE, STEP = torch.tensor(0.3), torch.tensor(0.1), torch.tensor(2.0)


def traced(fn, *args: torch.Tensor) -> fx.Graph:
    graph = record(fn, [torch.empty_like(x, device="meta") for x in args]).graph
    graph.eliminate_dead_code()
    return graph


def test_calls_of_one_operator_run_at_once() -> None:
    form = together(traced(lambda *xs: list(adamw_of(*xs)[:3]), *adamw_operands(0)))
    assert form is not None and form.over == {0, 1, 3, 4}
    rows = [adamw_operands(k) for k in range(3)]
    rows[2][2] = torch.tensor(0.7)  # numbers of its own
    want = [adamw_of(*(x.clone() for x in row))[:3] for row in rows]
    for row, got, expected in zip(rows, form.run(rows), want, strict=True):
        for a, b, k in zip(got, expected, (0, 3, 4), strict=True):
            assert torch.equal(a, b) and a is row[k]


def test_sums_of_parts_run_at_once() -> None:
    def second_half(x):
        raise AssertionError("a copy")

    second_half.view = lambda x: x.narrow(0, 2, 2)
    graph = traced(lambda x, f: [torch.ops.fx_feather.sum_squares(x.clone(), f)], torch.ones(4, 3), torch.tensor(1.0))
    next(n for n in graph.nodes if n.op == "call_function").target = second_half
    form = together(graph)
    assert form is not None and not form.over
    xs = [torch.arange(12.0).view(4, 3) + k for k in range(3)]
    got = form.run([[x, torch.tensor(2.0)] for x in xs])
    assert [y.item() for (y,) in got] == [4 * (x[2:] ** 2).sum().item() for x in xs]


OTHERS = {
    "an operand that stands for two": lambda p, g, *rest: list(adamw_of(p, p, *rest)[:3]),
    "an operator before": lambda p, g, *rest: list(adamw_of(p, g * 2, *rest)[:3]),
    "an operator after": lambda *xs: [adamw_of(*xs)[0] * 2],
    "an operand as a result": lambda p, *xs: [adamw_of(p, *xs)[0], p],
    "an operator of another kind": lambda p, *xs: [p * 2],
    "a constant": lambda p, g, factor, *rest: list(adamw_of(p, g, torch.ones(()), *rest)[:3]),
    "no operator": lambda p, *xs: [p],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_run_call_by_call(name: str) -> None:
    graph = traced(OTHERS[name], *adamw_operands(0))
    assert together(graph) is None
    form = overwriting(graph)
    assert form is None or name != "an operand that stands for two" or 0 not in form.over


def test_operators_are_called_by_names_of_their_own() -> None:
    """Looked up one by one as attributes they take longer."""
    run = build(traced(lambda x: [(x.t() @ x).relu()], torch.ones(3, 3)), {}, "eager")
    assert "ops" not in run.boxed.__code__.co_names  # type: ignore[attr-defined]
