"""The plan of a unit: a type for every value, and for every operator what its operands are converted to."""

import dataclasses
import functools as ft
from typing import TypeGuard

import torch
from torch import fx

from ..mesh import Mesh
from ..rules import OpCall, Sharding, Solution
from ..spec import Type
from ..unit import Region, Unit

#: A value of a unit: the node that makes it, and which of its results it is.
Root = tuple[fx.Node, int]


@dataclasses.dataclass(frozen=True)
class Value:
    """A value as the operators after it see it.

    `root` makes it and has a type of its own; `logical` is the type that a `constrain` has given it since. The
    conversion between the two is left to each use, which knows best where it should lead.
    """

    root: Root
    logical: Type


@dataclasses.dataclass
class OpStep:
    """One operator of the local program: what its operands are converted to and what comes out."""

    call: OpCall
    sharding: Sharding
    solution: Solution
    operands: list[tuple[Root, Type]]
    results: tuple[Type, ...]


@dataclasses.dataclass
class RegionStep:
    """Per-rank code written by hand: operands are converted to the types that it takes."""

    region: Region
    operands: list[tuple[Root, Type]]


@dataclasses.dataclass
class SubStep:
    """An operator replaced by its decomposition: a plan of its own."""

    plan: "Plan"
    operands: list[Root]


@dataclasses.dataclass
class Plan:
    """A unit with a type for every value; `partition` turns it into the program of one rank."""

    unit: Unit
    mesh: Mesh
    inputs: list[Root]
    types: dict[Root, Type]
    steps: dict[fx.Node, OpStep | RegionStep | SubStep]
    outputs: list[tuple[Root, Type]]

    @property
    def in_types(self) -> list[Type]:
        return [self.types[r] for r in self.inputs]

    @property
    def out_types(self) -> list[Type]:
        return [t for _, t in self.outputs]

    def varying(self, root: Root) -> frozenset[str]:
        """The axes on which every use of a value varies. A cast varies as its result does."""
        found = [t.replicated for r, t in self.outputs if r == root]
        for n, step in self.steps.items():
            if isinstance(step, SubStep):
                pairs = zip(step.plan.inputs, step.operands, strict=True)
                found += [step.plan.varying(inner) for inner, r in pairs if r == root]
            elif _is_cast(step):
                found += [t.replicated | self.varying((n, 0)) for r, t in step.operands if r == root]
            else:
                found += [t.replicated for r, t in step.operands if r == root]
        return ft.reduce(frozenset.intersection, found) if found else frozenset()

    def assume(self, root: Root, t: Type) -> None:
        """Lets a value come in as `t`; its uses convert from there, and casts give what they take."""
        self.types[root] = t
        for n, step in self.steps.items():
            if isinstance(step, SubStep):
                for inner, r in zip(step.plan.inputs, step.operands, strict=True):
                    if r == root:
                        step.plan.assume(inner, t)
            elif _is_cast(step) and step.operands[0][0] == root and step.operands[0][1].dims == t.dims:
                step.operands = [(root, t)]
                step.results = (step.results[0].with_(replicated=t.replicated),)
                self.assume((n, 0), step.results[0])

    def hoist(self, i: int, compute: Type) -> None:
        """Moves the conversion of input `i` out of the unit as far as all of its uses agree.

        A parameter then comes in as it is used: gathered, and R on the axes on which every use varies. What makes it
        so happens outside, once for all parameters of the unit.
        """
        root = self.inputs[i]
        self.assume(root, compute.with_(replicated=self.varying(root) - compute.sharded))


_CASTS = {torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype, torch.ops.aten.to.dtype_layout}


def _is_cast(step: OpStep | RegionStep) -> TypeGuard[OpStep]:
    return isinstance(step, OpStep) and step.call.target in _CASTS and len(step.operands) == 1
