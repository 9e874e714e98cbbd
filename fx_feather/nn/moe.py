"""Mixture of experts: feed-forward blocks of which each token uses a few, dropless or with a limited capacity."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_feather import kernels
from fx_feather.param import Param
from fx_feather.trace import constrain, tracing

from . import linear


def template(
    embed: int,
    expert_mlp: int,
    experts: int,
    *,
    std: float | None = None,
    out_std: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Param]:
    """The projections of all experts, each stacked in one weight.

    Args:
        embed: size of the residual stream.
        expert_mlp: size of an expert's hidden layer.
        experts: number of experts.
        std: standard deviation of gate and up at the start, without it 1 / sqrt(fan in).
        out_std: the same of down.
        dtype: dtype of the weights.

    >>> {name: (p.dims, p.shape) for name, p in template(8, 16, 4).items()}["down"]
    ('expert expert_mlp embed', (4, 16, 8))
    """
    std = 1 / math.sqrt(embed) if std is None else std
    out_std = 1 / math.sqrt(expert_mlp) if out_std is None else out_std
    up = ("expert embed expert_mlp", (experts, embed, expert_mlp))
    return {
        "gate": linear.template(*up, std=std, dtype=dtype),
        "up": linear.template(*up, std=std, dtype=dtype),
        "down": linear.template(
            "expert expert_mlp embed", (experts, expert_mlp, embed), std=out_std, dtype=dtype
        ),
    }  # fmt: skip


def dropless(params: dict[str, Any], h: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """The weighted sum of the experts chosen for each token, all of them.

    Args:
        params: from `template`.
        h: `[batch, seq, embed]`, normalised.
        weights: `[batch, seq, k]`.
        index: int`[batch, seq, k]`.

    Returns:
        `[batch, seq, embed]`, to be added to the residual stream. See `fx_feather.kernels.experts`.

    >>> one, two = torch.ones(2, 1, 1), torch.ones(1, 1, 2)
    >>> dropless({"gate": one, "up": one, "down": one}, torch.ones(1, 1, 1), two, torch.tensor([[[0, 1]]]))
    tensor([[[1.4621]]])
    """
    run = torch.ops.fx_feather.experts if tracing() else kernels.experts
    out = run(h, index, weights.to(h.dtype), params["gate"], params["up"], params["down"])
    return constrain(out, "batch residual_seq embed")


def mixture(
    params: dict[str, Any], h: Tensor, weights: Tensor, index: Tensor, capacity_factor: float | None = None
) -> Tensor:
    """The experts chosen for each token, `dropless` or, with a factor, `limited`; arguments as for these.

    >>> one, two = torch.ones(2, 1, 1), torch.ones(1, 1, 2)
    >>> mixture({"gate": one, "up": one, "down": one}, torch.ones(1, 1, 1), two, torch.tensor([[[0, 1]]]), 2.0)
    tensor([[[1.4621]]])
    """
    if capacity_factor is None:
        return dropless(params, h, weights, index)
    size = capacity(capacity_factor, h.shape[1], index.shape[-1], params["gate"].shape[0])
    return limited(params, h, weights, index, size)[0]


def loop(params: dict[str, Any], h: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """`dropless`, written as a loop in which every expert computes every token: the reference.

    >>> one, two = torch.ones(2, 1, 1), torch.ones(1, 1, 2)
    >>> loop({"gate": one, "up": one, "down": one}, torch.ones(1, 1, 1), two, torch.tensor([[[0, 1]]]))
    tensor([[[1.4621]]])
    """
    out = torch.zeros_like(h)
    for e, (gate, up, down) in enumerate(zip(params["gate"], params["up"], params["down"], strict=True)):
        weight = torch.where(index == e, weights, 0.0).sum(-1, keepdim=True).to(h.dtype)
        out = out + weight * ((F.silu(h @ gate) * (h @ up)) @ down)
    return out


def capacity(factor: float, seq: int, k: int, experts: int) -> int:
    """How many tokens of one sequence an expert takes: `factor` times its even share, rounded up.

    It is counted per sequence of the global program, so that neither the layout nor the other sequences of a batch
    change what is dropped.

    Source: Lepikhin et al., GShard, 2020, algorithm 1 (with a sequence as the group).

    >>> capacity(1.25, seq=8, k=2, experts=4)
    5
    """
    return min(seq, math.ceil(factor * seq * k / experts))


def limited(params: dict[str, Any], h: Tensor, weights: Tensor, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The experts chosen for each token, as long as they have room: a choice beyond an expert's capacity is dropped.

    Rooms are given in the order of the sequence, and within a token to its best expert first. All experts then
    compute the same number of rows, empty ones too, in three batched products.

    Args:
        params: from `template`.
        h: `[batch, seq, embed]`, normalised.
        weights: `[batch, seq, k]`.
        index: int`[batch, seq, k]`.
        size: tokens of a sequence that an expert takes, from `capacity`.

    Returns:
        `[batch, seq, embed]`, to be added to the residual stream, and bool`[batch, seq, k]`: which choices were kept.

    >>> one = {name: torch.ones(1, 1, 1) for name in ("gate", "up", "down")}
    >>> out, kept = limited(one, torch.ones(1, 3, 1), torch.ones(1, 3, 1), torch.zeros(1, 3, 1, dtype=torch.long), 2)
    >>> out.flatten(), kept.flatten()
    (tensor([0.7311, 0.7311, 0.0000]), tensor([ True,  True, False]))
    """  # fmt: skip
    (batch, seq, embed), k, experts = h.shape, index.shape[-1], params["gate"].shape[0]
    choices = index.flatten(1)
    # How many earlier choices of the sequence took a room of the same expert.
    each = (choices.unsqueeze(-1) == torch.arange(experts, device=h.device)).long()
    taken = torch.cumsum(each, 1).gather(-1, choices.unsqueeze(-1)).squeeze(-1) - 1
    kept = taken < size
    nowhere = experts * size
    room = torch.where(kept, choices * size + taken, nowhere)
    token = torch.arange(seq * k, device=h.device).div(k, rounding_mode="floor").expand(batch, seq * k)
    # A room that nobody takes holds the token after the last, which is zero.
    empty = torch.zeros_like(room[:, :1]).expand(batch, nowhere + 1) + seq
    held = empty.scatter(1, room, token)[:, :nowhere]
    padded = torch.cat([h, torch.zeros_like(h[:, :1])], dim=1)
    rows = padded.gather(1, held.unsqueeze(-1).expand(batch, nowhere, embed)).unflatten(1, (experts, size))
    rows = constrain(rows, "batch expert _ embed")
    gated = F.silu(torch.einsum("xecd,edf->xecf", rows, params["gate"]))
    hidden = constrain(gated * torch.einsum("xecd,edf->xecf", rows, params["up"]), "batch expert _ expert_mlp")
    outs = torch.einsum("xecf,efd->xecd", hidden, params["down"]).flatten(1, 2)
    outs = constrain(outs, "batch _ embed")
    outs = torch.cat([outs, torch.zeros_like(outs[:, :1])], dim=1)
    back = outs.gather(1, room.unsqueeze(-1).expand(batch, seq * k, embed)).unflatten(1, (seq, k))
    out = (back * weights.to(h.dtype).unsqueeze(-1)).sum(2)
    return constrain(out, "batch residual_seq embed"), kept.unflatten(1, (seq, k))
