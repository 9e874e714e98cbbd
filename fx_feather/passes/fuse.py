"""Fusion: chains of pointwise functions, row by row, become one function, so that what is between them is never stored.

Keeps results bit for bit: the same operators run on the same values, in the same order for each row.
"""

import functools as ft
from collections.abc import Callable

import torch
from torch import fx

from ..program import Func, Instr, Section
from ..tiles import is_pointwise

aten = torch.ops.aten


def computes_pointwise(func: Func, may_sum: bool = False) -> bool:
    """Whether a function is made of pointwise operators; with `may_sum`, results may be sums over all elements."""
    work = [n for n in func.graph.nodes if n.op not in ("placeholder", "output")]
    outs = set(func.graph.output_node().args[0])

    def fine(n: fx.Node) -> bool:
        if may_sum and n.target is aten.sum.default:
            return n in outs and not any(u.op != "output" for u in n.users)
        return n.op == "call_function" and is_pointwise(n)

    return bool(work) and not func.constants and all(fine(n) for n in work)


def fuse(section: Section) -> None:
    """Edits a section in place: a pointwise call takes in the pointwise calls that make its operands.

    A maker is taken in if its rows are those of the call, and nobody needs its results before the call.
    """
    instrs: list[Instr | None] = list(section.instrs)
    merged: dict[tuple[object, ...], Merged] = {}
    # Layers share their functions: each is looked at once.
    pointwise = ft.cache(computes_pointwise)
    for b in range(len(instrs)):
        while (found := _maker(instrs, b, pointwise)) is not None:
            first, second = instrs[found], instrs[b]
            assert first is not None and second is not None
            needed = _needed(section, instrs, found, b)
            links = _links(first, second)
            key = (first.func, second.func, tuple(sorted(links.items())), needed)
            if key not in merged:
                merged[key] = merge(first.func, second.func, links, needed)
            func, ins, outs = merged[key]
            sides = (first, second)
            instrs[b] = Instr(
                func,
                tuple(tuple(sides[s].ins[r][i] for s, i in ins) for r in range(len(first.ins))),
                tuple(tuple(sides[s].outs[r][i] for s, i in outs) for r in range(len(first.ins))),
            )
            instrs[found] = None
    section.instrs = [i for i in instrs if i is not None]


def _maker(instrs: list[Instr | None], b: int, pointwise: Callable[[Func, bool], bool]) -> int | None:
    """A call before `b` that `b` can take in."""
    second = instrs[b]
    if second is None or not pointwise(second.func, True):
        return None
    for a in range(b - 1, -1, -1):
        first = instrs[a]
        if first is None or len(first.ins) != len(second.ins) or not pointwise(first.func, False):
            continue
        if not _links(first, second) or _size(first.func) != _size(second.func):
            continue
        made = {v: r for r, outs in enumerate(first.outs) for v in outs}
        # Nobody may need it in between, and each row of the call takes from its own row only.
        between = any(v in made for i in instrs[a + 1 : b] if i is not None for row in i.ins for v in row)
        crossed = any(made.get(v, r) != r for r, row in enumerate(second.ins) for v in row)
        if not between and not crossed:
            return a
    return None


def _size(func: Func) -> torch.Size:
    return max((n.meta["val"].shape for n in func.graph.nodes if n.op == "placeholder"), key=lambda s: s.numel())


def _links(first: Instr, second: Instr) -> dict[int, int]:
    """Which operand of the second call is which result of the first, if it is the same in every row."""
    links: dict[int, int] = {}
    for j, v in enumerate(second.ins[0]):
        if v in first.outs[0]:
            links[j] = first.outs[0].index(v)
    same = all(ins[j] == outs[k] for ins, outs in zip(second.ins, first.outs, strict=True) for j, k in links.items())
    return links if same else {}


def _needed(section: Section, instrs: list[Instr | None], a: int, b: int) -> tuple[int, ...]:
    """The results of call `a` that others than `b` need."""
    first = instrs[a]
    assert first is not None
    used = set(section.outputs) | {v for i in instrs[b + 1 :] if i is not None for row in i.ins for v in row}
    return tuple(k for k in range(len(first.outs[0])) if any(outs[k] in used for outs in first.outs))


#: A function made of two; and which operand, or result, of which of the two (0 or 1) each of its own is.
Merged = tuple[Func, list[tuple[int, int]], list[tuple[int, int]]]


def merge(first: Func, second: Func, links: dict[int, int], needed: tuple[int, ...]) -> Merged:
    """One graph of two functions, the second of which takes results of the first.

    Args:
        first, second: the functions.
        links: for operands of the second which result of the first each is.
        needed: numbers of the results of the first that others need.
    """
    graph = fx.Graph()
    # One function may be both: each side has its own table of nodes.
    tables: tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]] = ({}, {})
    ins: list[tuple[int, int]] = []
    outs_of_first = list(first.graph.output_node().args[0])
    for side, func in enumerate((first, second)):
        for i, n in enumerate(n for n in func.graph.nodes if n.op == "placeholder"):
            if side == 0 or i not in links:
                p = tables[side][n] = graph.placeholder(f"x{len(ins)}")
                p.meta = dict(n.meta)
                ins.append((side, i))
    for side, func in enumerate((first, second)):
        table = tables[side]
        if side == 1:
            given = [n for n in func.graph.nodes if n.op == "placeholder"]
            table.update({given[j]: tables[0][outs_of_first[k]] for j, k in links.items()})
        for n in func.graph.nodes:
            if n.op == "call_function":
                table[n] = graph.node_copy(n, table.__getitem__)
    results = list(second.graph.output_node().args[0])
    outs = [(0, k) for k in needed] + [(1, k) for k in range(len(results))]
    graph.output([tables[0][outs_of_first[k]] for k in needed] + [tables[1][r] for r in results])
    return Func(f"{first.name}+{second.name}", graph), ins, outs
