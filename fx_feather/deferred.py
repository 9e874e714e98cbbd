"""Deferred functions: those whose collectives are started at once and awaited where their results are needed."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import fx

from .backend import taking_list
from .reuse import made_inside, reuse


@dataclasses.dataclass
class Pending:
    """A call under way: its collectives are started, and `finish` waits for them and gives the results.

    Attributes:
        finish: gives the results of the call.
        outs: numbers of the values that they are.
    """

    finish: Callable[[], list[torch.Tensor]]
    outs: tuple[int, ...]


def deferred(
    graph: fx.Graph, constants: dict[str, torch.Tensor]
) -> Callable[..., Callable[[], list[torch.Tensor]]] | None:
    """A function in two parts: what comes before its collectives and their start, and all that follows.

    Keeps results bit for bit: the same operators run on the same values.

    Args:
        graph: of a function that `can_wait`: operators of torch, and Python functions in the place of collectives,
            which say by `start` how they are begun without waiting.
        constants: tensors that the graph names.

    Returns:
        None if there is nothing to wait for, as in a group of one rank.
    """
    starts = [n for n in graph.nodes if n.op == "call_function" and hasattr(n.target, "start")]
    late: set[fx.Node] = set()
    for n in graph.nodes:
        if any(a in late or a in starts for a in n.all_input_nodes) and n.op != "output":
            late.add(n)
    if not starts:
        return None
    outs = list(graph.output_node().args[0])
    first, second = fx.Graph(), fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for n in graph.nodes:
        if n.op != "output" and n not in late:
            env[n] = first.node_copy(n, env.__getitem__)
            if n in starts:
                env[n].target = n.target.start
    # What is being sent must not be written over meanwhile, so it is handed on too. What came in is not written to
    # here, nor by other functions while a collective holds it (`held_alone`).
    made = made_inside(graph)
    taken = {a for n in late for a in n.all_input_nodes if a not in late} | {o for o in outs if o not in late}
    sent = {a for n in starts if getattr(n.target.start, "reads", True) for a in n.all_input_nodes if a in made}
    handed = [n for n in env if n in taken or n in sent]
    first.output([env[n] for n in handed])
    inner: dict[fx.Node, fx.Node] = {}
    for i, n in enumerate(handed):
        inner[n] = second.placeholder(f"x{i}")
        inner[n].meta = dict(n.meta)
    for n in handed:
        if n in starts:
            inner[n] = second.call_function(_wait, (inner[n],))
            inner[n].meta = dict(n.meta)
    for n in graph.nodes:
        if n in late:
            inner[n] = second.node_copy(n, inner.__getitem__)
    second.output([inner[o] for o in outs])
    for part in (first, second):
        reuse(part)
    named = {n.target: constants[n.target] for n in first.nodes if n.op == "get_attr"}
    begin = taking_list(named, first)
    end = taking_list({}, second)

    def run(*xs: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        handed_on = begin(*xs)
        return lambda: end.boxed(handed_on)  # type: ignore[attr-defined]

    return run


def _writes(graph: fx.Graph) -> bool:
    return any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in graph.nodes)


def started(graph: fx.Graph) -> None:
    """Edits a graph in place: each collective is started where it stands, and awaited where it is first used.

    A graph that writes over memory stays as it is: what is being sent might be written over.
    """
    if _writes(graph):
        return
    index = {n: k for k, n in enumerate(graph.nodes)}
    for n in list(graph.nodes):
        start = getattr(n.target, "start", None)
        if start is None or not n.users:
            continue
        first = min(n.users, key=index.__getitem__)
        with graph.inserting_before(first):
            # What is being sent must not be written over meanwhile: to wait is to use it once more.
            wait = graph.call_function(_wait, (n, *(n.all_input_nodes if getattr(start, "reads", True) else ())))
        wait.meta = dict(n.meta)
        index[wait] = index[first]
        n.replace_all_uses_with(wait, delete_user_cb=lambda user, wait=wait: user is not wait)
        n.target = start


def _wait(under_way: Callable[[], torch.Tensor], *sent: torch.Tensor) -> torch.Tensor:
    return under_way()


_wait.fresh = True  # type: ignore[attr-defined]


def values(env: dict[int, "torch.Tensor | Pending"], numbers: Sequence[int]) -> list[torch.Tensor]:
    """The values of some numbers, after waiting for those that are under way."""
    found = [env[v] for v in numbers]
    for k, v in enumerate(numbers):
        x = found[k]
        if isinstance(x, Pending):
            # Others among the arguments may be of the same call, which is then done.
            now = env[v]
            if now is x:
                for o, made in zip(x.outs, x.finish(), strict=True):
                    if o in env:
                        env[o] = made
            found[k] = env[v]
    return found  # type: ignore[return-value]
