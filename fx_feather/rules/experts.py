"""The rule of experts: tokens split anywhere; experts, or the hidden dim inside of them, split leave a pending sum."""

from torch import Tensor

from ..kernels import experts
from .local import Local
from .pointwise import named, sets
from .rule import Dim, OpCall, Rule, Sharding, register


def _own(local: Local, operands: list[Tensor]) -> Tensor:
    x, index, weights, gate, up, down = operands
    first = local.positions("e", index.device)[0][0]
    return experts(x, index - first, weights, gate, up, down)


def _experts(call: OpCall) -> Sharding:
    x, index, weights, gate, _, down = call.operands
    tokens = named(x.shape[:-1])
    d: Dim = ("embed",)
    sizes = {f"d{i}": n for i, n in enumerate(x.shape[:-1])}
    sizes |= {"k": index.shape[-1], "embed": x.shape[-1], "e": gate.shape[0], "f": gate.shape[2]}
    of_choice = (*tokens, ("k",))
    return Sharding(
        ((*tokens, d), of_choice, of_choice, (("e",), d, ("f",)), (("e",), d, ("f",)), (("e",), ("f",), d)),
        ((*tokens, d),),
        sizes,
        whole=frozenset({"k", "embed"}),
        linear=sets([weights], [down]),
        run=lambda local, operands: experts(*operands),
        lower={"e": _own},
    )


register("fx_feather::experts", Rule(_experts, text="... !d, ... !k, ... !k, e !d f, e !d f, e f !d -> ... !d"))
