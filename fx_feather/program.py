"""The program of one rank: a list of calls of FX graphs over numbered values, whose collectives name mesh axes."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .collectives import COLLECTIVES, Collective
from .mesh import Mesh
from .spec import Type

#: The collective that an operator stands for; of those that share one, the first, which gave the operator its name.
BY_OP: dict[Any, Collective] = {c.op: c for c in reversed(COLLECTIVES.values()) if c.op is not None}


@dataclasses.dataclass(eq=False)
class Func:
    """One local graph: its placeholders are local tensors, its output is a list of nodes.

    Equal functions of a program are one object, so that whoever compiles them does so once. `computes` says that it is
    a unit of the model, forward or backward, and no conversion between units.
    """

    name: str
    graph: fx.Graph
    constants: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    computes: bool = False

    def collectives(self) -> Iterator["CollectiveNode"]:
        """The collectives of this graph, in order, local data movements left out."""
        for n in self.graph.nodes:
            c = BY_OP.get(n.target)
            if c is not None and c.communicates:
                x = n.args[0].meta["val"]
                yield CollectiveNode(
                    c.name, tuple(n.args[1].split(",")), n.args[2], x.numel() * x.element_size(), x.dtype
                )

    def can_wait(self) -> bool:
        """Whether its collectives can be started together, and awaited later.

        None may take what another gave, and no memory may be written over: who reads it when must then stay as it is.
        """
        late: set[fx.Node] = set()
        found = False
        for n in self.graph.nodes:
            schema = getattr(n.target, "_schema", None)
            if schema is not None and schema.is_mutable:
                return False
            communicates = n.target in BY_OP and BY_OP[n.target].communicates
            if communicates and any(a in late for a in n.all_input_nodes):
                return False
            found = found or communicates
            if communicates or any(a in late for a in n.all_input_nodes):
                late.add(n)
        return found

    def text(self, lines: bool = False) -> str:
        """The graph as text that is the same on every rank that runs the same program; with `lines`, the user's too."""
        number = {n: f"%{i}" for i, n in enumerate(self.graph.nodes)}

        def show(x: Any) -> str:
            if isinstance(x, fx.Node):
                return number[x]
            if isinstance(x, (list, tuple)):
                return f"[{', '.join(map(show, x))}]"
            return repr(x)

        shown, before = [], None
        for n in self.graph.nodes:
            if n.op == "get_attr":
                shown.append(f"  {number[n]} = {constant_text(self.constants[n.target])}")
                continue
            if lines and (line := n.meta.get("line", before)) != before:
                shown.append(f"  # {line}")
                before = line
            args = [show(a) for a in n.args] + [f"{k}={show(v)}" for k, v in n.kwargs.items()]
            shown.append(
                f"  {number[n]}{_shape(n)} = {n.op if n.op != 'call_function' else n.target}({', '.join(args)})"
            )
        return "\n".join([f"{self.name}:", *shown])


def constant_text(x: torch.Tensor) -> str:
    """A constant as text: its type and a hash of its bytes, so that two of other values differ.

    >>> constant_text(torch.ones(2)) == constant_text(torch.ones(2)), constant_text(torch.zeros(2))
    (True, 'constant f32[2] sha256 af5570f5a1810b7a')
    """
    own = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not by way of numpy, which lacks some dtypes.
    data = bytes(own.reshape(-1).view(torch.uint8).numpy()) if own.numel() else b""
    return f"constant {Type.whole(x)} sha256 {hashlib.sha256(data).hexdigest()[:16]}"


def _shape(n: fx.Node) -> str:
    val = n.meta.get("val")
    return f": {Type.whole(val)}" if isinstance(val, torch.Tensor) else ""


