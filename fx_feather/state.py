"""The state of a training run: parameters, the optimizer's state, and how many steps were taken."""

import dataclasses
from typing import Any

from . import tree
from .errors import StateError, fail


@dataclasses.dataclass(repr=False)
class State:
    """Parameters and optimizer state of a run, and the number of steps taken.

    Attributes:
        params: pytree of tensors, local parts in a run on several ranks, whole values otherwise.
        opt: the optimizer's state, likewise.
        step: steps taken so far.
        whole: whether these are whole values.
    """

    params: Any
    opt: Any
    step: int
    whole: bool

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

    def check(self, call: str) -> None:
        """Raises StateError if the values were given up."""
        if self.params is None:
            fail(
                StateError,
                call=call,
                got=f"a state after step {self.step}",
                number="this state was given to an earlier step already",
                rule="a step takes its state over, so that no second copy of parameters and optimizer state exists",
                fix="state, metrics = step(state, batch), and go on with the new state",
            )
