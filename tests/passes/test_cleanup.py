"""Cleanup takes away operators that compute nothing, and leaves each value as it was, in its bits and its strides."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fx_feather.passes.cleanup import cleanup
from fx_feather.record import record


@st.composite
def chains(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[str, object]]]:
    """A tensor, perhaps not in the order of its dims, and views to take of it one after another."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    x = torch.randn(shape).permute(draw(st.permutations(range(len(shape)))))
    views: list[tuple[str, object]] = []
    y = x
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(
            st.sampled_from(["permute", "transpose", "t", "unsqueeze", "squeeze", "view", "expand", "div", "pow"])
        )
        if kind == "permute":
            arg: object = draw(st.permutations(range(y.ndim)))
        elif kind == "transpose" and y.ndim:
            arg = (draw(st.integers(0, y.ndim - 1)), draw(st.integers(-y.ndim, -1)))
        elif kind == "t" and y.ndim == 2:
            arg = None
        elif kind == "unsqueeze" and y.ndim < 6:
            arg = draw(st.integers(0, y.ndim))
        elif kind == "squeeze" and y.ndim:
            arg = draw(st.integers(0, y.ndim - 1))
        elif kind == "view" and y.is_contiguous():
            arg = draw(st.sampled_from([[-1], [*y.shape], [1, *y.shape], [y.numel(), 1]]))
        elif kind == "expand" and 1 in y.shape:
            arg = [n if n > 1 else 2 for n in y.shape]
        elif kind in ("div", "pow"):
            arg = 1 if kind == "pow" else 3
        else:
            continue
        y = apply(y, kind, arg)
        views.append((kind, arg))
    return x, views


def apply(y: torch.Tensor, kind: str, arg: object) -> torch.Tensor:
    if kind == "t":
        return y.t()
    return getattr(y, kind)(*arg) if isinstance(arg, tuple) else getattr(y, kind)(arg)


@given(chains())
def test_chains_of_views_become_short_and_stay_what_they_are(
    case: tuple[torch.Tensor, list[tuple[str, object]]],
) -> None:
    x, views = case

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        seen = [x * 2]  # in the order of `x`, whatever that is
        for kind, arg in views:
            seen.append(apply(seen[-1], kind, arg))
        return [seen[-1], seen[len(seen) // 2] + 1]

    graph = record(fn, [torch.empty_strided(x.shape, x.stride(), device="meta")]).graph
    before = sum(n.op == "call_function" for n in graph.nodes)
    want = fx.GraphModule({}, graph).forward(x)
    cleanup(graph)
    graph.lint()
    assert sum(n.op == "call_function" for n in graph.nodes) <= before
    for a, b in zip(fx.GraphModule({}, graph).forward(x), want, strict=True):
        # A dim of size 1 has no stride: kernels of one operator differ in what they say of it.
        long = [d for d in range(a.ndim) if a.shape[d] > 1]
        assert torch.equal(a, b) and [a.stride(d) for d in long] == [b.stride(d) for d in long]


def test_what_an_einsum_wraps_around_a_matmul_is_gone() -> None:
    places = [torch.empty(2, 3, 4, device="meta"), torch.empty(4, 2, 5, device="meta")]
    graph = record(lambda x, w: [torch.einsum("bse,ehd->bhsd", x, w)], places).graph
    before = [n.target for n in graph.nodes if n.op == "call_function"]
    cleanup(graph)
    after = [n.target for n in graph.nodes if n.op == "call_function"]
    assert torch.ops.aten.bmm.default in after
    assert len(after) <= len(before) // 2, (before, after)
