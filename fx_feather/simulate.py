"""Simulation: every rank of a mesh in this one process, in lockstep, without any process group."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .collectives import Collective, lockstep
from .mesh import Mesh
from .program import BY_OP, Func, Section

Ranks = list[torch.Tensor]


class Simulator:
    """Runs sections of a program for all ranks at once: each value is a list with one tensor a rank."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._plain: dict[Func, Callable[..., list[torch.Tensor]] | None] = {}

    def run(self, section: Section, inputs: Sequence[Ranks]) -> list[Ranks]:
        """The outputs of a section on all ranks."""
        env = dict(zip(section.inputs, inputs, strict=True))
        for i in section.instrs:
            for ins, outs, free in zip(i.ins, i.outs, i.free, strict=True):
                env.update(zip(outs, self.call(i.func, [env[v] for v in ins]), strict=True))
                for v in free:
                    del env[v]
        return [env[v] for v in section.outputs]

    def item(self, x: Ranks) -> Any:
        """A number that is the same on every rank."""
        return x[0].item()

    def numbers(self, x: Ranks) -> list[Any]:
        """Numbers that are the same on every rank."""
        numbers: list[Any] = x[0].tolist()
        return numbers

    def scalar(self, x: float) -> Ranks:
        """A number that each rank brings, float64[]."""
        return [torch.tensor(x, dtype=torch.float64)] * self.mesh.size

    def check_numbers(self, call: str, numbers: Any, axes: tuple[str, ...]) -> None:
        """Nothing: all ranks are at one step, that of the one state."""

    def any(self, flags: Sequence[Ranks]) -> list[bool]:
        """For each flag whether it is set on some rank."""
        return [any(bool(x) for x in ranks) for ranks in flags]

    def call(self, func: Func, args: Sequence[Ranks]) -> list[Ranks]:
        """One function on all ranks: rank by rank if it has no collective, else node by node."""
        if func not in self._plain:
            alone = not any(n.target in BY_OP for n in func.graph.nodes)
            self._plain[func] = fx.GraphModule(func.constants, func.graph).forward if alone else None
        plain = self._plain[func]
        if plain is not None:
            per_rank = [plain(*(a[r] for a in args)) for r in range(self.mesh.size)]
            return [list(values) for values in zip(*per_rank, strict=True)]
        return self._lockstep(func, args)

    def _lockstep(self, func: Func, args: Sequence[Ranks]) -> list[Ranks]:
        env: dict[fx.Node, list[Any]] = {}
        given = iter(args)
        ranks = range(self.mesh.size)
        for n in func.graph.nodes:
            match n.op:
                case "placeholder":
                    env[n] = list(next(given))
                case "get_attr":
                    env[n] = [func.constants[n.target]] * self.mesh.size
                case "output":
                    return [env[o] for o in n.args[0]]
                case _ if n.target in BY_OP:
                    env[n] = self._collective(BY_OP[n.target], n, env)
                case _:
                    env[n] = [
                        n.target(
                            *fx.node.map_arg(n.args, lambda x, r=r: env[x][r]),
                            **fx.node.map_arg(n.kwargs, lambda x, r=r: env[x][r]),
                        )
                        for r in ranks
                    ]
        raise AssertionError("a graph ends with its output")

    def _collective(self, c: Collective, n: fx.Node, env: dict[fx.Node, list[Any]]) -> Ranks:
        at = 1 if c.before else 0
        axes = tuple(n.args[at].split(","))
        static = {**dict(zip(c.static, n.args[at + 2 :], strict=False)), **n.kwargs}
        if not c.before:
            return [torch.tensor(self.mesh.index(r, axes), device=static.get("device")) for r in range(self.mesh.size)]
        # References may hand one tensor to several ranks; a program never writes in place to what a collective gave.
        return [x.contiguous() for x in lockstep(c.name, env[n.args[0]], self.mesh, axes, **static)]
