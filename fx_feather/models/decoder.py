"""What all decoders share: the residual stream from tokens to logits, and the loss of the next token."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_feather.nn import attention, balance, embed, norm, rope
from fx_feather.nn.loss import cross_entropy
from fx_feather.nn.rope_scaling import Scaling
from fx_feather.trace import constrain

Layer = Callable[..., Any]
"""`(params, x, *args) -> x`, or `(x, statistics)` of a layer with experts."""


def turns(
    params: dict[str, Any],
    positions: Tensor,
    documents: Tensor | None,
    head_dim: int,
    theta: float,
    scaling: Scaling | None,
    pairing: rope.Pairing = "halves",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What every layer of a rotary decoder reads beside the stream: cosines, sines, and the mask of documents."""
    wide = torch.float64 if params["embed"].dtype == torch.float64 else torch.float32
    cos, sin = rope.tables(positions, head_dim, theta, wide, scaling=scaling, pairing=pairing)
    return cos, sin, None if documents is None else attention.document_mask(documents, positions)


def hidden(
    params: dict[str, Any], tokens: Tensor, layers: Sequence[Layer], args: Sequence[Any], eps: float
) -> tuple[Tensor, list[balance.Statistics]]:
    """The normed residual stream after the last layer, and the statistics of layers with experts.

    Args:
        params: with `embed`, `layers` and `norm`.
        tokens: int`[batch, seq]`.
        layers: a function for each of `params["layers"]`.
        args: what each takes after its parameters and the stream.
        eps: of the last norm.

    Returns:
        `[batch, seq, embed]`, and one dict for each layer that has experts.
    """
    x = constrain(embed.embed(params["embed"], tokens), "batch residual_seq embed")
    statistics = []
    for p, run in zip(params["layers"], layers, strict=True):
        out = run(p, x, *args)
        x, more = out if isinstance(out, tuple) else (out, None)
        if more is not None:
            statistics.append(more)
    return constrain(norm.rms_norm(params["norm"], x, eps), "batch seq embed"), statistics


def logits(params: dict[str, Any], h: Tensor) -> Tensor:
    """`[batch, seq, vocab]`, by the head, or by the embedding where a model has no head of its own."""
    return constrain(embed.unembed(params.get("head", params["embed"]), h), "batch seq vocab")


def penalized(
    params: dict[str, Any],
    h: Tensor,
    statistics: list[balance.Statistics],
    targets: Tensor,
    penalties: balance.Penalties,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss of a decoder with experts: cross-entropy, and the penalties of its routers.

    A penalty is a mean over the batch already. It is multiplied by the count of targets, by which the sum is divided.

    Returns:
        the sum in nats, the count, and `load` `[layers with experts, experts]`, how often each expert was chosen, and
        where there are penalties `penalty`, their sum times the count.
    """
    total, count = cross_entropy(logits(params, h), targets)
    aux = {"load": torch.stack([s["load"] for s in statistics])} if statistics else {}
    extra = balance.penalty(penalties, statistics, *targets.shape)
    if extra is not None:
        aux["penalty"] = extra.to(total.dtype) * count.to(total.dtype)
        total = total + aux["penalty"]
    return total, count, aux
