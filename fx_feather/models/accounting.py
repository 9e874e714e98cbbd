"""How large a model is and what a token costs, from its template alone: no memory is taken."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from fx_feather import tree
from fx_feather.errors import ShapeError, fail
from fx_feather.param import Param

Attention = Literal["causal", "full"]


@dataclass(frozen=True)
class Size:
    """Numbers of parameters.

    Args:
        total: all that are stored; a tied head counts once, as the embedding.
        active: those that a token uses: of routed experts, as many as it is sent to.
        parts: the total by part of the model, its layers taken together.

    >>> from fx_feather.models import presets, llama
    >>> size(llama.template(presets.PRESETS["Llama-3-8B"])).total
    8030261248
    """

    total: int
    active: int
    parts: dict[str, int]


def _leaves(template: Any) -> list[tuple[str, Param]]:
    return list(zip(tree.paths(template), tree.leaves(template), strict=True))


def _part(path: str) -> str:
    keys = re.findall(r"\['(\w+)'\]", path)
    for name in ("router", "experts", "shared"):
        if name in keys:
            return name
    if keys[0] != "layers":
        return keys[0]
    return "norms" if keys[1].endswith("_norm") else keys[1]


def _active(p: Param, top_k: int | None) -> int:
    """How many of a parameter's elements one token uses."""
    if "expert" not in p.dim_names:
        return p.numel
    experts = p.shape[p.dim_names.index("expert")]
    if top_k is None or not 0 < top_k <= experts:
        fail(
            ShapeError,
            call="size(template, top_k)",
            got=f"top_k={top_k!r}",
            number=f"{top_k!r} is not in 1 .. {experts}",
            rule="what is active of a model with experts follows from how many a token is sent to",
            fix="top_k=config.top_k",
        )
    return p.numel // experts * top_k


def size(template: Any, top_k: int | None = None) -> Size:
    """Counts the parameters of a template.

    Args:
        template: pytree of `Param`.
        top_k: experts a token, for models that have any.

    >>> from fx_feather.models import llama
    >>> cfg = llama.LlamaConfig(vocab=256, layers=1, embed=8, heads=2, kv_heads=1, mlp=16)
    >>> size(llama.template(cfg)).parts
    {'embed': 2048, 'head': 2048, 'attention': 192, 'norms': 16, 'mlp': 384, 'norm': 8}
    """
    parts: dict[str, int] = {}
    active = 0
    for path, p in _leaves(template):
        parts[_part(path)] = parts.get(_part(path), 0) + p.numel
        active += _active(p, top_k)
    return Size(sum(parts.values()), active, parts)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations a token; a multiplication and an addition are two.

    Args:
        forward: of one forward.
        training: of forward and backward, three times as many, without any that are done anew.

    >>> Flops(forward=2).training
    6
    """

    forward: int

    @property
    def training(self) -> int:
        """Forward and backward: the backward of a product is two products."""
        return 3 * self.forward


def six_n(template: Any, top_k: int | None = None, *, embeddings: bool = False) -> Flops:
    """The estimate `6N` of training (and `2N` of a forward), with N the active parameters.

    It leaves out attention's scores. Norms and biases are counted as if each were a product.

    Args:
        template: pytree of `Param`.
        top_k: experts a token, for models that have any.
        embeddings: whether N includes the tables of embedding, positions and head; Kaplan et al. leave all out.

    Source: Kaplan et al., Scaling Laws for Neural Language Models, 2020, section 2.1.

    >>> layer = {"mlp": {"up": Param("embed mlp", (2, 4))}}
    >>> six_n({"embed": Param("vocab embed", (10, 2)), "layers": [layer]}).training
    48
    """
    tables = {"embed", "positions", "head"}
    used = [(path, p) for path, p in _leaves(template) if embeddings or _part(path) not in tables]
    return Flops(2 * sum(_active(p, top_k) for _, p in used))


def flops(template: Any, seq: int, top_k: int | None = None, *, attention: Attention = "causal") -> Flops:
    """All products of matrices that a token takes part in, in a sequence of a length.

    Weights of two dims or more count two operations each, the active ones of experts, and the head's, be it tied or
    not; looking up an embedding, norms, biases and softmax count nothing. Attention adds the products of queries with
    keys and of weights with values: for each head `2 (qk_dim + value_dim)` a key. A token has `seq` keys by the
    convention `full`, and `(seq + 1) / 2` on average by `causal`, which is what must be computed.

    Args:
        template: pytree of `Param`.
        seq: length of the sequences.
        top_k: experts a token, for models that have any.
        attention: `causal` or `full` (PaLM's convention).

    Source: Chowdhery et al., PaLM, 2022, appendix B.

    >>> from fx_feather.models import llama
    >>> cfg = llama.LlamaConfig(vocab=256, layers=1, embed=8, heads=2, kv_heads=1, mlp=16)
    >>> [flops(llama.template(cfg), 3, attention=a).forward for a in ("causal", "full")]
    [5312, 5344]
    """
    leaves = _leaves(template)
    by_path = dict(leaves)
    forward = sum(
        2 * _active(p, top_k)
        for path, p in leaves
        if _part(path) not in ("embed", "positions")
        and not re.search(r"_bias'\]$|_norm'\]$", path)
        and len(p.shape) > 1
    )
    if "['head']" not in by_path:
        forward += 2 * by_path["['embed']"].numel
    keys = 2 * seq if attention == "full" else seq + 1
    for path, o in leaves:
        if path.endswith("['attention']['o']"):
            heads, value = o.shape[:2]
            at = path.removesuffix("['o']")
            q = by_path.get(f"{at}['q']") or by_path[f"{at}['q_up']"]
            # `keys` is twice the number of them, so that an average of half a key stays whole.
            forward += heads * (q.shape[-1] + value) * keys
    return Flops(forward)


def cache_bytes(template: Any) -> int:
    """Bytes that must be kept of each token to decode further ones: keys and values, or the latent of MLA.

    >>> from fx_feather.models import llama
    >>> cfg = llama.LlamaConfig(vocab=256, layers=3, embed=8, heads=2, kv_heads=1, mlp=16)
    >>> cache_bytes(llama.template(cfg))
    96
    """
    total = 0
    for path, p in _leaves(template):
        # Of a latent vector each weight that makes it has a column an entry; of a head, one row of `k` and `v` each.
        if re.search(r"\['attention'\]\['(kv_down|k_rope)'\]$", path):
            total += p.shape[-1] * p.dtype.itemsize
        elif re.search(r"\['attention'\]\['[kv]'\]$", path):
            total += p.shape[1] * p.shape[2] * p.dtype.itemsize
    return total
