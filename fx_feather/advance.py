"""Taking a step: the sections of a program in their order, and between them the looks at what the update reads."""

import dataclasses
import math
from typing import Any, Protocol

import torch

from . import agreement, finite, tree
from .optim import leaf
from .passes.training import Parameters, Updates
from .program import Program, Section
from .simulate import Simulator
from .state import State


class Where(Protocol):
    """What runs sections: a `Runtime`, whose values are tensors, or a `Simulator`, with a list of them for each."""

    def run(self, section: Section, inputs: Any) -> Any: ...

    def item(self, x: Any) -> Any: ...

    def numbers(self, x: Any) -> list[Any]: ...

    def scalar(self, x: float) -> Any: ...

    def any(self, flags: Any) -> list[bool]: ...

    def check_numbers(self, call: str, numbers: dict[str, int | None], axes: tuple[str, ...]) -> None: ...


@dataclasses.dataclass
class Advance:
    """One step of a program, from old parameters and state to new ones.

    Attributes:
        program: with the sections of a training step.
        updates: how its update came about.
        params: the parameters.
        aux_tree: structure of the auxiliary values, None if there are none.
        adjusts: whether the update reads them.
        compared: axes along which each step sees whether all ranks are at the same one.
    """

    program: Program
    updates: Updates
    params: Parameters
    aux_tree: Any
    adjusts: bool
    compared: tuple[str, ...]

    def __post_init__(self) -> None:
        # The dtype in which numbers meet the leaves: the narrowest that some leaf is updated in.
        wide = {leaf.wide_dtype(t.dtype) for t in self.params.at_rest() if t.dtype.is_floating_point}
        self.ranks = self.program.mesh.count(self.compared)
        self.dtype = min(wide, key=lambda d: torch.finfo(d).max, default=torch.float32)
        # What is finite there may be none in the leaf itself: float16 ends at 65504.
        floats = {t.dtype for t in self.params.at_rest() if t.dtype.is_floating_point}
        self.narrow = any(torch.finfo(d).max < torch.finfo(torch.bfloat16).max for d in floats)

    def leaf_paths(self) -> list[str]:
        """How messages name the leaves of a state, parameters first."""
        opt = [f"state.opt{path}" for path in tree.paths_of(self.updates.state_tree)]
        return [*(f"params{path}" for path in self.params.paths), *opt]

    def __call__(
        self,
        state: State,
        params: list[Any],
        opt: list[Any],
        keys: list[Any],
        microbatches: list[list[Any]],
        where: Where,
    ) -> tuple[list[Any], dict[str, Any]]:
        """New parameters and state as one list, and metrics; the old ones are taken from `state` and both lists.

        Raises:
            NonFiniteError: something that the update reads or would make is not finite; nothing is taken then.
        """
        sections, n, run, item = self.program.sections, len(params), where.run, where.item
        reduced = self.reduced(params, microbatches, where, state.step, state.seed)
        grads, results = reduced[:n], reduced[n:]
        resting = [*results[2:], *opt, *params, *keys]
        checked = run(sections["check"], [*grads, *results[:2], *(resting[i] for i in self.updates.early)])
        loss, norm, count = item(checked[0]), item(checked[1]), item(results[1])
        if not (math.isfinite(loss) and math.isfinite(norm) and count >= 0):
            bad = self._not_finite(grads, self.params.paths, where)
            finite.refuse_gradients(state.step, loss, norm, count, [f"params{p}" for p in bad])
        names = self.updates.numbers.names.values()
        numbers = dict(zip(names, where.numbers(checked.pop(2)), strict=True)) if names else {}
        finite.check_numbers(state.step, numbers, self.dtype)
        if self.adjusts:
            bad = self._not_finite(results[2:], [f"aux{p}" for p in tree.paths_of(self.aux_tree)], where)
            fix = "look for what makes it in the loss, or don't adjust by it"
            finite.refuse_values(state.step, loss, "auxiliary value", bad, fix)
        inputs = [*checked[2:], *resting]
        moderate = finite.is_moderate([norm, norm * count, *numbers.values()], self.dtype)
        sure = self.updates.numbers.bounded and moderate and not self.narrow and not isinstance(where, Simulator)
        del grads, reduced, checked
        if sure:
            del resting
            state.take()
            params.clear()
            opt.clear()
            new = run(sections["update"], inputs)
        else:
            # What may overflow, or divide by zero, is tried beside the old values, which are held here.
            new = run(sections["update"], inputs)
            bad = self._not_finite(new, self.leaf_paths(), where)
            fix = "look at what the optimizer divides by, at its settings, and at the old value of the leaf"
            finite.refuse_values(state.step, loss, "new value", bad, fix)
            del resting
            state.take()
        metrics: dict[str, Any] = {"loss": loss, "count": count, "grad_norm": norm}
        if self.aux_tree is not None:
            metrics["aux"] = tree.unflatten(self.aux_tree, results[2:])
        return new, metrics

    def reduced(
        self, params: list[Any], microbatches: list[list[Any]], where: Where, step: int = 0, seed: int | None = None
    ) -> list[Any]:
        """The reduced gradients, sum, count and auxiliary values, of ranks that are all at this step."""
        sections, run = self.program.sections, where.run
        so_far = run(sections["first"], [*params, *microbatches[0]])
        for data in microbatches[1:]:
            so_far = run(sections["following"], [*params, *data, *so_far])
        if not self.compared:
            reduced: list[Any] = run(sections["finish"], so_far)
            return reduced
        token = agreement.token(step, seed)
        inputs = [*so_far, where.scalar(token), where.scalar(token * token)]
        del so_far  # whose values are freed one by one
        *reduced, sums = run(sections["finish"], inputs)
        if not agreement.is_shared(self.ranks, *where.numbers(sums)):
            where.check_numbers("step(state, batch)", {"step": step, "seed": seed}, self.compared)
        return reduced

    def _not_finite(self, values: list[Any], paths: list[str], where: Where) -> list[str]:
        """The paths of values with something that is not finite on some rank."""
        return [p for p, bad in zip(paths, where.any(finite.flags(values)), strict=True) if bad]
