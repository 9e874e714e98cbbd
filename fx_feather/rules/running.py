"""Rules of running sums and products: along a split dim each rank adds what the ranks before it come to."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..collectives import all_gather, axis_index
from .local import Local
from .pointwise import named, sets, sizes_of
from .rule import OpCall, Rule, Sharding, register


def _running(
    total: Callable[[Tensor, int], Tensor], join: Callable[[Tensor, Tensor], Tensor], neutral: float, linear: bool
) -> Callable[[OpCall], Sharding]:
    """Shard function of an operator that joins what came before along one dim.

    Args:
        total: joins all along a dim.
        join: two values.
        neutral: what changes nothing.
        linear: whether the operator is.
    """

    def shard(call: OpCall) -> Sharding:
        x, at = call.operands[0], call.dim(1)
        factors, factor = named(x.shape), f"d{at}"
        plain = Sharding(
            (factors,), (factors,), sizes_of((factors, x.shape)), whole=frozenset({factor}) if x.ndim else frozenset(),
            linear=sets([x]) if linear else (),
        )  # fmt: skip
        if not x.ndim or x.dtype == torch.bool:
            return plain

        def run(local: Local, operands: list[Tensor]) -> Any:
            own = local.filled(0, operands[0], neutral, [factor])
            out = local.plain([own])
            axes = local.axes(factor)
            n = local.mesh.count(axes)
            # One value of each rank travels; those of the ranks after this one count nothing.
            totals = all_gather(total(own.to(out.dtype), at).unsqueeze(0), axes, n, 0)
            before = torch.arange(n, device=out.device) < axis_index(axes, n, out.device)
            before = before.view(-1, *(1,) * (totals.ndim - 1))
            return join(out, total(torch.where(before, totals, neutral), 0).unsqueeze(at))

        return dataclasses.replace(plain, whole=frozenset(), lower={factor: run})

    return shard


_SUM = _running(lambda x, d: x.sum(d), torch.add, 0, True)
_PRODUCT = _running(lambda x, d: x.prod(d), torch.mul, 1, False)
register("cumsum.default", Rule(_SUM, text="... d -> ... d"))
register("cumprod.default", Rule(_PRODUCT, text="... d -> ... d"))
