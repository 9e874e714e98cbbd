"""Generating text: prompts are read in one compiled step, and each further token costs one more, with a cache."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import tree
from .compiler import Compiled, compile
from .errors import GenerateError, message, raise_all
from .layout import Layout
from .mesh import Mesh
from .param import check_template
from .sampling import GREEDY, Sampling
from .settings import is_count
from .trace import constrain

Extend = Callable[..., tuple[Tensor, Any]]
"""`(params, tokens, positions, cache) -> (logits, cache)`; also without a cache, and with `length=`, for prompts."""

#: Dims that a step of one token has no use for splitting.
_SEQUENCES = ("seq", "residual_seq")


class Generator:
    """Continues texts: on one device as plain functions, or compiled for a mesh and a layout.

    Texts are independent: each is continued as it would be alone. Every rank knows all tokens, and all choose alike.

    Args:
        extend: reads further tokens of each text, such as `functools.partial(llama.extend, cfg)`.
        template: pytree of `Param`, the model's parameters.
        cache: pytree of `Param`, such as `llama.cache_template(cfg, batch=8, length=256)`: the number of texts, and of
            tokens that each can have, prompt and all.
        prompt: places that a step for prompts has, padded; without it as many as the cache.
        mesh: the ranks; None for plain functions on one device, compiled for nothing.
        layout: how values are split. Its rows for the dims of sequences are left out, since a step has one token: so
            parameters are split as they are in training by the same layout.
        device: as for `compile`.
        backend: as for `compile`.

    Raises:
        GenerateError: a cache without texts or places, a prompt longer than it, a mesh without a layout.

    >>> import functools as ft
    >>> import fx_feather as ff
    >>> from fx_feather.models import llama
    >>> cfg = llama.LlamaConfig(vocab=256, layers=1, embed=8, heads=2, kv_heads=1, mlp=16)
    >>> template, cache = llama.template(cfg), llama.cache_template(cfg, batch=2, length=8)
    >>> generate = Generator(ft.partial(llama.extend, cfg), template=template, cache=cache)
    >>> [len(text) for text in generate(ff.init(template), [[1, 2, 3], [4]], new=5)]
    [5, 5]
    """

    def __init__(
        self,
        extend: Extend,
        *,
        template: Any,
        cache: Any,
        prompt: int | None = None,
        mesh: Mesh | None = None,
        layout: Layout | None = None,
        device: str | None = None,
        backend: str = "eager",
    ):
        check_template(template, call="Generator(template=...)")
        check_template(cache, call="Generator(cache=...)")
        self._extend, self.template, self.cache = extend, template, cache
        # Of every part the first dim is the text, and the last but one the place.
        sizes = {(p.shape[0], p.shape[-2]) for p in tree.leaves(cache) if len(p.shape) > 1}
        raise_all(GenerateError, list(_cache_problems(sizes, prompt, mesh, layout)))
        ((self.texts, self.length),) = sizes
        self.prompt = prompt or self.length
        self._vocab = next(
            (p.shape[p.dim_names.index("vocab")] for p in tree.leaves(template) if "vocab" in p.dim_names), None
        )
        self.prefill: Compiled | None = None
        self.decode: Compiled | None = None
        if mesh is not None and layout is not None:
            rows = {dim: axes for dim, axes in layout.compute.items() if dim not in _SEQUENCES}
            common = {
                "template": template,
                "mesh": mesh,
                "layout": dataclasses.replace(layout, compute=rows),
                "device": device,
                "backend": backend,
            }
            # Every rank is given all tokens, and takes those of its own texts.
            dims = {"tokens": "_ _", "positions": "_ _"}
            self.prefill = compile(self._first, batch=_step(self.texts, self.prompt), batch_dims=dims, **common)
            kept = tree.map(lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"), cache)
            self.decode = compile(
                self._next,
                batch={**_step(self.texts, 1), "cache": kept},
                batch_dims={**dims, "cache": tree.map(lambda p: p.dims, cache)},
                **common,
            )

    def __repr__(self) -> str:
        where = "one device" if self.prefill is None else repr(self.prefill.mesh)
        return (
            f"<Generator on {where}: {self.texts} texts of up to {self.length} tokens, prompts of up to {self.prompt}>"
        )

    def _first(self, params: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
        return self._step(params, batch, length=self.length)

    def _next(self, params: Any, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        return self._step(params, batch, batch["cache"])

    def _step(self, params: Any, batch: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        tokens, positions = (constrain(batch[name], "batch _") for name in ("tokens", "positions"))
        logits, kept = self._extend(params, tokens, positions, *args, **kwargs)
        kept = tree.map(lambda x, p: constrain(x.to(p.dtype), p.dims), kept, self.cache)
        return constrain(logits, "_ _"), kept

    def __call__(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        new: int,
        sampling: Sampling = GREEDY,
        stop: Collection[int] = (),
    ) -> list[list[int]]:
        """Continues each prompt; with a mesh as one of its ranks, all of which must call it.

        Args:
            params: local parts on several ranks, whole tensors on one device.
            prompts: tokens of each text, of any length from 1 on; no more texts than the cache has.
            new: number of tokens to add to each.
            sampling: how they are chosen.
            stop: tokens that end a text.

        Returns:
            The new tokens of each text: `new` of them, or fewer of which the last is a stop token.

        Raises:
            GenerateError: prompts that are empty or have no room, tokens that are none; all of them at once.
        """
        if self.prefill is None or self.decode is None:
            device = next((x.device for x in tree.leaves(params)), None)
            with torch.no_grad():
                return self._run(self._first, self._next, device, params, prompts, new, sampling, stop)
        device = self.prefill.runtime().device
        return self._run(self.prefill, self.decode, device, params, prompts, new, sampling, stop)

    def simulate(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        new: int,
        sampling: Sampling = GREEDY,
        stop: Collection[int] = (),
    ) -> list[list[int]]:
        """Continues each prompt with all ranks in this process; params are whole values, the rest is as in a call."""
        if self.prefill is None or self.decode is None:
            return self(params, prompts, new, sampling, stop)
        with torch.no_grad():
            return self._run(self.prefill.simulate, self.decode.simulate, None, params, prompts, new, sampling, stop)

    def run_whole(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        new: int,
        sampling: Sampling = GREEDY,
        stop: Collection[int] = (),
    ) -> list[list[int]]:
        """Continues each prompt wherever this process is, from whole params: as a rank of several, or simulated."""
        if self.prefill is None or not self.prefill.local:
            return self.simulate(params, prompts, new, sampling, stop)
        return self(self.prefill.shard_params(params), prompts, new, sampling, stop)

    def _run(
        self,
        prefill: Callable[[Any, Any], Any],
        decode: Callable[[Any, Any], Any],
        device: torch.device | None,
        params: Any,
        prompts: Sequence[Sequence[int]],
        new: int,
        sampling: Sampling,
        stop: Collection[int],
    ) -> list[list[int]]:
        raise_all(GenerateError, list(self._problems(prompts, new, sampling, stop)))
        texts: list[list[int]] = [[] for _ in prompts]
        if new == 0 or not texts:
            return texts
        # A program has one shape; plain functions take the least that holds the prompts.
        places = self.prompt if self.prefill is not None else max(map(len, prompts))
        batch: dict[str, Any] = _step(self.texts, places, device)
        for i, prompt in enumerate(prompts):
            _put(batch, i, [int(t) for t in prompt], 0)
        logits, kept = prefill(params, batch)
        going = list(range(len(texts)))
        for step in range(new):
            chosen = sampling.choose(logits[: len(texts)], step).tolist()
            for i in going:
                texts[i].append(chosen[i])
            going = [i for i in going if chosen[i] not in stop]
            if step == new - 1 or not going:
                break
            batch = {**_step(self.texts, 1, device), "cache": kept}
            for i in going:
                _put(batch, i, [chosen[i]], len(prompts[i]) + step)
            logits, kept = decode(params, batch)
        return texts

    def _problems(
        self, prompts: Sequence[Sequence[int]], new: int, sampling: Sampling, stop: Collection[int]
    ) -> Iterator[str]:
        def problem(got: str, number: str, rule: str, fix: str, call: str = "generate(params, prompts, new)") -> str:
            return message(call=call, got=got, number=number, rule=rule, fix=fix)

        if not is_count(new, 0):
            yield problem(f"new={new!r}", f"{new!r} is not at least 0", "new is a number of tokens", "new=1")
            return
        if len(prompts) > self.texts:
            yield problem(
                f"{len(prompts)} prompts",
                f"{len(prompts)} is more than the {self.texts} texts of the cache",
                "a cache is made for a number of texts",
                f"cache_template(cfg, batch={len(prompts)}, ...), or the prompts in several calls",
            )
        if not isinstance(sampling.seed, int) and len(sampling.seed) != len(prompts):
            yield problem(
                f"{len(sampling.seed)} seeds",
                f"{len(sampling.seed)} seeds for {len(prompts)} prompts",
                "a seed is one for all texts, or there is one for each",
                "Sampling(..., seed=0)",
            )
        for i, prompt in enumerate(prompts):
            n, call = len(prompt), f"generate(params, prompts, new), prompts[{i}]"
            if n == 0:
                rule = "the first new token is read off the last one of the prompt"
                yield problem(
                    "an empty prompt", "0 tokens", rule, "a prompt of one token, such as that of a start", call
                )
            room = self.length if new == 0 else self.length - new + 1
            if n > min(room, self.prompt):
                yield problem(
                    f"{n} tokens, and {new} new ones",
                    f"{n} tokens for {self.prompt} places"
                    if n > self.prompt
                    else f"{n + new - 1} tokens are kept, the cache has {self.length} places",
                    "prompts have as many places as a generator is made for, and all tokens but the last are kept",
                    f"Generator(..., prompt={n})"
                    if n > self.prompt and n <= room
                    else f"cache_template(cfg, ..., length={n + max(new, 1) - 1}), or a shorter prompt",
                    call,
                )
            yield from self._no_tokens(prompt, call)
        yield from self._no_tokens(list(stop), "generate(..., stop=...)")

    def _no_tokens(self, tokens: Sequence[int], call: str) -> Iterator[str]:
        wrong = [t for t in map(int, tokens) if t < 0 or (self._vocab is not None and t >= self._vocab)]
        if wrong:
            last = "" if self._vocab is None else f" .. {self._vocab - 1}"
            yield message(
                call=call,
                got=f"the tokens {wrong[:8]}",
                number=f"{wrong[0]} is not in 0{last}",
                rule="a token is an index of the vocabulary",
                fix="encode the text with the tokenizer that the model was trained with",
            )


def _step(texts: int, places: int, device: torch.device | None = None) -> dict[str, Tensor]:
    """A batch of nothing but padding."""
    shape = (texts, places)
    return {
        "tokens": torch.zeros(shape, dtype=torch.long, device=device),
        "positions": torch.full(shape, -1, dtype=torch.long, device=device),
    }


def _put(batch: dict[str, Tensor], text: int, tokens: list[int], position: int) -> None:
    """Writes tokens of a text, the first of which stands at `position`, to the left end of a batch."""
    n, device = len(tokens), batch["tokens"].device
    batch["tokens"][text, :n] = torch.tensor(tokens, device=device)
    batch["positions"][text, :n] = torch.arange(position, position + n, device=device)


def _cache_problems(
    sizes: set[tuple[int, int]], prompt: int | None, mesh: Mesh | None, layout: Layout | None
) -> Iterator[str]:
    if len(sizes) != 1 or min(next(iter(sizes))) < 1:
        yield message(
            call="Generator(cache=...)",
            got=f"parts of (texts, places) {sorted(sizes)}",
            number=f"{len(sizes)} different sizes"
            if len(sizes) != 1
            else f"{min(next(iter(sizes)))} is not at least 1",
            rule="all parts of a cache have the same number of texts, their first dim, and of places, the last but one",
            fix="cache=llama.cache_template(cfg, batch=1, length=64)",
        )
    elif prompt is not None and not (is_count(prompt, 1) and prompt <= next(iter(sizes))[1]):
        places = next(iter(sizes))[1]
        yield message(
            call="Generator(prompt=...)",
            got=f"prompt={prompt!r}",
            number=f"{prompt!r} is not in 1 .. {places}",
            rule="a prompt has a token or more, and is kept in the cache",
            fix=f"prompt={places}",
        )
    if (mesh is None) != (layout is None):
        yield message(
            call="Generator(mesh=..., layout=...)",
            got=f"mesh={mesh!r}, layout={layout!r}",
            number=f"no {'mesh' if mesh is None else 'layout'}",
            rule="a layout says how values are split over the ranks of a mesh; without both there is one device",
            fix="mesh=ff.Mesh(tp=2), layout=layouts.tp('tp')",
        )
