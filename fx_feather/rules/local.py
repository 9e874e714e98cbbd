"""The local call: what one rank computes of an operator, and what a lowering knows of its part."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..collectives import axis_index
from ..mesh import Mesh
from ..spec import Type, local_size
from .handwritten import call_operator
from .rule import Factors, OpCall, Operand, Sharding
from .solve import Solution


@dataclasses.dataclass(frozen=True)
class Local:
    """What a lowering knows while it computes one rank's part."""

    call: OpCall
    sharding: Sharding
    solution: Solution
    mesh: Mesh
    results: tuple[Type, ...]
    where: str = ""  # the user's line, for messages

    def axes(self, factor: str) -> tuple[str, ...]:
        """The axes that split a factor."""
        return self.solution.factor_axes.get(factor, ())

    def positions(self, factor: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Global index of each local element of a factor, int64[local size], and which of them are not padding."""
        n, axes = self.sharding.sizes[factor], self.axes(factor)
        sizes = [n]
        for a in axes:
            sizes.append(local_size(sizes[-1], (a,), self.mesh))
        at = torch.arange(sizes[-1], device=device)
        true = torch.ones(sizes[-1], dtype=torch.bool, device=device)
        for k in range(len(axes) - 1, -1, -1):
            at = at + axis_index((axes[k],), self.mesh[axes[k]], device) * sizes[k + 1]
            true = true & (at < sizes[k])
        return at, true

    def filled(
        self, operand: int, x: torch.Tensor, value: float, factors: Collection[str] | None = None
    ) -> torch.Tensor:
        """An operand with its padding set to a value: in all dims that are one factor, or those of `factors`."""
        return self._filled(self.sharding.operands[operand], x, value, factors)

    def cleared(self, result: int, x: torch.Tensor) -> torch.Tensor:
        """A result with its padding set to 0; whole numbers are finite anyway."""
        exact = not (x.is_floating_point() or x.is_complex())
        return x if exact else self._filled(self.sharding.results[result], x, 0.0, None)

    def _filled(self, dims: Factors, x: torch.Tensor, value: float, factors: Collection[str] | None) -> torch.Tensor:
        for d, dim in enumerate(dims):
            if len(dim) != 1 or self.sharding.sizes[dim[0]] % self.mesh.count(self.axes(dim[0])) == 0:
                continue
            if factors is not None and dim[0] not in factors:
                continue
            _, true = self.positions(dim[0], x.device)
            x = torch.where(true.view([-1 if i == d else 1 for i in range(x.ndim)]), x, value)
        return x

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the rule computes of local operands: the operator itself, if it says nothing else."""
        return self.plain(tensors) if self.sharding.run is None else self.sharding.run(self, tensors)

    def plain(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The operator itself on local operands."""
        args, kwargs = self.call.args, dict(self.call.kwargs)
        if self.sharding.rewrite is not None:
            args, kwargs = self.sharding.rewrite(args, kwargs, [t.local_shape(self.mesh) for t in self.results])
        return call_operator(self.call.target, fill(args, tensors), fill(kwargs, tensors), self.where)


def fill(x: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Puts tensors in the place of `Operand`s."""
    if isinstance(x, Operand):
        return tensors[x.index]
    if isinstance(x, (list, tuple)):
        return type(x)(fill(y, tensors) for y in x)
    if isinstance(x, dict):
        return {k: fill(v, tensors) for k, v in x.items()}
    return x
