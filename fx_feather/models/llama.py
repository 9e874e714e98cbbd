"""The Llama family: a decoder of pre-normed blocks with grouped-query attention and SwiGLU.

With `qk_norm` it is Qwen3's dense decoder. It is written for one device; how it is split is a layout's matter.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fx_feather.errors import ShapeError, message, raise_all
from fx_feather.nn import attention, cache, embed, mlp, norm
from fx_feather.nn.loss import cross_entropy
from fx_feather.nn.rope_scaling import Scaling
from fx_feather.param import Param
from fx_feather.trace import block

from . import decoder
from .checks import Problems, fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of a Llama-style decoder.

    Args:
        vocab: number of tokens.
        layers: number of blocks.
        embed: size of the residual stream.
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of `heads`.
        mlp: size of the feed-forward block's hidden layer.
        head_dim: size of one head, even; without it `embed / heads`.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: for texts longer than those of training, from `fx_feather.nn.rope_scaling`.
        norm_eps: added to the mean square in every norm.
        qk_norm: normalise queries and keys.
        tied: the head is the embedding's table.
        dtype: dtype of the parameters.
        init_std: standard deviation of the weights at the start.

    Raises:
        ShapeError: sizes that make no model, all of them at once.

    >>> LlamaConfig(vocab=256, layers=2, embed=64, heads=4, kv_heads=2, mlp=128).head_size
    16
    """

    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tied: bool = False
    dtype: torch.dtype = torch.float32
    init_std: float = 0.02

    def __post_init__(self) -> None:
        problems = Problems(self)
        problems.sizes("vocab layers embed heads kv_heads mlp")
        problems.sizes("head_dim", optional=True)
        problems.constants("rope_theta norm_eps init_std")
        problems.dtype()
        problems.heads()
        problems.raise_all()

    @property
    def head_size(self) -> int:
        """Size of one head."""
        return self.embed // self.heads if self.head_dim is None else self.head_dim


def template(cfg: LlamaConfig) -> dict[str, Any]:
    """The parameters of a model, as a pytree of `Param`.

    The two projections of a layer that write to the residual stream start smaller by sqrt(2 layers), so that
    the stream's variance at the end doesn't grow with depth (Radford et al., GPT-2, 2019, section 2.3).

    >>> cfg = LlamaConfig(vocab=256, layers=2, embed=64, heads=4, kv_heads=2, mlp=128)
    >>> template(cfg)["layers"][1]["mlp"]["up"].shape
    (64, 128)
    """
    std, out_std, dtype = cfg.init_std, cfg.init_std / math.sqrt(2 * cfg.layers), cfg.dtype

    def one_layer() -> dict[str, Any]:
        return {
            "attention_norm": norm.rms_template(cfg.embed, dtype=dtype),
            "attention": attention.template(
                cfg.embed,
                cfg.heads,
                cfg.kv_heads,
                cfg.head_size,
                qk_norm=cfg.qk_norm,
                std=std,
                out_std=out_std,
                dtype=dtype,
            ),
            "mlp_norm": norm.rms_template(cfg.embed, dtype=dtype),
            "mlp": mlp.template(cfg.embed, cfg.mlp, std=std, out_std=out_std, dtype=dtype),
        }

    params: dict[str, Any] = {
        "embed": embed.template(cfg.vocab, cfg.embed, std=std, dtype=dtype),
        "layers": [one_layer() for _ in range(cfg.layers)],
        "norm": norm.rms_template(cfg.embed, dtype=dtype),
    }
    if not cfg.tied:
        params["head"] = embed.template(cfg.vocab, cfg.embed, std=std, dtype=dtype)
    return params


def layer(
    cfg: LlamaConfig, p: dict[str, Any], x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None
) -> Tensor:
    """One block: attention, then feed-forward, each on a normed copy and added to the residual stream.

    Args:
        cfg: the model's config.
        p: one of `template(cfg)["layers"]`, as tensors.
        x: the residual stream, `[batch, residual_seq, embed]`.
        cos, sin: `[batch, 1, seq, head_dim]`, from `rope.tables`.
        mask: bool`[batch, 1, seq, seq]`, from `attention.document_mask`.

    Returns:
        like `x`.
    """
    h = norm.rms_norm(p["attention_norm"], x, cfg.norm_eps)
    x = x + attention.attention(p["attention"], h, cos, sin, mask, eps=cfg.norm_eps)
    return fed(cfg, p, x)


def fed(cfg: LlamaConfig, p: dict[str, Any], x: Tensor) -> Tensor:
    """The second half of a block, after attention."""
    return x + mlp.swiglu(p["mlp"], norm.rms_norm(p["mlp_norm"], x, cfg.norm_eps))


