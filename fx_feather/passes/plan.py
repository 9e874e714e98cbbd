"""The plan of a unit: a type for every value, and for every operator what its operands are converted to."""

import dataclasses
import functools as ft
from typing import TypeGuard

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
class CustomStep:
    """A function with a backward of its own: a plan of each. Operands are converted to the types that both take."""

    forward: "Plan"
    backward: "Plan"
    operands: list[tuple[Root, Type]]
    #: Numbers of the results that have no gradient.
    fixed: frozenset[int]


@dataclasses.dataclass
class Plan:
    """A unit with a type for every value; `partition` turns it into the program of one rank."""

    unit: Unit
    mesh: Mesh
    inputs: list[Root]
    types: dict[Root, Type]
    steps: dict[fx.Node, OpStep | RegionStep | SubStep | CustomStep]
    outputs: list[tuple[Root, Type]]

    @property
    def in_types(self) -> list[Type]:
        return [self.types[r] for r in self.inputs]

    @property
    def out_types(self) -> list[Type]:
        return [t for _, t in self.outputs]

    def varying(self, root: Root) -> frozenset[str]:
        """The axes on which every use of a value varies. An operator of this value alone varies as its results do."""
        found = self._varied(root)
        return ft.reduce(frozenset.intersection, found) if found else frozenset()

    def _varied(self, root: Root) -> list[frozenset[str]]:
        found = [t.replicated for r, t in self.outputs if r == root]
        for n, step in self.steps.items():
            if isinstance(step, SubStep):
                pairs = zip(step.plan.inputs, step.operands, strict=True)
                found += [step.plan.varying(inner) for inner, r in pairs if r == root]
            elif _is_unary(step) and step.operands[0][0] == root:
                after = [axes for i in range(len(step.results)) for axes in self._varied((n, i))]
                through = ft.reduce(frozenset.intersection, after) if after else frozenset()
                found += [step.operands[0][1].replicated | through]
            else:
                found += [t.replicated for r, t in step.operands if r == root]
        return found

    def assume(self, root: Root, t: Type) -> None:
        """Lets a value come in as `t`; its uses convert from there.

        An operator of it alone that takes the same split then varies on the axes of `t` too. What it takes of a pending
        sum stays what was planned: one that it isn't linear in is still resolved before it.
        """
        self.types[root] = t
        for n, step in self.steps.items():
            if isinstance(step, SubStep):
                for inner, r in zip(step.plan.inputs, step.operands, strict=True):
                    if r == root:
                        step.plan.assume(inner, t)
            elif _is_unary(step) and step.operands[0][0] == root and step.operands[0][1].dims == t.dims:
                taken = step.operands[0][1]
                taken = taken.with_(replicated=t.replicated | (taken.replicated - t.sharded - t.partial))
                step.operands = [(root, taken)]
                step.results = tuple(result.with_(replicated=taken.replicated) for result in step.results)
                for i, result in enumerate(step.results):
                    self.assume((n, i), result)

    def hoist(self, i: int, compute: Type) -> None:
        """Moves the conversion of input `i` out of the unit as far as all of its uses agree.

        A parameter then comes in as it is used: gathered, and R on the axes on which every use varies. What makes it
        so happens outside, once for all parameters of the unit.
        """
        root = self.inputs[i]
        self.assume(root, compute.with_(replicated=self.varying(root) - compute.sharded))


def _is_unary(step: OpStep | RegionStep | CustomStep) -> TypeGuard[OpStep]:
    """Whether an operator has one operand: of the same value everywhere it makes the same value everywhere.

    What is R before it is R after it, since its vjp is linear in the cotangent: a partial one stays partial.
    """
    return isinstance(step, OpStep) and len(step.operands) == 1 and bool(step.results)