@dataclasses.dataclass(frozen=True)
class CollectiveNode:
    """One collective of a program: its name, axes, ranks of a group, and what each rank puts in."""

    name: str
    axes: tuple[str, ...]
    ranks: int
    operand_bytes: int
    dtype: torch.dtype

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends in a ring."""
        return COLLECTIVES[self.name].bytes(self.operand_bytes, self.ranks)

    def __repr__(self) -> str:
        return f"{self.name}@{','.join(self.axes)} {self.operand_bytes} B {str(self.dtype).removeprefix('torch.')}"


@dataclasses.dataclass(frozen=True)
class Instr:
    """A call of a function for one or more rows of values that are alike.

    Attributes:
        func: the function.
        ins, outs: numbers of the values that each row takes and makes.
        free: after each row, the values that nobody needs any more.
    """

    func: Func
    ins: tuple[tuple[int, ...], ...]
    outs: tuple[tuple[int, ...], ...]
    free: tuple[tuple[int, ...], ...] = ()

    def used_up(self) -> list[int]:
        """The places among the operands of values that nobody needs after any row."""
        return [
            k
            for k in range(len(self.ins[0]))
            if all(ins[k] in free and ins.count(ins[k]) == 1 for ins, free in zip(self.ins, self.free, strict=True))
        ]


@dataclasses.dataclass
class Section:
    """A stretch of a program: values that come in, the calls, values that go out."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    instrs: list[Instr]
    types: dict[int, Type]

    def collectives(self) -> list[CollectiveNode]:
        """All collectives of one run of this section, in order."""
        return [c for i in self.instrs for _ in i.ins for c in i.func.collectives()]

    def in_types(self) -> list[Type]:
        return [self.types[v] for v in self.inputs]

    def out_types(self) -> list[Type]:
        return [self.types[v] for v in self.outputs]

    def donate(self, kept: Sequence[int] = ()) -> None:
        """Marks for every call the values that are not needed after it, so that their memory is free at once.

        Inputs are freed too: whoever runs the section hands them over. `kept` names the values that stay.
        """
        live = {*self.outputs, *kept}
        for k in range(len(self.instrs) - 1, -1, -1):
            i, free = self.instrs[k], []
            for ins, outs in zip(reversed(i.ins), reversed(i.outs), strict=True):
                dead = [v for v in (*ins, *outs) if v not in live]
                live.update(dead)
                free.append(tuple(dead) if len(dead) < 2 else tuple(dict.fromkeys(dead)))
            self.instrs[k] = dataclasses.replace(i, free=tuple(reversed(free)))

    def text(self) -> str:
        """The calls with the types of their values."""
        lines = [f"{self.name}({', '.join(f'%{v}: {self.types[v].show(True)}' for v in self.inputs)})"]
        for i in self.instrs:
            for ins, outs in zip(i.ins, i.outs, strict=True):
                made = ", ".join(f"%{v}" for v in outs)
                lines.append(f"  {made} = {i.func.name}({', '.join(f'%{v}' for v in ins)})")
        lines.append(f"  return {', '.join(f'%{v}' for v in self.outputs)}")
        return "\n".join(lines)


@dataclasses.dataclass
class Program:
    """What one rank runs: sections of calls. It names mesh axes only, so it can be run, simulated or priced."""

    mesh: Mesh
    sections: dict[str, Section]
    #: What random numbers are drawn by; None where there are none.
    seed: int | None = None

    def funcs(self) -> list[Func]:
        """Every distinct function, in order of first use."""
        return list(dict.fromkeys(i.func for s in self.sections.values() for i in s.instrs))

    def collectives(self, section: str | None = None) -> list[CollectiveNode]:
        """The collectives of one run of each section, or of one section."""
        chosen = self.sections.values() if section is None else [self.sections[section]]
        return [c for s in chosen for c in s.collectives()]

    def text(self, lines: bool = True) -> str:
        """The whole program: sections, with split, states and dim names of each value, then each distinct function.

        Args:
            lines: put the line of the user's that operators come from before them. Without, the text is equal for ranks
                that run the same program, wherever their files lie.
        """
        head = repr(self.mesh) if self.seed is None else f"{self.mesh!r}, random numbers of seed {self.seed}"
        return "\n\n".join([head, *(s.text() for s in self.sections.values()), *(f.text(lines) for f in self.funcs())])

    def fingerprint(self) -> str:
        """A hash of the text, compared between ranks before the first run."""
        return hashlib.sha256(self.text(lines=False).encode()).hexdigest()