def hidden(
    cfg: LlamaConfig, params: dict[str, Any], tokens: Tensor, positions: Tensor, documents: Tensor | None = None
) -> Tensor:
    """The normed residual stream after the last block, `[batch, seq, embed]`; arguments as for `forward`."""
    args = decoder.turns(params, positions, documents, cfg.head_size, cfg.rope_theta, cfg.rope_scaling)
    run = block(ft.partial(layer, cfg), name="layer")
    return decoder.hidden(params, tokens, [run] * cfg.layers, args, cfg.norm_eps)[0]


def forward(
    cfg: LlamaConfig, params: dict[str, Any], tokens: Tensor, positions: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Logits of the next token at each place of each sequence.

    Args:
        cfg: the model's config.
        params: like `template(cfg)`, as tensors.
        tokens: int`[batch, seq]`, in `0 .. vocab - 1`.
        positions: int`[batch, seq]`, where each token stands in its text; only differences matter.
        documents: int`[batch, seq]`, for sequences of several documents, each with positions of its own: equal for the
            tokens of one document. No token reads another document. Without it a sequence is one text, in order.

    Returns:
        `[batch, seq, vocab]`.

    >>> from fx_feather.param import init
    >>> cfg = LlamaConfig(vocab=256, layers=1, embed=8, heads=2, kv_heads=1, mlp=16)
    >>> tokens, positions = torch.tensor([[7, 8, 9]]), torch.arange(3)[None]
    >>> forward(cfg, init(template(cfg)), tokens, positions).shape
    torch.Size([1, 3, 256])
    """
    return decoder.logits(params, hidden(cfg, params, tokens, positions, documents))


def loss(cfg: LlamaConfig) -> Callable[[dict[str, Any], dict[str, Tensor]], tuple[Tensor, Tensor]]:
    """The loss function of a model: `loss_fn(params, batch) -> (sum, count)`.

    A batch is `tokens`, `targets`, `positions` and, where sequences hold several, `documents`, each
    int`[batch, seq]`; targets of -100 don't count. The sum is in nats over the `count` valid targets, see
    `fx_feather.nn.loss.cross_entropy`.

    >>> from fx_feather.param import init
    >>> cfg = LlamaConfig(vocab=256, layers=1, embed=8, heads=2, kv_heads=1, mlp=16)
    >>> batch = {name: torch.tensor([[0, 1, 2]]) for name in ("tokens", "targets", "positions")}
    >>> total, count = loss(cfg)(init(template(cfg)), batch)
    >>> abs(total / count - math.log(256)).item() < 0.2, count
    (True, tensor(3))
    """

    def loss_fn(params: dict[str, Any], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, positions, documents, targets = fields(batch)
        return cross_entropy(forward(cfg, params, tokens, positions, documents), targets)

    return loss_fn


def cache_template(
    cfg: LlamaConfig, batch: int, length: int, dtype: torch.dtype | None = None
) -> list[dict[str, Param]]:
    """A cache of keys and values, as a pytree of `Param`; see `fx_feather.nn.cache`.

    Args:
        cfg: the model's config.
        batch: number of texts.
        length: places of a text, for its prompt and what is added to it.
        dtype: dtype of the cache; without it that of the parameters.

    >>> cfg = LlamaConfig(vocab=256, layers=2, embed=64, heads=4, kv_heads=2, mlp=128)
    >>> cache.bytes_per_token(cache_template(cfg, batch=1, length=8))
    512
    """
    one = cache.heads_template(batch, cfg.kv_heads, length, cfg.head_size, dtype=dtype or cfg.dtype)
    return [one] * cfg.layers


def extend_layer(
    cfg: LlamaConfig,
    p: dict[str, Any],
    x: Tensor,
    kept: cache.Kept | None,
    where: cache.Places,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, cache.Kept]:
    """`layer`, with what is kept of earlier tokens."""
    h = norm.rms_norm(p["attention_norm"], x, cfg.norm_eps)
    out, now = attention.cached(p["attention"], h, cos, sin, where, kept, eps=cfg.norm_eps)
    return fed(cfg, p, x + out), now


def extend(
    cfg: LlamaConfig,
    params: dict[str, Any],
    tokens: Tensor,
    positions: Tensor,
    kept: decoder.Cache | None = None,
    length: int = 0,
) -> tuple[Tensor, decoder.Cache]:
    """The logits of the next token after further tokens of each text, and the cache with these tokens.

    Without a cache the tokens are prompts, and a cache of `length` places is made. With it they are what follows,
    commonly one token a text. Either way the logits are those of `forward` on whole texts.

    Args:
        cfg: the model's config.
        params: like `template(cfg)`, as tensors.
        tokens: int`[batch, seq]`.
        positions: int`[batch, seq]`, where each token stands in its text, in `0 .. length - 1`; below 0 for padding.
        kept: like `cache_template(cfg, batch, length)`, as tensors.
        length: places of a text, where there is no cache yet.

    Returns:
        `[batch, vocab]`, and the cache.

    Raises:
        ShapeError: a cache without places, or longer than what dynamic RoPE was trained on.

    >>> from fx_feather.param import init
    >>> cfg = LlamaConfig(vocab=256, layers=1, embed=8, heads=2, kv_heads=1, mlp=16)
    >>> params = init(template(cfg))
    >>> _, kept = extend(cfg, params, torch.tensor([[7, 8, 9]]), torch.tensor([[0, 1, 2]]), length=10)
    >>> logits, kept = extend(cfg, params, torch.tensor([[10]]), torch.tensor([[3]]), kept)
    >>> logits.shape, kept[0]["k"].shape
    (torch.Size([1, 256]), torch.Size([1, 1, 10, 4]))
    """
    cos, sin, _ = decoder.turns(params, positions, None, cfg.head_size, cfg.rope_theta, cfg.rope_scaling)
    run = block(ft.partial(extend_layer, cfg), name="layer")
    return decoder.extended(cfg, params, tokens, positions, kept, length, [run] * cfg.layers, (cos, sin))


def next_logits(cfg: LlamaConfig, params: dict[str, Any], tokens: Tensor, positions: Tensor, last: Tensor) -> Tensor:
    """Logits of the token after place `last` of a window that is padded on the right.

    Every shape is fixed, so that one compiled program serves all steps of a generation. Attention is causal:
    the padding after `last` is never read. The head runs on one place instead of all.

    Args:
        cfg: the model's config.
        params: like `template(cfg)`, as tensors.
        tokens: int`[batch, window]`.
        positions: int`[batch, window]`.
        last: int`[batch]`, the place of the last real token of each sequence.

    Returns:
        `[batch, vocab]`.
    """
    h = hidden(cfg, params, tokens, positions)
    at = last[:, None, None].expand(-1, 1, h.shape[-1])
    return embed.unembed(params.get("head", params["embed"]), h.gather(1, at)).squeeze(1)


@torch.no_grad()
def generate(
    cfg: LlamaConfig,
    params: dict[str, Any],
    prompt: Tensor,
    length: int,
    temperature: float = 1.0,
    seed: int = 0,
    window: int | None = None,
) -> Tensor:
    """Continues each prompt by sampling one token after another, on one device.

    The whole window is computed anew for each token, with no cache of keys and values: for samples beside a
    training run, not for serving.

    Args:
        cfg: the model's config.
        params: like `template(cfg)`, as whole tensors.
        prompt: int`[batch, n]`, n at least 1.
        length: number of tokens to add.
        temperature: divides the logits; at 0 the likeliest token is taken.
        seed: of the samples: the same seed, the same text.
        window: how many tokens back the model reads, best the length it was trained on; without it, all.

    Returns:
        int`[batch, n + length]`, the prompt first.

    Raises:
        ShapeError: an empty prompt, or a length, temperature or window below its least value.

    >>> from fx_feather.param import init
    >>> cfg = LlamaConfig(vocab=256, layers=1, embed=8, heads=2, kv_heads=1, mlp=16)
    >>> generate(cfg, init(template(cfg)), torch.tensor([[1, 2, 3]]), length=4).shape
    torch.Size([1, 7])
    """
    _check_generate(prompt, length, temperature, window)
    batch, start = prompt.shape
    window = start + length if window is None else min(window, start + length)
    generator = torch.Generator(prompt.device).manual_seed(seed)
    positions = torch.arange(window, device=prompt.device).expand(batch, window)
    text = torch.cat([prompt, prompt.new_zeros(batch, length)], dim=1)
    for end in range(start, start + length):
        left = max(0, end - window)
        last = torch.full((batch,), end - left - 1, device=prompt.device)
        logits = next_logits(cfg, params, text[:, left : left + window], positions, last)
        if temperature == 0:
            text[:, end] = logits.argmax(-1)
        else:
            chances = torch.softmax(logits.double() / temperature, -1)
            text[:, end] = torch.multinomial(chances, 1, generator=generator).squeeze(-1)
    return text


def _check_generate(prompt: Tensor, length: int, temperature: float, window: int | None) -> None:
    found = []
    if prompt.ndim != 2 or prompt.shape[1] == 0 or prompt.dtype not in (torch.int32, torch.int64):
        found.append(
            message(
                call="generate(prompt=...)",
                got=f"prompt of dtype {prompt.dtype} and shape {list(prompt.shape)}",
                number="not int[batch, n] with n of at least 1",
                rule="the first new token is read off the last one of the prompt",
                fix="prompt=torch.tensor([[token, ...]])",
            )
        )
    for name, value, least in (("length", length, 0), ("temperature", temperature, 0), ("window", window, 1)):
        # Written so that NaN offends too.
        if value is not None and not value >= least:
            found.append(
                message(
                    call=f"generate({name}=...)",
                    got=f"{name}={value!r}",
                    number=f"{value!r} is not at least {least}",
                    rule=f"{name} is at least {least}",
                    fix=f"{name}={least}",
                )
            )
    raise_all(ShapeError, found)
