"""Interleaving: within a function, what a collective doesn't need comes after it, so that it runs while that one does.

Keeps results bit for bit: the same operators run on the same values, those that don't depend on each other in another
order. Collectives stay in their order, the same on every rank.
"""

from torch import fx

from ..memory import storage, writes
from ..program import BY_OP


def interleave(graph: fx.Graph) -> None:
    """Edits a graph in place: each collective comes as soon as what it needs is there.

    In a backward the gradient of a block's input is what other ranks wait for; those of its weights, which nobody
    waits for, then come while it travels.
    """
    nodes = list(graph.nodes)
    collectives = [n for n in nodes if n.target in BY_OP and BY_OP[n.target].communicates]
    work = [n for n in nodes if n.op not in ("placeholder", "output")]
    if not collectives or len(work) == len(collectives):
        return
    before = _dependencies(nodes)
    index = {n: k for k, n in enumerate(nodes)}
    order = [n for n in nodes if n.op == "placeholder"]
    done = set(order)

    def emit(some: list[fx.Node]) -> None:
        new = [n for n in sorted(some, key=index.__getitem__) if n not in done]
        order.extend(new)
        done.update(new)

    at = 0
    for c in collectives:
        needed, stack = set(), [c]
        while stack:
            n = stack.pop()
            if n not in needed and n not in done:
                needed.add(n)
                stack.extend(before[n])
        emit([n for n in needed if n is not c])
        emit([c])
        emit(nodes[at : index[c]])
        at = index[c]
    emit([n for n in nodes[at:] if n.op != "output"])
    last = order[0]
    for n in order[1:]:
        last.append(n)
        last = n


def _dependencies(nodes: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """What has to come before each node: its operands, and where memory is written, whoever read it before or wrote."""
    writer: dict[int | None, fx.Node] = {}
    readers: dict[int | None, set[fx.Node]] = {}
    before: dict[fx.Node, set[fx.Node]] = {}
    for n in nodes:
        before[n] = set(n.all_input_nodes)
        written = writes(n)
        for memory in {storage(a) for a in n.all_input_nodes} - {None}:
            if memory in writer:
                before[n].add(writer[memory])
            if memory in written:
                before[n] |= readers.get(memory, set())
            readers.setdefault(memory, set()).add(n)
        for memory in written:
            writer[memory] = n
            readers[memory] = {n}
        before[n].discard(n)
    return before
