"""The cache of a decoder: what is kept of each token, so that a further token need not compute the earlier ones anew.

A cache is a pytree of tensors with a template of the same kind as parameters have, so that a layout splits it: texts
and heads are split, the places of a text are whole. A token at position `p` of its text is kept at place `p`. Nothing
is written in place: a step returns the next cache.
"""

from typing import Any

import torch
from torch import Tensor

from fx_feather import tree
from fx_feather.param import Param, zeros
from fx_feather.trace import constrain

Kept = dict[str, Tensor]
"""What one layer keeps: `k` and `v`, or `latent` and `k_rope`."""

Places = dict[str, Tensor]
"""Where the tokens of a step are written, and what each of them reads; from `places`."""


def heads_template(
    batch: int, heads: int, length: int, head_dim: int, *, name: str = "kv_heads", dtype: torch.dtype = torch.float32
) -> dict[str, Param]:
    """The keys and values of one layer, as zeros.

    Args:
        batch: number of texts.
        heads: number of key and value heads.
        length: places of a text.
        head_dim: size of one head.
        name: dim name of the heads.
        dtype: dtype in which they rest.

    >>> heads_template(1, heads=2, length=8, head_dim=4)["k"].dims
    'batch kv_heads _ head_dim'
    """
    part = Param(f"batch {name} _ head_dim", (batch, heads, length, head_dim), init=zeros(), dtype=dtype)
    return {"k": part, "v": part}


def latent_template(
    batch: int, length: int, kv_rank: int, rope_dim: int, *, dtype: torch.dtype = torch.float32
) -> dict[str, Param]:
    """The normed latents and the turned keys of one layer of latent attention, as zeros; all heads share them.

    >>> {name: p.shape for name, p in latent_template(1, length=8, kv_rank=16, rope_dim=4).items()}
    {'latent': (1, 8, 16), 'k_rope': (1, 8, 4)}
    """
    return {
        "latent": Param("batch _ latent", (batch, length, kv_rank), init=zeros(), dtype=dtype),
        "k_rope": Param("batch _ head_dim", (batch, length, rope_dim), init=zeros(), dtype=dtype),
    }


def bytes_per_token(template: Any) -> int:
    """Bytes that a cache takes for each token of each text.

    It is `2 layers kv_heads head_dim` numbers with keys and values, and `layers (kv_rank + rope_dim)` with latents.

    Args:
        template: pytree of `Param`, from a model's `cache_template`.

    >>> bytes_per_token([heads_template(3, heads=2, length=8, head_dim=4)] * 5)
    320
    """
    # Of every part the first dim is the text, and the last but one the place.
    return sum(p.numel // (p.shape[0] * p.shape[-2]) * p.dtype.itemsize for p in tree.leaves(template))


def places(positions: Tensor, length: int, new: bool) -> Places:
    """Where the tokens of one step are kept, and which tokens each of them reads: those at no later position.

    Tokens may stand in any order, and a text may be padded anywhere. What a place holds beyond the last token of a
    text is never read.

    Args:
        positions: int`[batch, seq]`, each in `0 .. length - 1` and once in a text; below 0 for padding, which is not
            kept. What is computed for padding means nothing, but is finite.
        length: places of a text.
        new: whether the texts begin with this step, so that its tokens read each other rather than the cache.

    Returns:
        `written` bool`[batch, length, 1]`, which places are written; `source` int`[batch, length, 1]`, by which token
        of the step; `mask` bool`[batch, 1, seq, n]`, what each token reads: among the tokens of the step if texts are
        new, and of the places of the cache otherwise.

    >>> p = places(torch.tensor([[-1, 0, 1]]), 4, new=True)
    >>> p["written"].flatten().tolist(), p["source"].flatten().tolist()[:2], p["mask"][0, 0, 1:].int().tolist()
    ([True, True, False, False], [1, 2], [[0, 1, 0], [0, 1, 1]])
    """
    place = torch.arange(length, device=positions.device)
    here = (positions.unsqueeze(1) == place.unsqueeze(1)).long()
    read = positions.unsqueeze(1) if new else place.view(1, 1, length)
    by = positions.unsqueeze(2)
    mask = (read <= by) & (read >= 0)
    # Padding reads everything: the softmax of nothing is not a number.
    mask = (mask | (by < 0)).unsqueeze(1)
    return {
        "written": constrain(here.sum(-1, keepdim=True) > 0, "batch _ _"),
        "source": constrain(here.argmax(-1, keepdim=True), "batch _ _"),
        "mask": constrain(mask, "batch _ _ _"),
    }


def keep(kept: Kept | None, new: Kept, where: Places, dims: dict[str, str]) -> Kept:
    """What is kept after a step.

    Each place takes its token, rather than each token its place: so no two writes can meet, and every shape is known.

    Args:
        kept: what was kept before; None where the texts begin.
        new: the same parts of the tokens of the step, `[batch, ..., seq, features]`.
        where: from `places`.
        dims: dim names of each part.

    >>> where = places(torch.tensor([[2]]), 4, new=False)
    >>> keep({"k": torch.zeros(1, 4, 1)}, {"k": torch.ones(1, 1, 1)}, where, {"k": "batch _ _"})["k"].flatten()
    tensor([0., 0., 1., 0.])
    """
    out = {}
    for name, x in new.items():
        written, source = where["written"], where["source"]
        if x.ndim == 4:
            written, source = written.unsqueeze(1), source.unsqueeze(1)
        # One token goes wherever a place is written; of several, each place takes its own.
        taken = x if x.shape[-2] == 1 else torch.take_along_dim(x, source, dim=-2)
        now = (
            torch.where(written, taken, 0.0)
            if kept is None
            else torch.where(written, taken.to(kept[name].dtype), kept[name])
        )
        out[name] = constrain(now, dims[name])
    return out
