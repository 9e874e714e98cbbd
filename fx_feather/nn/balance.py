"""Balance among experts: statistics that count each token once, losses made of them, and the bias without a loss."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fx_feather.errors import ShapeError, message, raise_all

Statistics = dict[str, Tensor]
"""Of one layer, summed over all tokens of the batch; see `statistics`."""


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """Coefficients of the losses that routers add; a loss of coefficient 0 is not computed.

    Args:
        per_layer: the load-balancing loss of each layer, averaged over layers; see `balance`.
        pooled: the load-balancing loss of all layers' tokens taken together.
        sequence: the load-balancing loss of each sequence alone, averaged over sequences and layers.
        z: the mean square of the log-sum-exp of the logits, which keeps them small (Zoph et al., ST-MoE, 2022, eq. 5).

    Raises:
        ShapeError: coefficients that are negative or not finite, all of them at once.

    >>> Penalties(pooled=0.01)
    Penalties(per_layer=0.0, pooled=0.01, sequence=0.0, z=0.0)
    """

    per_layer: float = 0.0
    pooled: float = 0.0
    sequence: float = 0.0
    z: float = 0.0

    def __post_init__(self) -> None:
        raise_all(
            ShapeError,
            [
                message(
                    call=f"Penalties({name}=...)",
                    got=f"{name}={value!r}",
                    number=f"{name} is {value!r}",
                    rule="the coefficient of a loss is finite and not negative",
                    fix=f"{name}=0.0, or such as 0.001",
                )
                for name, value in vars(self).items()
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf
            ],
        )


NONE = Penalties()
"""No penalties: the loss is cross-entropy alone."""


def statistics(penalties: Penalties, logits: Tensor, shares: Tensor, index: Tensor) -> Statistics:
    """What one layer's router did with the tokens of a batch.

    Args:
        penalties: which losses will be made of it.
        logits: `[batch, seq, experts]`.
        shares: `[batch, seq, experts]`, the scores of a token, with a sum of 1.
        index: int`[batch, seq, k]`.

    Returns:
        `load` `[experts]`, how often each expert was chosen, and what the penalties need of: `share` `[experts]`, the
        sum of shares; `sequence`, the sum over sequences of their balance loss; `z`, the sum over tokens.

    >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 0.0]]])
    >>> statistics(Penalties(pooled=1.0), logits, logits.softmax(-1), torch.tensor([[[0], [1]]]))
    {'load': tensor([1., 1.]), 'share': tensor([1., 1.])}
    """
    seq, experts, k = shares.shape[1], shares.shape[2], index.shape[2]
    chosen = torch.zeros_like(shares).scatter(-1, index, 1.0).sum(1)
    out = {"load": chosen.sum(0)}
    if penalties.per_layer or penalties.pooled:
        out["share"] = shares.sum((0, 1))
    if penalties.sequence:
        out["sequence"] = (chosen * shares.sum(1)).sum() * (experts / (k * seq * seq))
    if penalties.z:
        out["z"] = logits.logsumexp(-1).square().sum()
    return out


def balance(load: Tensor, share: Tensor, tokens: int) -> Tensor:
    """The load-balancing loss: experts times the sum over experts of the part chosen and the mean share.

    `E sum_e (load_e / T) (share_e / T)`. The load has no gradient; the shares are pushed down where it is high. At even
    load it is `k`, the number of experts a token.

    Args:
        load: `[experts]`, how often each was chosen.
        share: `[experts]`, the sum of shares.
        tokens: how many tokens both sum over.

    Source: Fedus et al., Switch Transformer, 2021, eq. 4 to 6 (with k choices a token).

    >>> balance(torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0]), 2)
    tensor(2.)
    """
    return (load * share).sum() * (load.shape[0] / tokens**2)


def penalty(penalties: Penalties, layers: list[Statistics], batch: int, seq: int) -> Tensor | None:
    """The sum of the losses that the routers of all layers add, each times its coefficient.

    It is of the whole batch of the global program: sums over tokens come first and their products after, so that no
    layout changes it. With accumulation it is the mean over microbatches, weighted by their valid targets.

    Args:
        penalties: the coefficients.
        layers: the statistics of each layer.
        batch, seq: sizes of the batch.

    Returns:
        a scalar, or None where there is no penalty or no layer.

    >>> layer = {"load": torch.tensor([2.0, 2.0]), "share": torch.tensor([1.0, 1.0])}
    >>> penalty(Penalties(per_layer=0.5, pooled=0.5), [layer, layer], 1, 2)
    tensor(2.)
    """
    n, tokens = len(layers), batch * seq
    if n == 0:
        return None
    terms = []
    if penalties.per_layer:
        each = [balance(s["load"], s["share"], tokens) for s in layers]
        terms.append(torch.stack(each).sum() * (penalties.per_layer / n))
    if penalties.pooled:
        load, share = (torch.stack([s[name] for s in layers]).sum(0) for name in ("load", "share"))
        terms.append(balance(load, share, n * tokens) * penalties.pooled)
    if penalties.sequence:
        terms.append(torch.stack([s["sequence"] for s in layers]).sum() * (penalties.sequence / (n * batch)))
    if penalties.z:
        terms.append(torch.stack([s["z"] for s in layers]).sum() * (penalties.z / (n * tokens)))
    return torch.stack(terms).sum() if terms else None


def nudged(bias: Tensor, load: Tensor, rate: float = 0.001) -> Tensor:
    """The bias of a router after a step: up by `rate` for experts below the mean load, down for those above.

    The bias takes part in the choice of experts only, so that balance costs no gradient.

    Args:
        bias: `[..., experts]`.
        load: `[..., experts]`, how often each was chosen in the whole step.
        rate: size of the change.

    Source: Wang et al., Auxiliary-Loss-Free Load Balancing, 2024, algorithm 1.

    >>> nudged(torch.zeros(3), torch.tensor([5.0, 1.0, 3.0]))
    tensor([-0.0010,  0.0010,  0.0000])
    """
    return bias + rate * torch.sign(load.mean(-1, keepdim=True) - load).to(bias.dtype)
