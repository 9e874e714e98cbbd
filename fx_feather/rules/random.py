"""The rule of draws: each rank draws its own part, by the place of its elements in the whole tensor."""

import torch
from torch import Tensor

from .local import Local
from .pointwise import broadcast, named, sizes_of
from .rule import Factors, OpCall, Operand, Rule, Sharding, register

_NAMES = ["run", "key", "like", "start", "split", "shape", "whole", "site", "kind", "args", "dtype", "batch", "parts"]


def _own(local: Local, operands: list[Tensor]) -> Tensor:
    call, out = local.call, local.results[0]
    given = {name: call.arg(i, name) for i, name in enumerate(_NAMES)}
    device = operands[0].device
    split = [d for d in range(len(out.shape)) if local.axes(f"d{d}")]
    given |= {name: operands[x.index] for name in ("run", "key") if isinstance(x := given[name], Operand)}
    given |= {"like": None, "split": split, "start": [local.positions(f"d{d}", device)[0][0] for d in split]}
    given |= {"shape": list(out.local_shape(local.mesh))}
    return torch.ops.fx_feather.draw(*given.values())


def _draw(call: OpCall) -> Sharding:
    dims = named(call.outs[0].shape)
    like = call.arg(2, "like")
    of_like = frozenset({like.index}) if isinstance(like, Operand) else frozenset()
    operands: list[Factors] = []
    sizes = sizes_of((dims, call.outs[0].shape))
    for o in call.operands:
        if o.index in of_like:
            operands.append(dims)
        else:
            operands.append((("run",),) * o.ndim)
            sizes |= {"run": 2} if o.ndim else {}
    return Sharding(tuple(operands), (dims,), sizes, whole=frozenset({"run"}), ignored=of_like, run=_own)


register("fx_feather::draw", Rule(_draw, text="!two, , ... -> ..."))
register("fx_feather::fold_in", Rule(broadcast, text="from broadcasting"))
