"""Overlap: gathers of parameters are issued before the computation that precedes their use, as far as memory allows.

Keeps results bit for bit: the same calls run on the same values, those that don't depend on each other in another
order. A runtime starts a communicating call where it stands and waits for it at the first use of a result, so that
what lies between runs meanwhile. Reductions need no pass for that: nobody uses them before the end of the backward.
"""

from ..program import Func, Section


def overlap(section: Section, memory: int | None = None) -> None:
    """Edits a section in place.

    Args:
        section: the calls, before any is told what to free.
        memory: bytes of gathered values that may wait for their use beside those in use; by default those of the
            largest gather, so that one block is gathered ahead.
    """
    given = set(section.inputs)
    moves = {f for f in dict.fromkeys(i.func for i in section.instrs) if is_gather(f)}
    gathers = [k for k, i in enumerate(section.instrs) if i.func in moves and given.issuperset(i.ins[0])]
    if len(gathers) < 2:
        return
    size = {f: _bytes(f) for f in moves}
    sizes = {k: size[section.instrs[k].func] * len(section.instrs[k].ins) for k in gathers}
    budget = max(sizes.values()) if memory is None else memory
    used: dict[int, int] = {}
    for j, i in enumerate(section.instrs):
        for v in (v for row in i.ins for v in row):
            used.setdefault(v, j)
    end = len(section.instrs)
    first_use = {k: min(used.get(v, end) for outs in section.instrs[k].outs for v in outs) for k in gathers}
    # Where each gather is issued: right before the use of an earlier one, the earliest that the budget allows.
    place = {gathers[0]: gathers[0]}
    for n, k in enumerate(gathers[1:], 1):
        ahead, at = sizes[k], k
        for before in reversed(gathers[:n]):
            if ahead > budget or first_use[before] > at:
                break
            at = first_use[before]
            ahead += sizes[before]
        place[k] = at
    order = sorted(range(end), key=lambda k: (place.get(k, k), k not in place, k))
    section.instrs = [section.instrs[k] for k in order]


def is_gather(func: Func) -> bool:
    """Whether a function gathers parameters: it communicates, only moves values, and is no unit of the model."""
    if func.name.endswith((".forward", ".backward")):
        return False
    names = {c.name for c in func.collectives()}
    return bool(names) and names <= {"all_gather", "all_gather_invariant"}


def _bytes(func: Func) -> int:
    results = [n.meta["val"] for n in func.graph.output_node().args[0]]
    return sum(x.numel() * x.element_size() for x in results)
