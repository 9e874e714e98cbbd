"""Rotary position embedding, from explicit positions: no table is hidden in a buffer."""

from typing import Literal

import torch
from torch import Tensor

from .rope_scaling import Scaling, plain

Pairing = Literal["halves", "neighbours"]
"""Which two features are one complex number: `j` with `j + dim / 2`, or `2j` with `2j + 1`."""


def tables(
    positions: Tensor,
    head_dim: int,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    *,
    scaling: Scaling | None = None,
    pairing: Pairing = "halves",
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of the angles by which the heads at each position are turned.

    Wanted is a map `q -> f(q, m)` of a query at position `m` whose scores depend on the relative position
    only, `<f(q, m), f(k, n)> = g(q, k, n - m)`. Take two features as one complex number. The score is
    `Re(f(q, m) conj f(k, n))`, and `f(q, m) = q exp(i m w)` gives `Re(q conj(k) exp(i (m - n) w))`: positions
    enter as `m - n` alone, and a turn keeps the length of `q`. So each pair of features is turned by the
    position times a frequency `w` of its own. With `w_j = theta^(-2j / head_dim)` the wavelengths are spread
    geometrically from 2 pi to 2 pi theta, and heads can read near and far distances.

    Features are paired by halves, `j` with `j + head_dim / 2`, or as neighbours, `2j` with `2j + 1`, as in
    RoFormer: the same function up to a fixed permutation of the features of q and k, which scores do not see, but
    halves need no strided access. A checkpoint holds its weights for one of the two.

    The frequencies are arithmetic on `arange` inside the function, so whatever it reads is an argument.

    Args:
        positions: int`[batch, seq]`, any order, equal positions allowed.
        head_dim: how many features are turned, even.
        theta: base of the wavelengths.
        dtype: dtype of the tables and of the angles; fp32 or wider, since bf16 counts exactly to 256 only.
        scaling: for texts longer than those of training, from `fx_feather.nn.rope_scaling`.
        pairing: `halves` or `neighbours`, the same as in `rotate`.

    Returns:
        `cos` and `sin`, both `[batch, 1, seq, head_dim]`; the 1 stands for heads. The first feature of each pair has
        its sine negated, as `rotate` needs it.

    Source: Su et al., RoFormer, 2021, eq. 12 to 15 and 34.

    >>> cos, sin = tables(torch.tensor([[0, 1]]), head_dim=2)
    >>> cos.shape, sin[0, 0, 1]
    (torch.Size([1, 1, 2, 2]), tensor([-0.8415,  0.8415]))
    """
    if scaling is None:
        frequencies = plain(theta, head_dim, dtype, positions.device)
    else:
        frequencies = scaling.frequencies(theta, head_dim, dtype, positions.max() + 1)
    angles = positions[:, None, :, None].to(dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.factor_on_heads != 1:
        cos, sin = cos * scaling.factor_on_heads, sin * scaling.factor_on_heads
    if pairing == "halves":
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return torch.stack([cos, cos], dim=-1).flatten(-2), torch.stack([-sin, sin], dim=-1).flatten(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing = "halves") -> Tensor:
    """Turns each pair of features of `x` by the angles of its position.

    With `x = [a, b]` in halves this is `[a cos - b sin, b cos + a sin]`: the other one of a pair is found
    by rolling by half the length, and the sign is in the table, so that four operators do it. Neighbours change
    places in the same way.

    Args:
        x: `[batch, heads, seq, head_dim]`.
        cos, sin: `[batch, 1, seq, head_dim]`, from `tables` with the same pairing.
        pairing: `halves` or `neighbours`.

    Returns:
        like `x`; where the tables are wider than `x`, the arithmetic is in their dtype.

    >>> cos, sin = tables(torch.tensor([[1]]), head_dim=2)
    >>> rotate(torch.tensor([[[[1.0, 0.0]]]]), cos, sin)
    tensor([[[[0.5403, 0.8415]]]])
    """
    if pairing == "halves":
        other = torch.roll(x, x.shape[-1] // 2, dims=-1)
    else:
        other = x.unflatten(-1, (x.shape[-1] // 2, 2)).flip(-1).flatten(-2)
    out = x * cos + other * sin
    return out if out.dtype == x.dtype else out.to(x.dtype)
