"""Rules of losses: classes stay whole and rows pass, or the loss is written in simpler operators."""

from typing import Any

import torch
from torch import Tensor

from ..collectives import keep_first, pmax, psum
from .handwritten import by_hand
from .index import filler, held
from .local import Local
from .pointwise import broadcast, named, padding_harmless, sizes_of
from .rule import Factors, OpCall, Rule, Sharding, register

NONE, MEAN, SUM = 0, 1, 2
aten = torch.ops.aten


def _classes_dim(ndim: int) -> int:
    return 0 if ndim == 1 else 1


def _rows(call: OpCall) -> Sharding:
    x, target, *weight = call.operands
    classes = _classes_dim(x.ndim)
    factors = named(x.shape)
    rows: Factors = tuple(f for i, f in enumerate(factors) if i != classes)
    reduction = call.arg(3, "reduction", MEAN)
    soft = target.shape == x.shape and target.dtype.is_floating_point
    # A sum or mean over rows leaves out those that are ignored and those that are padding: that takes a mask.
    whole = {f"d{classes}"} if reduction == NONE else {f for d in factors for f in d}
    results = (rows if reduction == NONE else (), *((),) * (len(call.outs) - 1))
    operands = (factors, factors if soft else rows, *((factors[classes],) for _ in weight))
    return Sharding(operands, results, sizes_of((factors, x.shape)), whole=frozenset(whole))


