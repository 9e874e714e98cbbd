"""The rule of scaled dot-product attention: batch and heads split, sequence and head dim stay whole."""

import torch
from torch import Tensor

from .local import Local, fill
from .pointwise import sets
from .rule import Dim, Factors, OpCall, Operand, Rule, Sharding, register


def _attention(call: OpCall) -> Sharding:
    q, k, v = call.operands[:3]
    grouped = bool(call.kwargs.get("enable_gqa", False)) and q.ndim > 2
    causal = bool(call.arg(5, "is_causal", False))
    lead = call.outs[0].shape[:-2]
    sizes = {f"b{i}": n for i, n in enumerate(lead)}
    sizes |= {"s": q.shape[-2], "t": k.shape[-2], "d": q.shape[-1], "e": v.shape[-1]}
    heads: Dim = (f"b{len(lead) - 1}",)
    if grouped and k.shape[-3] != q.shape[-3]:
        del sizes[heads[0]]
        sizes |= {"g": k.shape[-3], "r": q.shape[-3] // k.shape[-3]}
        heads = ("g", "r")

    def leading(shape: tuple[int, ...], shared: bool = False) -> Factors:
        out: list[Dim] = []
        for i, n in enumerate(shape, len(lead) - len(shape)):
            if i == len(lead) - 1 and len(heads) == 2:
                out.append(("g",) if shared else heads if n == lead[i] else ())
            else:
                out.append((f"b{i}",) if n == lead[i] else ())
        return tuple(out)

    operands: list[Factors] = [
        (*leading(q.shape[:-2]), ("s",), ("d",)),
        (*leading(k.shape[:-2], True), ("t",), ("d",)),
        (*leading(v.shape[:-2], True), ("t",), ("e",)),
    ]
    mask = call.arg(3, "attn_mask")
    if isinstance(mask, Operand):
        rows: Dim = ("s",) if mask.shape[-2] == q.shape[-2] else ()
        columns: Dim = ("t",) if mask.shape[-1] == k.shape[-2] else ()
        operands.append((*leading(mask.shape[:-2]), rows, columns))
    return Sharding(
        tuple(operands),
        ((*leading(lead), ("s",), ("e",)),),
        sizes,
        whole=frozenset({"t", "d"}),
        linear=sets([v]),
        lower={"s": _causal} if causal else {},
    )


def _causal(local: Local, operands: list[Tensor]) -> Tensor:
    """Some queries of a causal attention: a mask tells their places in the whole sequence."""
    at, _ = local.positions("s", operands[0].device)
    mask = at.unsqueeze(-1) >= torch.arange(operands[1].shape[-2], device=at.device)
    args, kwargs = fill(local.call.args, operands), fill(dict(local.call.kwargs), operands)
    dropout = args[4] if len(args) > 4 else kwargs.pop("dropout_p", 0.0)
    kwargs.pop("is_causal", None)
    return local.call.target(*args[:3], mask, dropout, False, **kwargs)


def _repeated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with a key and value head for each query head: those that several share are repeated."""
    times = q.shape[-3] // k.shape[-3]
    k, v = (x.unsqueeze(-3).expand(*x.shape[:-2], times, *x.shape[-2:]).flatten(-4, -3) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)


register(
    "scaled_dot_product_attention.default",
    Rule(
        _attention,
        _repeated,
        decomposed_for=frozenset({"divide"}),
        text="... (g r) !s !d, ... g !t !d, ... g !t e, ... (g r) !s !t -> ... (g r) !s e",
    ),
)
