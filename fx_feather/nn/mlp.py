"""Feed-forward blocks: SwiGLU, with a gate, and GELU, with biases."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_feather.param import Param, zeros
from fx_feather.trace import constrain

from . import linear


def template(
    embed: int, mlp: int, *, std: float | None = None, out_std: float | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Param]:
    """The two projections up, one of which is the gate, and the one down.

    Args:
        embed: size of the residual stream.
        mlp: size of the hidden layer.
        std: standard deviation of gate and up at the start, without it 1 / sqrt(fan in).
        out_std: the same of down.
        dtype: dtype of the weights.

    >>> {name: p.dims for name, p in template(8, 16).items()}
    {'gate': 'embed mlp', 'up': 'embed mlp', 'down': 'mlp embed'}
    """
    return {
        "gate": linear.template("embed mlp", (embed, mlp), std=std, dtype=dtype),
        "up": linear.template("embed mlp", (embed, mlp), std=std, dtype=dtype),
        "down": linear.template("mlp embed", (mlp, embed), std=out_std, dtype=dtype),
    }


def swiglu(params: dict[str, Any], h: Tensor) -> Tensor:
    """`(silu(h gate) * (h up)) down`.

    Gate and up are two weights rather than one of twice the width: a layout that splits `mlp` then gives each
    rank the gates of its own features.

    Args:
        params: from `template`.
        h: `[batch, seq, embed]`, normalised.

    Returns:
        `[batch, seq, embed]`, to be added to the residual stream.

    Source: Shazeer, GLU Variants Improve Transformer, 2020, eq. 6.

    >>> swiglu({"gate": torch.ones(1, 1), "up": torch.ones(1, 1), "down": torch.ones(1, 1)}, torch.ones(1, 1, 1))
    tensor([[[0.7311]]])
    """
    h = constrain(h, "batch seq embed")
    gated = F.silu(linear.linear(params["gate"], h)) * linear.linear(params["up"], h)
    gated = constrain(gated, "batch seq mlp")
    return constrain(linear.linear(params["down"], gated), "batch residual_seq embed")


def gelu_template(
    embed: int, mlp: int, *, std: float | None = None, out_std: float | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Param]:
    """The projection up and the one down, each with a bias; arguments as for `template`.

    >>> {name: p.dims for name, p in gelu_template(8, 16).items()}
    {'up': 'embed mlp', 'up_bias': 'mlp', 'down': 'mlp embed', 'down_bias': 'embed'}
    """
    return {
        "up": linear.template("embed mlp", (embed, mlp), std=std, dtype=dtype),
        "up_bias": Param("mlp", (mlp,), init=zeros(), dtype=dtype),
        "down": linear.template("mlp embed", (mlp, embed), std=out_std, dtype=dtype),
        "down_bias": Param("embed", (embed,), init=zeros(), dtype=dtype),
    }


def gelu(params: dict[str, Any], h: Tensor) -> Tensor:
    """`gelu(h up + up_bias) down + down_bias`, with the approximation by tanh.

    Args:
        params: from `gelu_template`.
        h: `[batch, seq, embed]`, normalised.

    Returns:
        `[batch, seq, embed]`, to be added to the residual stream.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, section 2; Radford et al., GPT-2, 2019.

    >>> one, zero = torch.ones(1, 1), torch.zeros(1)
    >>> gelu({"up": one, "up_bias": zero, "down": one, "down_bias": zero}, torch.ones(1, 1, 1))
    tensor([[[0.8412]]])
    """
    h = constrain(h, "batch seq embed")
    hidden = constrain(linear.linear(params["up"], h, params["up_bias"]), "batch seq mlp")
    out = linear.linear(params["down"], F.gelu(hidden, approximate="tanh"))
    return constrain(out, "batch residual_seq embed") + params["down_bias"]
