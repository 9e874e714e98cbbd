"""Checks of model configs and batches: all that is wrong with one is named in one error."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fx_feather.errors import BatchError, ShapeError, fail, message, raise_all

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


_FIELDS = {
    "tokens": "int[batch, seq], in 0 .. vocab - 1",
    "positions": "int[batch, seq], such as torch.arange(seq).repeat(batch, 1)",
    "targets": "int[batch, seq], the next token of each, or -100 where there is none",
}


def fields(batch: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Tokens, positions, documents if there are any, and targets of a batch.

    Raises:
        BatchError: the batch is no dict, or lacks some of them; all at once.
    """
    given = sorted(map(str, batch)) if isinstance(batch, Mapping) else []
    lacking = [name for name in _FIELDS if name not in given]
    if lacking:
        fail(
            BatchError,
            call="loss(params, batch)",
            got=f"a batch of {', '.join(given) or 'nothing'}" if isinstance(batch, Mapping) else type(batch).__name__,
            number=f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing",
            rule="a batch is a dict of tokens, positions and targets; documents tells packed texts apart",
            fix="; ".join(f'batch["{name}"]: {_FIELDS[name]}' for name in lacking),
        )
    return batch["tokens"], batch["positions"], batch.get("documents"), batch["targets"]


class Problems:
    """Collects a message for each setting, or set of settings, of a config that makes no model."""

    def __init__(self, cfg: Any):
        self.cfg = cfg
        self.wrong: set[str] = set()
        self.found: list[str] = []

    def offend(self, setting: str, number: str, rule: str, fix: str) -> None:
        """Adds a message about settings, separated by blanks."""
        names = setting.split()
        got = ", ".join(f"{name}={getattr(self.cfg, name)!r}" for name in names)
        call = f"{type(self.cfg).__name__}({', '.join(names)})"
        self.found.append(message(call=call, got=got, number=number, rule=rule, fix=fix))

    def sizes(self, names: str, *, least: int = 1, optional: bool = False) -> None:
        """Each is an integer of at least `least`, or None where that is an option."""
        rule = "every size is a positive integer" if least == 1 else f"this number is an integer of at least {least}"
        for name in names.split():
            value = getattr(self.cfg, name)
            if optional and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                self.wrong.add(name)
                self.offend(name, f"{name} is {value!r}", rule, f"{name}={least} or more")

    def constants(self, names: str, *, optional: bool = False) -> None:
        """Each is a positive number, or None where that is an option."""
        for name in names.split():
            value = getattr(self.cfg, name)
            if optional and value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                default = next(f.default for f in dataclasses.fields(self.cfg) if f.name == name)
                self.offend(name, f"{name} is {value!r}", "this constant is a positive number", f"{name}={default!r}")

    def dtype(self) -> None:
        """The dtype is a floating one that models are made in."""
        if self.cfg.dtype not in DTYPES:
            known, fix = ", ".join(map(str, DTYPES)), "dtype=torch.float32"
            rule = f"parameters are one of {known}"
            self.offend("dtype", f"{self.cfg.dtype!r} is not a floating dtype", rule, fix)

    def divides(self, whole: str, part: str, rule: str) -> None:
        """`part` divides `whole`."""
        if self.wrong & {whole, part}:
            return
        n, k = getattr(self.cfg, whole), getattr(self.cfg, part)
        if n % k:
            # A size from a damaged file may be so large that its divisors can't be tried one by one.
            near = max(i for i in range(1, k) if n % i == 0) if k < 1 << 16 else math.gcd(n, k)
            fix = f"{part}={near}, or {whole}={math.ceil(n / k) * k}"
            self.offend(f"{whole} {part}", f"{n} % {k} = {n % k}", rule, fix)

    def at_most(self, small: str, large: str, rule: str) -> None:
        """`small` is no larger than `large`."""
        if self.wrong & {small, large}:
            return
        a, b = getattr(self.cfg, small), getattr(self.cfg, large)
        if a > b:
            self.offend(f"{small} {large}", f"{a} is more than {b}", rule, f"{small}={b} at most")

    def even(self, name: str) -> None:
        """A size whose features are turned in pairs."""
        if name in self.wrong or getattr(self.cfg, name) % 2 == 0:
            return
        n, rule = getattr(self.cfg, name), "rotary positions turn features in pairs"
        self.offend(name, f"a head has {n} features, an odd number", rule, f"{name}={n + 1}")

    def heads(self) -> None:
        """Query heads, key and value heads, and the size of a head fit together."""
        cfg = self.cfg
        self.divides("heads", "kv_heads", "each key and value head serves the same number of query heads")
        if self.wrong & {"embed", "heads", "head_dim"}:
            return
        if cfg.head_dim is not None:
            self.even("head_dim")
        elif cfg.embed % cfg.heads:
            self.offend(
                "embed heads head_dim",
                f"{cfg.embed} % {cfg.heads} = {cfg.embed % cfg.heads}",
                "without head_dim, the heads share the residual stream's size in equal parts",
                f"embed={math.ceil(cfg.embed / cfg.heads) * cfg.heads}, or an even head_dim",
            )
        elif cfg.embed // cfg.heads % 2:
            n = cfg.embed // cfg.heads
            rule = "rotary positions turn features in pairs"
            self.offend(
                "embed heads head_dim", f"a head has {n} features, an odd number", rule, f"head_dim={n + 1}"
            )  # fmt: skip

    def raise_all(self) -> None:
        """Raises one ShapeError with all messages; does nothing when there is none."""
        raise_all(ShapeError, self.found)
