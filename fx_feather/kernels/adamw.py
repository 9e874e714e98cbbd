"""AdamW's whole step of one leaf as one operator, on PyTorch's fused kernel."""

from typing import Any

import torch
from torch import Tensor


def adamw(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    nu: Tensor,
    lr: Tensor,
    step: Tensor,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The parameter and the two moments after one step; nothing that comes in is written to.

    The kernel reads each element once and writes it once, where the formula in operators of torch takes about fifteen
    passes. Its results are those of the formula but for rounding.

    Args:
        param, grad, mu, nu: of one shape, dtype and device.
        lr: float[], the learning rate.
        step: float[], the number of this step, 1 at the first.
        b1, b2: decays of the moments.
        eps: added to the root of the second moment.
        decay: of the parameter, before the learning rate.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.

    >>> one = torch.ones(2)
    >>> adamw(one, one, 0 * one, 0 * one, torch.tensor(0.1), torch.tensor(1.0), 0.9, 0.95, 1e-8, 0.0)[0]
    tensor([0.9000, 0.9000])
    """
    to = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (param, mu, nu)]
    return _into(param, grad, mu, nu, lr, step, b1, b2, eps, decay, to_param=to[0], to_mu=to[1], to_nu=to[2])


def _into(
    param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor, *rest: Any, to_param: Tensor, to_mu: Tensor, to_nu: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`adamw`, its results written into contiguous tensors; each may be the operand whose new value it takes."""
    lr, step, b1, b2, eps, decay = rest
    for to, x in ((to_param, param), (to_mu, mu), (to_nu, nu)):
        if to.data_ptr() != x.data_ptr():
            to.copy_(x)
    # The kernel for CUDA reads a rate in float32, whatever it is given.
    lr = lr if lr.device.type == "cpu" else lr.to(torch.float32)
    # Lists of one leaf each; no maximum of the second moments.
    torch.ops.aten._fused_adamw_.tensor_lr(
        [to_param],
        [grad.contiguous()],
        [to_mu],
        [to_nu],
        [],
        [step.to(torch.float32)],  # what the kernel reads, whatever it is given
        lr=lr,
        beta1=b1,
        beta2=b2,
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    return to_param, to_mu, to_nu


def _shapes(param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return param.new_empty(param.shape), mu.new_empty(mu.shape), nu.new_empty(nu.shape)


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define(
    "adamw(Tensor param, Tensor grad, Tensor mu, Tensor nu, Tensor lr, Tensor step, float b1, float b2, float eps, "
    "float decay) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pointwise,),
)
_library.impl("adamw", adamw, "CompositeExplicitAutograd")
_library.define(
    "adamw.out(Tensor param, Tensor grad, Tensor mu, Tensor nu, Tensor lr, Tensor step, float b1, float b2, float eps, "
    "float decay, *, Tensor(a!) to_param, Tensor(b!) to_mu, Tensor(c!) to_nu) -> (Tensor(a!), Tensor(b!), Tensor(c!))"
)
_library.impl("adamw.out", _into, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::adamw", _shapes, lib=_library)
