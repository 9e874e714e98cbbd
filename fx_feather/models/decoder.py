"""What all decoders share: the residual stream from tokens to logits, and the loss of the next token."""

import itertools as it
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_feather.errors import ShapeError, fail
from fx_feather.nn import attention, balance, cache, embed, norm, rope
from fx_feather.nn.loss import cross_entropy
from fx_feather.nn.rope_scaling import Dynamic, Scaling
from fx_feather.trace import constrain

Cache = list[cache.Kept]
"""What is kept of all texts, layer by layer; see `fx_feather.nn.cache`."""

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


def next_logits(params: dict[str, Any], h: Tensor, positions: Tensor) -> Tensor:
    """Logits of the token after the last one of each text, `[batch, vocab]`.

    The head runs on one place of each text instead of all. The last token is the one at the highest position.
    """
    at = positions.argmax(1)[:, None, None].expand(-1, 1, h.shape[-1])
    last = constrain(h.gather(1, at), "batch seq embed")
    return logits(params, last).squeeze(1)


def places(positions: Tensor, kept: Cache | None, length: int, longest: int | None = None) -> cache.Places:
    """Where the tokens of a step are kept, in a cache that is there, or in one that begins with `length` places.

    Args:
        positions: int`[batch, seq]`, see `fx_feather.nn.cache.places`.
        kept: the cache; None where the texts begin.
        length: places of a text, where they begin.
        longest: how many places the model can make use of; None for any number.

    Raises:
        ShapeError: a cache without places, or with more than the model can make use of.
    """
    if kept is not None:
        length = next(iter(kept[0].values())).shape[-2]
    if length < 1 or (longest is not None and length > longest):
        fail(
            ShapeError,
            call="extend(..., length=...)",
            got=f"length={length}",
            number=f"a cache of {length} places, where 1 .. {longest or 'any number'} make sense",
            rule="each token of a text has a place, and what is kept at one must stay right while its text grows: "
            "learned positions are so many, and dynamic RoPE turns all keys anew beyond its trained length",
            fix=f"length={longest}" if longest else "length=the tokens of the longest text, those to come as well",
        )
    return cache.places(positions, length, new=kept is None)


def extended(
    cfg: Any,
    params: dict[str, Any],
    tokens: Tensor,
    positions: Tensor,
    kept: Cache | None,
    length: int,
    layers: Sequence[Layer],
    tables: tuple[Tensor, Tensor],
) -> tuple[Tensor, Cache]:
    """The logits after further tokens of each text, and the cache with these tokens; for rotary decoders.

    Args:
        cfg: with `norm_eps` and `rope_scaling`.
        params: with `embed`, `layers` and `norm`.
        tokens: int`[batch, seq]`.
        positions: int`[batch, seq]`, see `fx_feather.nn.cache.places`.
        kept: the cache; None where the texts begin.
        length: places of a text, where they begin.
        layers: a function `(params, x, kept, where, cos, sin) -> (x, kept)` for each of `params["layers"]`.
        tables: cosines and sines, from `turns`.
    """
    trained = cfg.rope_scaling.trained if isinstance(cfg.rope_scaling, Dynamic) else None
    where = places(positions, kept, length, trained)
    x = constrain(embed.embed(params["embed"], tokens), "batch residual_seq embed")
    now = []
    for p, run, before in zip(params["layers"], layers, kept or it.repeat(None, len(layers)), strict=True):
        x, after = run(p, x, before, where, *tables)
        now.append(after)
    h = constrain(norm.rms_norm(params["norm"], x, cfg.norm_eps), "batch seq embed")
    return next_logits(params, h, positions), now


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
