"""An operator writes over an operand only where nobody can see it: the results, and what came in, keep their bits."""

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fx_feather.reuse import held_alone, reuse

aten = torch.ops.aten


def graph_of(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args).graph


def run(graph, args):
    return fx.GraphModule({}, graph)(*[a.clone() for a in args])


def in_place(graph):
    return [n.target.overloadpacket.__name__ for n in graph.nodes if n.op == "call_function" and is_mutable(n)]


def is_mutable(n):
    return isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable


def check(fn, *args):
    """Runs a function as traced and with its memory reused; the operators that became in-place."""
    graph = graph_of(fn, *args)
    expected, before = run(graph, args), [a.clone() for a in args]
    reuse(graph)
    graph.lint()
    module, given = fx.GraphModule({}, graph), [a.clone() for a in args]
    got = module(*given)
    for a, b in zip((*got, *given), (*expected, *before), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    return in_place(graph)


X, Y = torch.randn(4, 6), torch.randn(4, 6)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: [((x * y) + x).exp()], ["add_", "exp_"]),
        (lambda x, y: [x + (x * y)], ["add_"]),  # a sum commutes
        (lambda x, y: [x - (x * y)], []),  # a difference does not
        (lambda x, y: [x.exp()], []),  # what came in is not written to
        (lambda x, y: [x.t().exp(), x.view(24).exp()], []),
        (lambda x, y: (lambda a: [a, a.exp()])(x * y), []),  # a result
        (lambda x, y: (lambda a: [a.exp(), a.sin()])(x * y), ["sin_"]),  # used up by the later one
        (lambda x, y: (lambda a: [a * a])(x * y), []),  # both operands
        (lambda x, y: (lambda a: [a.t() @ a.exp()])(x * y), []),  # a view is read later
        (lambda x, y: (lambda a: [a.view(24).exp(), a[0] + 1])(x * y), []),
        (lambda x, y: (lambda a: [a[:2].exp()])(x * y), []),  # a part would keep the whole alive
        (lambda x, y: (lambda a: [a.split(2)[0] + a.exp()[:2], a.unbind(1)[3]])(x * y), []),  # views, by number
        (lambda x, y: (lambda a, p: [a.exp(), p[0] * 2])(*(lambda a: (a, a.split(2)))(x * y)), []),
        (lambda x, y: [(x * y)[:1] + x], []),  # another shape
        (lambda x, y: [(x * y) > 0], []),  # another dtype
        (lambda x, y: [torch.zeros(4, 6).scatter_add(1, (x > 0).long(), y)], ["scatter_add_"]),
        (lambda x, y: [((x @ y.t()) @ y).view(24).mul(2.0)], ["mul_"]),  # a view of all of it
    ],
)
def test_only_what_nobody_needs_is_written_over(fn, expected):
    assert check(fn, X, Y) == expected


OPS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "exp": lambda a, b: (a / 8).exp(),
    "scale": lambda a, b: a * 0.5,
    "turn": lambda a, b: a.t().contiguous().t() + b,
    "view": lambda a, b: a.reshape(24).view(4, 6),
    "rows": lambda a, b: a[:2].repeat(2, 1) * b,
    "parts": lambda a, b: (lambda p, c: torch.cat([p[1], c[:2]]))(a.split(2), a + b),
    "half": lambda a, b: torch.cat([a[:2], b[2:]]),
    "matmul": lambda a, b: torch.tanh(a @ b.t()) @ b,
    "norm": lambda a, b: a * (b.pow(2).mean(-1, keepdim=True) + 1).rsqrt(),
    "softmax": lambda a, b: a.softmax(-1),
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
def test_any_chain_keeps_its_bits(steps, results):
    def fn(x, y):
        values = [x, y]
        for name, i, j in steps:
            values.append(OPS[name](values[i % len(values)], values[j % len(values)]))
        return [values[-1 - r % len(values)] + 0 for r in results] + [values[-1].clone()]

    check(fn, X, Y)


