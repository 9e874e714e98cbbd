"""The linear map: its weight is stored with the input dims first, as the function reads it from left to right."""

import math

import torch
from torch import Tensor

from fx_feather.param import Param, normal


def template(
    dims: str, shape: tuple[int, ...], *, inputs: int = 1, std: float | None = None, dtype: torch.dtype = torch.float32
) -> Param:
    """The weight of a linear map from the first `inputs` dims to the others.

    Args:
        dims: names of the weight's dims, those of the input first, such as `"embed mlp"`.
        shape: their sizes.
        inputs: how many leading dims are summed over.
        std: standard deviation at the start; without it 1 / sqrt(fan in), which keeps the variance of the
            input (LeCun et al., Efficient BackProp, 1998, eq. 16).
        dtype: dtype of the weight.

    >>> template("embed mlp", (4, 8)).shape
    (4, 8)
    """
    if std is None:
        std = 1 / math.sqrt(math.prod(shape[:inputs]))
    return Param(dims, shape, init=normal(std), dtype=dtype)


def linear(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies the last dim of `x` by `weight`, and adds `bias` where there is one.

    Args:
        weight: `[in, out]`. It is not transposed as in `torch.nn.Linear`.
        x: `[..., in]`.
        bias: `[out]`.

    Returns:
        `[..., out]`.

    >>> linear(torch.ones(3, 2), torch.ones(1, 3))
    tensor([[3., 3.]])
    """
    out = x @ weight
    return out if bias is None else out + bias
