"""Choosing the next token: the likeliest, or one drawn by its chances from explicit seeds, on every rank the same."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import GenerateError, NonFiniteError, fail
from .settings import check, is_count, is_finite


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from the logits of all.

    Logits are divided by the temperature, all but the `top_k` likeliest tokens are left out, then all but the fewest
    likeliest ones whose chances add up to `top_p`, and one of the rest is drawn.

    Args:
        temperature: 0 takes the likeliest token, always.
        top_k: how many tokens there are to choose from; None for all.
        top_p: share of the chances that the tokens to choose from hold, in (0, 1].
        seed: of the draws; or one seed a text, which gives it the same draws wherever it stands among others.

    Raises:
        GenerateError: settings out of their range, all of them at once.

    Source: Fan et al., Hierarchical Neural Story Generation, 2018 (top-k); Holtzman et al., The Curious Case of Neural
    Text Degeneration, 2020, eq. 2 and 3 (top-p).

    >>> logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    >>> [Sampling(temperature=1.0, top_k=2, seed=s).choose(logits, 0).item() for s in range(6)]
    [1, 2, 1, 1, 1, 1]
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        seeds = (self.seed,) if isinstance(self.seed, int) else tuple(self.seed)
        check(
            GenerateError,
            "Sampling",
            vars(self),
            [
                (
                    "temperature",
                    is_finite(self.temperature, least=0),
                    "a temperature is at least 0, which takes the likeliest token",
                    "temperature=0.0",
                ),
                (
                    "top_k",
                    self.top_k is None or is_count(self.top_k, 1),
                    "there is at least one token to choose from",
                    "top_k=1, or None for all",
                ),
                (
                    "top_p",
                    is_finite(self.top_p, above=0) and self.top_p <= 1,
                    "top_p is a share of the chances, in (0, 1]",
                    "top_p=1.0 for all tokens",
                ),
                (
                    "seed",
                    all(is_count(s, 0) for s in seeds),
                    "a seed is an integer of at least 0, or one such for each text",
                    "seed=0",
                ),
            ],
        )

    def choose(self, logits: Tensor, step: int) -> Tensor:
        """The next token of each text, int`[batch]`.

        A draw depends on the seed, the text's place among others, the step, and the text's own logits; on nothing else.

        Args:
            logits: `[batch, vocab]`.
            step: how many tokens were chosen before.

        Raises:
            NonFiniteError: logits that are NaN.
        """
        wrong = logits.isnan().any(-1)
        if wrong.any():
            fail(
                NonFiniteError,
                call=f"choose(logits, step={step})",
                got=f"logits of shape {list(logits.shape)}",
                number=f"those of the texts {wrong.nonzero().flatten().tolist()} are NaN",
                rule="a token is chosen by comparing logits",
                fix="look at the parameters, or compute in a wider dtype",
            )
        if self.temperature == 0:
            return logits.argmax(-1)
        chances = (logits.double() / self.temperature).softmax(-1)
        chances, order = torch.sort(chances, dim=-1, descending=True, stable=True)
        kept = torch.ones_like(chances, dtype=torch.bool)
        if self.top_k is not None:
            kept[:, self.top_k :] = False
        if self.top_p < 1:
            # Of the chances that top-k leaves, top-p takes its share: the likeliest token, however large it is, too.
            chances = chances.where(kept, 0.0)
            before = chances.cumsum(-1) - chances
            kept[:, 1:] &= (before < self.top_p * chances.sum(-1, keepdim=True))[:, 1:]
        sums = chances.where(kept, 0.0).cumsum(-1)
        drawn = torch.tensor(
            [uniform(*self._stream(i), step) for i in range(len(logits))], dtype=torch.float64, device=logits.device
        )
        # The first token at which the chances so far exceed the drawn share of all.
        at = (sums <= drawn.unsqueeze(-1) * sums[:, -1:]).sum(-1)
        last = (sums < sums[:, -1:]).sum(-1)
        return order.gather(-1, torch.minimum(at, last).unsqueeze(-1)).squeeze(-1)

    def _stream(self, text: int) -> tuple[int, int]:
        return (self.seed, text) if isinstance(self.seed, int) else (self.seed[text], 0)


GREEDY = Sampling()
"""The likeliest token, always."""


def uniform(*key: int) -> float:
    """A number in [0, 1) that is a function of the key alone: 53 bits of its hash.

    >>> uniform(0, 1)
    0.5215437425454912
    """
    digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
    return math.ldexp(int.from_bytes(digest, "little") >> 11, -53)
