"""Collectives in a traced program: which nodes stand for them, forward and backward, and what they cost."""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fx_feather import collectives as C
from fx_feather.collectives import primitive
from fx_feather.mesh import Mesh

TP = ("tp",)


def nodes(function, shape=(4, 8), dtype=torch.float32) -> list[str]:
    """The collectives and casts of the joint graph of `function`, in order."""
    with FakeTensorMode():
        x = torch.empty(shape, dtype=dtype)

        def joint(x):
            out, pull = torch.func.vjp(function, x)
            return out, pull(torch.ones_like(out))

        graph = make_fx(joint)(x).graph
    out = []
    for node in graph.nodes:
        if node.target is torch.ops.aten._to_copy.default:
            out.append(f"to {node.kwargs['dtype']}".replace("torch.", ""))
        elif "fx_feather" in str(node.target):
            out.append(f"{node.target.__name__.split('.')[0]}{node.args[1:]}")
    return out


CASES = {
    "psum": (lambda x: C.psum(x, TP, 2), ["psum('tp', 2)"]),
    "pvary": (lambda x: C.pvary(x, TP, 2), ["psum('tp', 2)"]),
    "unvary": (lambda x: C.unvary(x, TP, 2), ["keep_first('tp', 2)"]),
    "keep_first": (lambda x: C.keep_first(x, TP, 2), ["keep_first('tp', 2)"]),
    "keep_first_replicated": (lambda x: C.keep_first_replicated(x, TP, 2), ["keep_first('tp', 2)"] * 2),
    "all_gather": (lambda x: C.all_gather(x, TP, 2, -1), ["all_gather('tp', 2, 1)", "reduce_scatter('tp', 2, 1)"]),
    "all_gather_invariant": (
        lambda x: C.all_gather_invariant(x, TP, 2, 0),
        ["all_gather('tp', 2, 0)", "pscatter('tp', 2, 0)"],
    ),
    "reduce_scatter": (
        lambda x: C.reduce_scatter(x, ("dp", "tp"), 4, 0),
        ["reduce_scatter('dp,tp', 4, 0)", "all_gather('dp,tp', 4, 0)"],
    ),
    "pscatter": (lambda x: C.pscatter(x, TP, 2, 1), ["pscatter('tp', 2, 1)", "all_gather('tp', 2, 1)"]),
    "pscatter_replicated": (lambda x: C.pscatter_replicated(x, TP, 2, 1), ["pscatter('tp', 2, 1)", "pad('tp', 2, 1)"]),
    "pad": (lambda x: C.pad(x, TP, 2, 1), ["pad('tp', 2, 1)", "pscatter('tp', 2, 1)"]),
    "all_to_all": (lambda x: C.all_to_all(x, TP, 2, 1, 0), ["all_to_all('tp', 2, 1, 0)", "all_to_all('tp', 2, 0, 1)"]),
    "ppermute": (
        lambda x: C.ppermute(x, TP, 3, [(0, 1), (1, 2)]),
        ["ppermute('tp', 3, [0, 1, 1, 2])", "ppermute('tp', 3, [1, 0, 2, 1])"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_joint_graph_holds_the_collective_and_its_dual(name) -> None:
    function, expected = CASES[name]
    assert nodes(function) == expected


def test_every_differentiable_collective_has_a_case() -> None:
    assert set(CASES) == {c.name for c in C.COLLECTIVES.values() if c.vjp}


def test_cotangent_is_reduced_in_grad_dtype() -> None:
    bf16 = torch.bfloat16
    expected = ["to float32", "psum('tp', 2)", "to bfloat16"]
    assert nodes(lambda x: C.pvary(x, TP, 2, grad_dtype=torch.float32), dtype=bf16) == expected
    expected = ["all_gather('tp', 2, 0)", "to float32", "reduce_scatter('tp', 2, 0)", "to bfloat16"]
    assert nodes(lambda x: C.all_gather(x, TP, 2, 0, grad_dtype=torch.float32), dtype=bf16) == expected


def test_cotangent_that_is_not_reduced_is_not_cast() -> None:
    f = torch.float32
    assert nodes(lambda x: C.psum(x, TP, 2, grad_dtype=f), dtype=torch.bfloat16) == ["psum('tp', 2)"]
    assert nodes(lambda x: C.reduce_scatter(x, TP, 2, 0, grad_dtype=f), dtype=torch.bfloat16) == [
        "reduce_scatter('tp', 2, 0)",
        "all_gather('tp', 2, 0)",
    ]


def test_unused_result_sends_nothing_back() -> None:
    assert nodes(lambda x: x.sum() + 0 * C.pvary(x, TP, 2).detach().sum()) == []


def test_axis_index_is_a_node() -> None:
    assert nodes(lambda x: x * C.axis_index(TP, 2)) == ["axis_index(2,)"]


def test_executor_is_called_with_names_and_gives_way_afterwards() -> None:
    calls = []

    def run(collective, x, axes, n, static):
        calls.append((collective.name, axes, n, static))
        return C.lockstep(collective.name, [x] * n, Mesh(dp=2, tp=2), axes, **static)[0]

    x = torch.ones(4, 4)
    with C.executed_by(run):
        C.all_gather_invariant(x.t(), ("dp", "tp"), 4, -2)
        # The identities send nothing, so nobody is asked.
        C.pvary(x, TP, 2)
    assert calls == [("all_gather", ("dp", "tp"), 4, {"dim": 0})]
    assert primitive.executor is None


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("psum", 1500),
        ("pmax", 1500),
        ("all_gather", 3000),
        ("all_gather_invariant", 3000),
        ("reduce_scatter", 750),
        ("all_to_all", 750),
        ("ppermute", 1000),
        *((name, 0) for name in ("pvary", "unvary", "keep_first", "keep_first_replicated", "axis_index")),
        *((name, 0) for name in ("pscatter", "pscatter_replicated", "pad")),
    ],
)
def test_bytes_sent_by_a_rank(name, sent) -> None:
    assert C.COLLECTIVES[name].bytes(1000, 4) == sent
    assert C.COLLECTIVES[name].bytes(1000, 1) == 0


@pytest.mark.parametrize("name", C.COLLECTIVES)
def test_docstring_opens_with_type_and_summary(name) -> None:
    collective, function = C.COLLECTIVES[name], getattr(C, name)
    first = inspect.getdoc(function).splitlines()[0]
    if name != "all_to_all":  # its type names the dims: V on concat_dim -> V on split_dim
        assert first.startswith(collective.type + ":")
    assert "NCCL" in first
    assert "NCCL" in collective.summary