@given(
    st.lists(st.tuples(st.sampled_from(list(OPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    st.sets(st.integers(0, 1)),
)
def test_only_operands_that_are_used_up_are_written_over(steps, used_up):
    def fn(x, y):
        values = [x, y]
        for name, i, j in steps:
            values.append(OPS[name](values[i % len(values)], values[j % len(values)]))
        return [values[-1], values[len(values) // 2] + 0]

    graph = graph_of(fn, X, Y)
    expected = run(graph, (X, Y))
    operands = [n for n in graph.nodes if n.op == "placeholder"]
    written = reuse(graph, {operands[k] for k in used_up})
    graph.lint()
    given = [X.clone(), Y.clone()]
    for a, b in zip(fx.GraphModule({}, graph)(*given), expected, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    changed = {k for k, (a, b) in enumerate(zip(given, (X, Y), strict=True)) if not torch.equal(a, b)}
    assert changed <= {k for k, n in enumerate(operands) if n in written} <= used_up


def test_an_operand_that_is_used_up_is_written_over():
    graph = graph_of(lambda kept, ct: [ct * kept.exp(), kept.sum()], X, Y)
    kept, ct = (n for n in graph.nodes if n.op == "placeholder")
    assert reuse(graph, {kept, ct}) == {ct}  # what is read again later stays


def test_who_holds_a_tensor_alone():
    """It, what it is a view of, and its memory."""
    with torch.no_grad():
        assert held_alone([torch.ones(4)], 0)
        assert held_alone([torch.ones(4).view(2, 2)], 0)
        assert held_alone([torch.ones(2, 6).view(3, 4).t()[:2]], 0)
        # Its memory is somebody's who may be out of sight.
        assert not held_alone([torch.from_numpy(numpy.ones(4))], 0)
        assert not held_alone([torch.frombuffer(bytearray(16), dtype=torch.float32)], 0)
        xs = [torch.ones(4)]
        others = {
            "a name": lambda base: base,
            "a view": lambda base: base[:1],
            "an array": lambda base: base.numpy(),
            "a detached tensor": lambda base: base.detach(),
        }
        for what, way in others.items():
            for make in (lambda base: base, lambda base: base.view(2, 2), lambda base: base.view(2, 2).t()):
                base = torch.ones(4)
                xs, other = [make(base)], way(base)
                del base
                assert not held_alone(xs, 0), what
                del other
                # PyTorch doesn't know when the last array on its memory goes.
                assert held_alone(xs, 0) == (what != "an array"), what


def _reduction():
    def run(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    run.in_place = lambda x: x.mul_(2)
    run.fresh = True
    return run


@pytest.mark.parametrize("read_again", [False, True])
def test_a_reduction_writes_over_a_buffer_of_its_own(read_again: bool) -> None:
    run, graph = _reduction(), fx.Graph()
    a, b = (graph.placeholder(name) for name in "ab")
    made = [torch.empty(4, device="meta"), torch.empty(8, device="meta")]
    a.meta["val"] = b.meta["val"] = made[0]
    flat = graph.call_function(torch.ops.aten.cat.default, ([a, b],))
    total = graph.call_function(run, (flat,))
    also = graph.call_function(torch.ops.aten.add.Tensor, (total, flat if read_again else total))
    flat.meta["val"] = total.meta["val"] = also.meta["val"] = made[1]
    graph.output([also])
    reuse(graph)
    assert (total.target is run) == read_again
    # What the reduction gave is its own too.
    assert (also.target is torch.ops.aten.add_.Tensor) == read_again
    x, y = torch.ones(4), torch.zeros(4)
    (got,) = fx.GraphModule({}, graph).forward(x, y)
    assert torch.equal(got, torch.cat([x, y]) * (3 if read_again else 4))
    assert torch.equal(x, torch.ones(4))
