"""AdamW's whole step of one leaf as one operator, on PyTorch's fused kernel."""

from typing import Any

import torch
from torch import Tensor


def adamw(
    param: Tensor,
    grad: Tensor,
    factor: Tensor,
    mu: Tensor,
    nu: Tensor,
    lr: Tensor,
    step: Tensor,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parameter and the two moments after one step, and the factor times the gradient, which the step is made of.

    Nothing that comes in is written to. The kernel reads each element once and writes it once, where the formula in
    operators of torch takes about fifteen passes. Its results are those of the formula but for rounding.

    Args:
        param, grad, mu, nu: of one shape, dtype and device.
        factor: float[], which the gradient is multiplied by.
        lr: float[], the learning rate.
        step: float[], the number of this step, 1 at the first.
        b1, b2: decays of the moments.
        eps: added to the root of the second moment.
        decay: of the parameter, before the learning rate.

    Returns:
        `param`, `mu`, `nu` and `grad` anew.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.

    >>> x, one = torch.ones(2), torch.tensor(1.0)
    >>> adamw(x, x, one, 0 * x, 0 * x, torch.tensor(0.1), one, 0.9, 0.95, 1e-8, 0.0)[0]
    tensor([0.9000, 0.9000])
    """
    to = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (param, mu, nu, grad)]
    rest = (lr, step, b1, b2, eps, decay)
    return _into(param, grad, factor, mu, nu, *rest, to_param=to[0], to_mu=to[1], to_nu=to[2], to_grad=to[3])


def _into(
    param: Tensor,
    grad: Tensor,
    factor: Tensor,
    mu: Tensor,
    nu: Tensor,
    *rest: Any,
    to_param: Tensor,
    to_mu: Tensor,
    to_nu: Tensor,
    to_grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`adamw`, its results written into contiguous tensors; each may be the operand whose new value it takes."""
    for to, x in ((to_param, param), (to_mu, mu), (to_nu, nu), (to_grad, grad)):
        if to.data_ptr() != x.data_ptr():
            to.copy_(x)
    _over([to_param], [to_grad], [to_mu], [to_nu], factor, *rest)
    return to_param, to_mu, to_nu, to_grad


def _over(
    params: list[Tensor],
    grads: list[Tensor],
    mus: list[Tensor],
    nus: list[Tensor],
    factor: Tensor,
    *rest: Any,
) -> None:
    """`adamw` of many leaves of one dtype, over what comes in, which is contiguous."""
    lr, step, b1, b2, eps, decay = rest
    # The kernel divides by a number in float32, and leaves the quotient in the place of the gradient. The reciprocal of
    # less than 2.9e-39 is infinite: such a factor counts as 0.
    scale = factor.to(torch.float32).reciprocal() if grads[0].dtype == torch.float32 else None
    if scale is None:
        torch._foreach_mul_(grads, factor)
    # Kernels read the number of the step in float32, that for CUDA the rate too, whatever they are given.
    lr = lr if lr.device.type == "cpu" else lr.to(torch.float32)
    torch.ops.aten._fused_adamw_.tensor_lr(
        params,
        grads,
        mus,
        nus,
        [],  # no maximum of the second moments
        [step.to(torch.float32)] * len(params),
        lr=lr,
        beta1=b1,
        beta2=b2,
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
    )


def _many(calls: list[list[Any]]) -> list[tuple[Tensor, ...]]:
    """Many calls at once, of leaves and settings that are alike, over their operands."""
    alike: dict[tuple[int, ...], list[list[Any]]] = {}
    for call in calls:
        alike.setdefault((id(call[2]), id(call[5]), id(call[6])), []).append(call)
    for same in alike.values():
        params, grads, _, mus, nus, *_ = (list(column) for column in zip(*same, strict=True))
        _over(params, grads, mus, nus, same[0][2], *same[0][5:])
    return [(param, mu, nu, grad) for param, grad, _, mu, nu, *_ in calls]


def _shapes(param: Tensor, grad: Tensor, factor: Tensor, mu: Tensor, nu: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (param, mu, nu, grad))


_library = torch.library.Library("fx_feather", "FRAGMENT")
_OPERANDS = (
    "Tensor param, Tensor grad, Tensor factor, Tensor mu, Tensor nu, Tensor lr, Tensor step, float b1, float b2, "
    "float eps, float decay"
)
_library.define(f"adamw({_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)", tags=(torch.Tag.pointwise,))
_library.impl("adamw", adamw, "CompositeExplicitAutograd")
_library.define(
    f"adamw.out({_OPERANDS}, *, Tensor(a!) to_param, Tensor(b!) to_mu, Tensor(c!) to_nu, Tensor(d!) to_grad) "
    "-> (Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!))"
)
_library.impl("adamw.out", _into, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::adamw", _shapes, lib=_library)
torch.ops.fx_feather.adamw.default.at_once = _many  # type: ignore[attr-defined]  # for `backend.together`