def _picked(logp: Tensor, target: Tensor, weight: Any, ignore: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the weight with which it counts in a mean."""
    dim = _classes_dim(logp.dim())
    valid = target != ignore
    rows = torch.where(valid, target, 0)
    loss = -logp.gather(dim, rows.unsqueeze(dim)).squeeze(dim)
    counts = valid.to(logp.dtype)
    if weight is not None:
        of_row = aten.index.Tensor(weight, [rows])
        loss, counts = loss * of_row, counts * of_row
    if smoothing:
        shape = [-1] + [1] * (logp.dim() - 1 - dim)
        every = logp if weight is None else logp * weight.reshape(shape)
        n = logp.shape[dim]
        loss = loss * (1 - smoothing) - every.sum(dim) * (smoothing / n)
    return torch.where(valid, loss, 0.0), counts


def _reduced(loss: Tensor, counts: Tensor, reduction: int) -> Tensor:
    if reduction == NONE:
        return loss
    return loss.sum() if reduction == SUM else loss.sum() / counts.sum()


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Any = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` in operators that may be split."""
    dim = _classes_dim(x.dim())
    logp = aten.log_softmax.int(x, dim)
    if not target.is_floating_point():
        loss, counts = _picked(logp, target, weight, ignore_index, label_smoothing)
        return _reduced(loss, counts, reduction)
    n = x.shape[dim]
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / n
    each = logp * target
    if weight is not None:
        each = each * weight.reshape([-1] + [1] * (x.dim() - 1 - dim))
    loss = -each.sum(dim)
    if reduction == NONE:
        return loss
    return loss.sum() if reduction == SUM else loss.sum() / (x.numel() // n)


def nll(logp: Tensor, target: Tensor, weight: Any = None, reduction: int = MEAN, ignore_index: int = -100) -> Tensor:
    """`torch.nn.functional.nll_loss` in operators that may be split."""
    loss, counts = _picked(logp, target, weight, ignore_index, 0.0)
    return _reduced(loss, counts, reduction)


register("cross_entropy_loss.default", Rule(_rows, cross_entropy, text="... !v, ... -> ..."))
register("nll_loss_nd.default nll_loss.default nll_loss2d.default", Rule(_rows, nll, text="... !v, ... -> ..."))


def token_nll(logits: Tensor, rows: Tensor) -> Tensor:
    """The negative log-likelihood of one class in each row: `logsumexp(logits[r]) - logits[r, rows[r]]`."""
    return torch.logsumexp(logits, dim=-1) - logits.gather(-1, rows.unsqueeze(-1)).squeeze(-1)


def _terms(logits: Tensor, rows: Tensor, part: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The two terms of `token_nll`, and the softmax, of which the backward is made."""
    # In a part of the classes all of a row may be minus infinity, which has no softmax; the least number has one.
    softmax = torch.softmax(logits.clamp(min=torch.finfo(logits.dtype).min) if part else logits, -1)
    # The largest of the softmax is 1 / sum(exp(x - max)): no further pass with exp is needed.
    total = logits.amax(-1) - softmax.amax(-1).log()
    return total, logits.gather(-1, rows.unsqueeze(-1)).squeeze(-1), softmax


def _terms_vjp(cts: Any, outs: Any, logits: Tensor, rows: Tensor, part: bool) -> tuple[Tensor, None]:
    # In one buffer: autograd's own formulas write four of the logits' size.
    grad = outs[2] * cts[0].unsqueeze(-1)
    return grad.scatter_add(-1, rows.unsqueeze(-1), cts[1].unsqueeze(-1)), None


def _nll(local: Local, operands: list[Tensor]) -> Tensor:
    total, picked, _ = by_hand(_terms, _terms_vjp, (*operands, False))
    return total - picked


def _nll_of_part(local: Local, operands: list[Tensor]) -> Tensor:
    """Where each rank has some of the classes: a pending sum, of which the first rank holds the logsumexp."""
    logits, rows = operands
    own, mine = held(local, "v", rows)
    total, picked, _ = by_hand(_terms, _terms_vjp, (local.filled(0, logits, float("-inf"), ("v",)), own, True))
    axes = local.axes("v")
    n = local.mesh.count(axes)
    top = pmax(total.detach(), axes, n)
    whole = top + psum((total - top).exp(), axes, n).log()
    other = filler(local, "v", rows, logits.dtype)
    return keep_first(whole, axes, n) - torch.where(mine, picked, other)


def _token_nll(call: OpCall) -> Sharding:
    logits, rows = call.operands
    of_rows = named(rows.shape)
    sizes = {**sizes_of((of_rows, rows.shape)), "v": logits.shape[-1]}
    return Sharding(((*of_rows, ("v",)), of_rows), (of_rows,), sizes, run=_nll, lower={"v": _nll_of_part})


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("token_nll(Tensor logits, Tensor rows) -> Tensor")
# Composite: on one device autograd looks into it; in a trace it is one node, whose rule has the shorter backward.
_library.impl("token_nll", token_nll, "CompositeImplicitAutograd")
register("fx_feather::token_nll", Rule(_token_nll, token_nll, text="... v, ... -> ..."))


def _compared(op: Any) -> Rule:
    """The rule of a loss of two tensors, element by element, with a reduction."""
    names = [a.name for a in op._schema.arguments]
    at = names.index("reduction")

    def shard(call: OpCall) -> Sharding:
        if call.arg(at, "reduction", MEAN) == NONE:
            return broadcast(call, run=padding_harmless)
        shape = torch.broadcast_shapes(*(o.shape for o in call.operands))
        factors = tuple((f"d{i}",) for i in range(len(shape)))
        operands = tuple(
            tuple(
                (f"d{len(shape) - o.ndim + i}",) if n == shape[len(shape) - o.ndim + i] else ()
                for i, n in enumerate(o.shape)
            )
            for o in call.operands
        )
        return Sharding(
            operands, ((),), sizes_of((factors, tuple(shape))), whole=frozenset(f for d in factors for f in d)
        )

    def decompose(*args: Any, **kwargs: Any) -> Tensor:
        reduction = args[at] if len(args) > at else kwargs.get("reduction", MEAN)
        filled = (*args[:at], NONE, *args[at + 1 :]) if len(args) > at else args
        each = op(*filled, **(kwargs if len(args) > at else {**kwargs, "reduction": NONE}))
        return each if reduction == NONE else each.sum() if reduction == SUM else each.mean()

    return Rule(shard, decompose, text="from broadcasting, reduced over all")


LOSSES = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    soft_margin_loss
"""
for _name in LOSSES.split():
    _op = getattr(aten, _name).default
    register(f"{_name}.default", _compared(_op))
