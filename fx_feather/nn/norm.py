"""Normalisation over the last dim: RMS norm and layer norm, both computed in fp32 or wider."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_feather.param import Param, ones, zeros

NARROW = (torch.bfloat16, torch.float16)


def rms_template(size: int, dim: str = "embed", *, dtype: torch.dtype = torch.float32) -> Param:
    """The scale of an RMS norm over a dim of this name and size.

    >>> rms_template(16).dims
    'embed'
    """
    return Param(dim, (size,), init=ones(), dtype=dtype)


def rms_norm(weight: Tensor, x: Tensor, eps: float = 1e-5) -> Tensor:
    """Divides by the root mean square over the last dim, and scales: `x / sqrt(mean(x²) + eps) * weight`.

    A bf16 or fp16 input is normalised and scaled in fp32, since a sum of squares in 8 bits of mantissa loses
    the small terms, and only the result is rounded.

    Args:
        weight: `[d]`.
        x: `[..., d]`.
        eps: added to the mean square.

    Returns:
        `[..., d]`, in the dtype of `x`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, eq. 4.

    >>> rms_norm(torch.ones(2), torch.tensor([3.0, -3.0]), eps=0.0)
    tensor([ 1., -1.])
    """
    if x.dtype in NARROW:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_template(size: int, dim: str = "embed", *, dtype: torch.dtype = torch.float32) -> dict[str, Param]:
    """The scale and the shift of a layer norm over a dim of this name and size.

    >>> sorted(layer_template(16))
    ['bias', 'weight']
    """
    return {
        "weight": Param(dim, (size,), init=ones(), dtype=dtype),
        "bias": Param(dim, (size,), init=zeros(), dtype=dtype),
    }


def layer_norm(params: dict[str, Tensor], x: Tensor, eps: float = 1e-5) -> Tensor:
    """Subtracts the mean, divides by the standard deviation over the last dim, scales and shifts.

    Args:
        params: `weight [d]` and `bias [d]`.
        x: `[..., d]`. A bf16 or fp16 input is normalised in fp32, and only the result is rounded.
        eps: added to the variance.

    Returns:
        `[..., d]`, in the dtype of `x`.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, eq. 4.

    >>> layer_norm({"weight": torch.ones(2), "bias": torch.zeros(2)}, torch.tensor([1.0, 3.0]), eps=0.0)
    tensor([-1.,  1.])
    """
    weight, bias = params["weight"], params["bias"]
    if x.dtype in NARROW:
        return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps)
