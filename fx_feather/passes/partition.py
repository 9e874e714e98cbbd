"""Partitioning: from a plan to the function of one rank, which applies typed collectives to local values."""

import math
from collections.abc import Callable
from typing import Any

import torch

from ..collectives import pmax
from ..record import written_at
from ..rules import Local, OpCall, by_hand
from ..source import user_line
from ..spec import Type
from .plan import CustomStep, OpStep, Plan, RegionStep, Root, SubStep
from .reshard import Step, steps, take

LocalFn = Callable[..., list[torch.Tensor]]


def partition(plan: Plan) -> LocalFn:
    """The local program of a unit: a function of local inputs, differentiable, that applies collectives.

    Each value is converted at its use; conversions are shared by all uses that begin with the same steps, so that a
    value pays each collective once, forward and backward.
    """

    def local(*inputs: torch.Tensor) -> list[torch.Tensor]:
        env: dict[Root, torch.Tensor] = dict(zip(plan.inputs, inputs, strict=True))
        converted: dict[tuple[Root, tuple[Step, ...]], torch.Tensor] = {}

        def get(root: Root, want: Type) -> torch.Tensor:
            x = env[root]
            done: tuple[Step, ...] = ()
            for step in steps(plan.types[root], want, plan.mesh):
                done = (*done, step)
                if (root, done) not in converted:
                    converted[root, done] = take(x, step, plan.mesh)
                x = converted[root, done]
            return x

        for n in plan.unit.graph.nodes:
            if n.op == "get_attr":
                env[n, 0] = plan.unit.constants[n.target]
            elif n in plan.steps:
                step, line = plan.steps[n], user_line(n)
                with written_at(line):
                    if isinstance(step, SubStep):
                        out: Any = partition(step.plan)(*(env[r] for r in step.operands))
                    elif isinstance(step, CustomStep):
                        out = _by_hand(step, [get(r, t) for r, t in step.operands])
                    elif isinstance(step, RegionStep):
                        out = step.region.local(*(get(r, t) for r, t in step.operands))
                    else:
                        out = _compute(step, plan, [get(r, t) for r, t in step.operands], line)
                for i, x in enumerate(out if isinstance(out, (list, tuple)) else [out]):
                    env[n, i] = x
        return [get(r, t) for r, t in plan.outputs]

    return local


def _by_hand(step: CustomStep, tensors: list[torch.Tensor]) -> Any:
    forward, backward = partition(step.forward), partition(step.backward)

    def vjp(cts: Any, outs: Any, *given: torch.Tensor) -> list[torch.Tensor | None]:
        wanted = [ct for i, ct in enumerate(cts) if i not in step.fixed]
        grads = iter(backward(*given, *outs, *wanted))
        return [next(grads) if x.is_floating_point() or x.is_complex() else None for x in given]

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        # What comes out as it came in would be saved twice, under one name.
        return [torch.ops.aten.alias(y) for y in forward(*xs)]

    return by_hand(run, vjp, tensors)


_NEUTRAL = {"sum": 0.0, "max": float("-inf"), "min": float("inf")}


def _compute(step: OpStep, plan: Plan, tensors: list[torch.Tensor], where: str) -> Any:
    s, mesh = step.sharding, plan.mesh
    local = Local(step.call, s, step.solution, mesh, step.results, where)
    kept = {f for factors in s.results for dim in factors for f in dim}
    for f, axes in step.solution.factor_axes.items():
        if f in s.lower:
            return s.lower[f](local, tensors)
        if f in kept or s.sizes[f] % mesh.count(axes) == 0:
            continue
        # Padding takes no part in a reduction.
        neutral = _NEUTRAL[s.reduced.get(f, "sum")]
        for i, factors in enumerate(s.operands):
            if (f,) in factors and i not in s.ignored:
                tensors[i] = fill_padding(tensors[i], factors.index((f,)), local, f, neutral)
    out = local.run(tensors)
    for f, kind in s.reduced.items():
        if f in step.solution.factor_axes and f not in kept and kind != "sum":
            out = _extreme(out, kind, step.solution.factor_axes[f], plan)
    return _finite_padding(local, out) if _chooses(step.call) else out


def _chooses(call: OpCall) -> bool:
    """Whether an operator may give what is not finite where all of its operands' padding is: it is told to."""
    name = call.target._schema.name.rpartition("::")[2]
    told = any(isinstance(x, float) and not math.isfinite(x) for x in (*call.args, *call.kwargs.values()))
    return (told or name in ("where", "masked_fill")) and name != "fill_padding"


def _finite_padding(local: Local, out: Any) -> Any:
    """Results whose padding is 0 where it may not be finite.

    The value of padding never matters, and it is finite: the cotangent of padding is 0, and the vjp of a later product
    multiplies the two and may add them to what is no padding. The law of rules holds every operator to it.
    """
    if isinstance(out, torch.Tensor):
        return local.cleared(0, out)
    return [local.cleared(i, x) for i, x in enumerate(out)]


def fill_padding(x: torch.Tensor, dim: int, local: Local, factor: str, value: float) -> torch.Tensor:
    """`x` with the padding of one dim set to a value."""
    _, true = local.positions(factor, x.device)
    mask = true.view([-1 if i == dim else 1 for i in range(x.ndim)])
    if not x.is_floating_point() and value in (float("-inf"), float("inf")):
        limits = (0, 1) if x.dtype == torch.bool else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
        value = limits[value > 0]
    return torch.where(mask, x, torch.full((), value, dtype=x.dtype, device=x.device))


def _extreme(x: torch.Tensor, kind: str, axes: tuple[str, ...], plan: Plan) -> torch.Tensor:
    n = plan.mesh.count(axes)
    return pmax(x, axes, n) if kind == "max" else -pmax(-x, axes, n)
