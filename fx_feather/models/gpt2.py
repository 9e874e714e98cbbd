"""GPT-2: a decoder of pre-normed blocks with learned positions, layer norms, biases and GELU, its head tied."""

import dataclasses
import functools as ft
import itertools as it
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fx_feather.nn import attention, cache, embed, mlp, norm
from fx_feather.nn.loss import cross_entropy
from fx_feather.param import Param, normal
from fx_feather.trace import block, constrain

from . import decoder
from .checks import Problems, fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Sizes and constants of a GPT-2.

    Args:
        vocab: number of tokens.
        context: number of positions, the longest text.
        layers: number of blocks.
        embed: size of the residual stream, a multiple of `heads`.
        heads: number of heads.
        mlp: size of the feed-forward block's hidden layer; without it four times `embed`.
        norm_eps: added to the variance in every norm.
        dtype: dtype of the parameters.
        init_std: standard deviation of the weights at the start.

    Raises:
        ShapeError: sizes that make no model, all of them at once.

    >>> GPT2Config(vocab=256, context=32, layers=2, embed=64, heads=4).mlp_size
    256
    """

    vocab: int = 50257
    context: int = 1024
    layers: int = 12
    embed: int = 768
    heads: int = 12
    mlp: int | None = None
    norm_eps: float = 1e-5
    dtype: torch.dtype = torch.float32
    init_std: float = 0.02

    def __post_init__(self) -> None:
        problems = Problems(self)
        problems.sizes("vocab context layers embed heads")
        problems.sizes("mlp", optional=True)
        problems.constants("norm_eps init_std")
        problems.dtype()
        problems.divides("embed", "heads", "the heads share the residual stream's size in equal parts")
        problems.raise_all()

    @property
    def mlp_size(self) -> int:
        """Size of the feed-forward block's hidden layer."""
        return 4 * self.embed if self.mlp is None else self.mlp


def template(cfg: GPT2Config) -> dict[str, Any]:
    """The parameters of a model, as a pytree of `Param`.

    The two projections of a layer that write to the residual stream start smaller by sqrt(2 layers), so that
    the stream's variance at the end doesn't grow with depth (Radford et al., GPT-2, 2019, section 2.3).

    >>> sorted(template(GPT2Config(vocab=256, context=32, layers=2, embed=64, heads=4)))
    ['embed', 'layers', 'norm', 'positions']
    """
    std, out_std, dtype = cfg.init_std, cfg.init_std / math.sqrt(2 * cfg.layers), cfg.dtype

    def one_layer() -> dict[str, Any]:
        starts: dict[str, Any] = {"std": std, "out_std": out_std, "dtype": dtype}
        return {
            "attention_norm": norm.layer_template(cfg.embed, dtype=dtype),
            "attention": attention.biased_template(cfg.embed, cfg.heads, cfg.embed // cfg.heads, **starts),
            "mlp_norm": norm.layer_template(cfg.embed, dtype=dtype),
            "mlp": mlp.gelu_template(cfg.embed, cfg.mlp_size, **starts),
        }

    return {
        "embed": embed.template(cfg.vocab, cfg.embed, std=std, dtype=dtype),
        "positions": Param("_ embed", (cfg.context, cfg.embed), init=normal(std), dtype=dtype),
        "layers": [one_layer() for _ in range(cfg.layers)],
        "norm": norm.layer_template(cfg.embed, dtype=dtype),
    }


def layer(cfg: GPT2Config, p: dict[str, Any], x: Tensor, mask: Tensor | None = None) -> Tensor:
    """One block; arguments as for `fx_feather.models.llama.layer`."""
    x = x + attention.biased(p["attention"], norm.layer_norm(p["attention_norm"], x, cfg.norm_eps), mask)
    return fed(cfg, p, x)


def fed(cfg: GPT2Config, p: dict[str, Any], x: Tensor) -> Tensor:
    """The second half of a block, after attention."""
    return x + mlp.gelu(p["mlp"], norm.layer_norm(p["mlp_norm"], x, cfg.norm_eps))


def embedded(params: dict[str, Any], tokens: Tensor, positions: Tensor) -> Tensor:
    """The stream before the first block: the sum of what each token and each position stands for."""
    x = constrain(embed.embed(params["embed"], tokens), "batch residual_seq embed")
    return x + constrain(embed.embed(params["positions"], positions), "batch residual_seq embed")


def forward(
    cfg: GPT2Config, params: dict[str, Any], tokens: Tensor, positions: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Logits of the next token at each place of each sequence; see `fx_feather.models.llama.forward`.

    Positions lie in `0 .. context - 1`.

    >>> from fx_feather.param import init
    >>> cfg = GPT2Config(vocab=256, context=8, layers=1, embed=8, heads=2)
    >>> forward(cfg, init(template(cfg)), torch.tensor([[7, 8, 9]]), torch.arange(3)[None]).shape
    torch.Size([1, 3, 256])
    """
    mask = None if documents is None else attention.document_mask(documents, positions)
    x = embedded(params, tokens, positions)
    run = block(ft.partial(layer, cfg), name="layer")
    for p in params["layers"]:
        x = run(p, x, mask)
    h = constrain(norm.layer_norm(params["norm"], x, cfg.norm_eps), "batch seq embed")
    return decoder.logits(params, h)


def cache_template(
    cfg: GPT2Config, batch: int, length: int, dtype: torch.dtype | None = None
) -> list[dict[str, Param]]:
    """A cache of keys and values, as a pytree of `Param`; see `fx_feather.models.llama.cache_template`."""
    sizes = (batch, cfg.heads, length, cfg.embed // cfg.heads)
    return [cache.heads_template(*sizes, name="heads", dtype=dtype or cfg.dtype)] * cfg.layers


def extend_layer(
    cfg: GPT2Config, p: dict[str, Any], x: Tensor, kept: cache.Kept | None, where: cache.Places
) -> tuple[Tensor, cache.Kept]:
    """`layer`, with what is kept of earlier tokens."""
    h = norm.layer_norm(p["attention_norm"], x, cfg.norm_eps)
    out, now = attention.biased_cached(p["attention"], h, where, kept)
    return fed(cfg, p, x + out), now


def extend(
    cfg: GPT2Config,
    params: dict[str, Any],
    tokens: Tensor,
    positions: Tensor,
    kept: decoder.Cache | None = None,
    length: int = 0,
) -> tuple[Tensor, decoder.Cache]:
    """The logits after further tokens, and the cache with them; see `fx_feather.models.llama.extend`."""
    where = decoder.places(positions, kept, length, cfg.context)
    # Padding has no row in the table.
    x = embedded(params, tokens, positions.clamp(min=0))
    run, now = block(ft.partial(extend_layer, cfg), name="layer"), []
    for p, before in zip(params["layers"], kept or it.repeat(None, cfg.layers), strict=True):
        x, after = run(p, x, before, where)
        now.append(after)
    h = constrain(norm.layer_norm(params["norm"], x, cfg.norm_eps), "batch seq embed")
    return decoder.next_logits(params, h, positions), now


def loss(cfg: GPT2Config) -> Callable[[dict[str, Any], dict[str, Tensor]], tuple[Tensor, Tensor]]:
    """The loss function of a model: `loss_fn(params, batch) -> (sum, count)`; see `fx_feather.models.llama.loss`."""

    def loss_fn(params: dict[str, Any], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, positions, documents, targets = fields(batch)
        return cross_entropy(forward(cfg, params, tokens, positions, documents), targets)

    return loss_fn
