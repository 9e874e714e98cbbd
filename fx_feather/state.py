"""The state of a training run: parameters, the optimizer's state, and how many steps were taken."""

import dataclasses
from collections.abc import Callable
from typing import Any

from . import tree
from .errors import StateError, fail
from .mesh import Mesh
from .spec import Type


@dataclasses.dataclass(frozen=True)
class Split:
    """How the local parts of a state are split: what a state belongs to, beside the number of its step.

    Attributes:
        mesh: the ranks.
        types: of all leaves, parameters first.
    """

    mesh: Mesh
    types: tuple[Type, ...]

    def difference(self, other: "Split", paths: list[str]) -> str:
        """The first thing that another split has otherwise, as `this, not that`."""
        if self.mesh != other.mesh:
            return f"it was made on {self.mesh!r}, not on {other.mesh!r}"
        if len(self.types) != len(other.types):
            return f"it has {len(self.types)} leaves, not {len(other.types)}"
        i, n = next((i, n) for i, n in enumerate(zip(self.types, other.types, strict=True)) if n[0] != n[1])
        wrong = sum(a != b for a, b in zip(self.types, other.types, strict=True))
        return f"{paths[i]} is {n[0]}, not {n[1]}" + (f" (and {wrong - 1} more leaves)" if wrong > 1 else "")


@dataclasses.dataclass(repr=False)
class State:
    """Parameters and optimizer state of a run, and the number of steps taken.

    Attributes:
        params: pytree of tensors, local parts in a run on several ranks, whole values otherwise.
        opt: the optimizer's state, likewise.
        step: steps taken so far.
        whole: whether these are whole values.
        split: how local parts are split, known for a state that a step made.
        seed: of the initial values, which all ranks should have in common; None where it is not known.
    """

    params: Any
    opt: Any
    step: int
    whole: bool
    split: Split | None = None
    seed: int | None = None

    def __repr__(self) -> str:
        if self.params is None:
            return f"<State after step {self.step}, taken over by a later step>"
        params, opt = tree.leaves(self.params), tree.leaves(self.opt)
        elements = sum(x.numel() for x in params)
        kind = "whole values" if self.whole else "local parts"
        return (
            f"<State after step {self.step}: {len(params)} parameters of {elements:,} elements and "
            f"{len(opt)} tensors of the optimizer, {kind}>"
        )

    def take(self) -> None:
        """Gives the values up: whoever took them holds them alone."""
        self.params = self.opt = None

    def check(self, call: str, split: Split, paths: Callable[[], list[str]]) -> None:
        """Raises StateError if the values were given up, or are parts by another split; `paths` are of its leaves."""
        if self.params is None:
            fail(
                StateError,
                call=call,
                got=f"a state after step {self.step}",
                number="this state was given to an earlier step already",
                rule="a step takes its state over, so that no second copy of parameters and optimizer state exists",
                fix="state, metrics = step(state, batch), and go on with the new state",
            )
        if self.split is not None and not self.whole and self.split is not split and self.split != split:
            fail(
                StateError,
                call=call,
                got=f"local parts of a state after step {self.step}, made by another step",
                number=self.split.difference(split, paths()),
                rule="local parts fit the mesh and layout that they were made for alone, even where shapes are equal",
                fix="step.shard_state(other.whole(state)), where `other` is the step that made the state",
            )
