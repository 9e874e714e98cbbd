"""Routers: which experts each token goes to, and with what weight. A family composes its own from these."""

import torch
from torch import Tensor

from fx_feather.param import Param, normal, zeros

from .norm import NARROW


def template(
    embed: int, experts: int, *, bias: bool = False, std: float = 0.02, dtype: torch.dtype = torch.float32
) -> dict[str, Param]:
    """A vector per expert, and where asked for a bias that chooses experts but doesn't weigh them.

    Every token is compared with all experts, so that no layout splits them here: their dim has no name.

    Args:
        embed: size of the residual stream.
        experts: number of experts.
        bias: add the bias of balancing without a loss. No gradient reaches it, see `fx_feather.nn.balance.nudged`.
        std: standard deviation of the weight at the start.
        dtype: dtype of the weight. The bias is fp32 or wider, since it moves in small steps.

    >>> template(8, 4, bias=True)
    {'weight': Param('embed _', (8, 4), init=normal(std=0.02), dtype=torch.float32), 'bias': Param('_', (4,), init=zeros(), dtype=torch.float32)}
    """  # noqa: E501
    params = {"weight": Param("embed _", (embed, experts), init=normal(std), dtype=dtype)}
    if bias:
        wide = torch.float32 if dtype in NARROW else dtype
        params["bias"] = Param("_", (experts,), init=zeros(), dtype=wide)
    return params


def logits(weight: Tensor, h: Tensor) -> Tensor:
    """The product of each token with the vector of each expert, in fp32 or wider.

    Two experts that bf16 can't tell apart would be chosen by rounding.

    Args:
        weight: `[embed, experts]`.
        h: `[batch, seq, embed]`.

    Returns:
        `[batch, seq, experts]`.

    >>> logits(torch.eye(2), torch.tensor([[[3.0, 4.0]]]))
    tensor([[[3., 4.]]])
    """
    if h.dtype in NARROW:
        h, weight = h.float(), weight.float()
    return h @ weight


def within_groups(choice: Tensor, groups: int, kept: int, best: int, fill: float) -> Tensor:
    """Keeps the values of the experts in the best groups, so that a token goes to few devices.

    Experts are cut into groups side by side. A group is worth the sum of its `best` largest values.

    Args:
        choice: `[batch, seq, experts]`, what experts are chosen by.
        groups: number of groups.
        kept: how many of them are kept.
        best: how many experts tell what a group is worth: 1 in DeepSeek-V2, 2 in V3.
        fill: value of all other experts.

    Source: DeepSeek-V2, 2024, section 2.2.2; DeepSeek-V3, 2024, section 2.1.2.

    >>> within_groups(torch.tensor([[[1.0, 5.0, 3.0, 4.0]]]), groups=2, kept=1, best=2, fill=0.0)
    tensor([[[0., 0., 3., 4.]]])
    """
    experts = choice.shape[-1]
    by_group = choice.detach().unflatten(-1, (groups, experts // groups))
    worth = by_group.topk(best, dim=-1).values.sum(-1)
    chosen = worth.topk(kept, dim=-1).indices
    inside = torch.zeros_like(worth).scatter(-1, chosen, 1.0) > 0
    every = inside.unsqueeze(-1).expand(*inside.shape, experts // groups).flatten(-2)
    return torch.where(every, choice, fill)


def top(scores: Tensor, k: int, choice: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `k` experts of each token, and their scores.

    Args:
        scores: `[batch, seq, experts]`, the weights before they are scaled.
        k: experts a token.
        choice: `[batch, seq, experts]`, what experts are chosen by, if by something else.

    Returns:
        weights `[batch, seq, k]` and index int`[batch, seq, k]`, the best expert first.

    >>> top(torch.tensor([[[0.1, 0.6, 0.3]]]), 2)
    (tensor([[[0.6000, 0.3000]]]), tensor([[[1, 2]]]))
    """
    index = (scores if choice is None else choice).detach().topk(k, dim=-1).indices
    return scores.gather(-1, index), index


def normalized(weights: Tensor, eps: float = 0.0) -> Tensor:
    """Weights that sum to 1 for each token.

    >>> normalized(torch.tensor([1.0, 3.0]))
    tensor([0.2500, 0.7500])
    """
    return weights / (weights.sum(-1, keepdim=True) + eps)
