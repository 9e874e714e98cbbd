"""A model with its config: what a folder is loaded into and saved from."""

import dataclasses
import functools as ft
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import tree
from .families import of_config
from .settings import Json


class Model:
    """An architecture of a config: its template, and its functions of parameters.

    Args:
        config: of one of the families, such as `fx_feather.models.llama.LlamaConfig`.
        source: settings of the `config.json` that it was loaded from, kept for those this package has no word for.
        dtypes: the dtype of each parameter, where it is not that of the config.
        files: what else its folder holds, such as the tokenizer, by name; saved again with it.

    >>> from fx_feather.models.llama import LlamaConfig
    >>> model = Model(LlamaConfig(vocab=256, layers=1, embed=8, heads=2, kv_heads=1, mlp=16))
    >>> model.template["embed"].shape
    (256, 8)
    """

    def __init__(
        self,
        config: Any,
        source: Mapping[str, Any] | None = None,
        dtypes: list[torch.dtype] | None = None,
        files: Mapping[str, bytes] | None = None,
    ):
        self.config, self.source, self.files = config, dict(source or {}), dict(files or {})
        self.model_type, self.family = of_config(config)
        template = self.family.module.template(config)
        if dtypes is not None:
            leaves, treedef = tree.flatten(template)
            changed = [dataclasses.replace(p, dtype=d) for p, d in zip(leaves, dtypes, strict=True)]
            template = tree.unflatten(treedef, changed)
        self.template: Any = template
        self._loss = self.family.module.loss(config)

    def __repr__(self) -> str:
        return f"Model({self.config!r})"

    def apply(
        self, params: Any, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Logits `[batch, seq, vocab]` of tokens int`[batch, seq]`; see `fx_feather.models.llama.forward`.

        Without positions a sequence is one text from its beginning.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        out: Tensor = self.family.module.forward(self.config, params, tokens, positions, documents)
        return out

    def loss(self, params: Any, batch: dict[str, Tensor]) -> Any:
        """`(sum, count)` or `(sum, count, aux)` of a batch; see `fx_feather.models.llama.loss`."""
        return self._loss(params, batch)

    def parts(self) -> Any:
        """Where each parameter lies in Hugging Face's files, a pytree like the template."""
        return self.family.parts(self.config)

    def json(self, dtype: torch.dtype | None = None) -> Json:
        """The settings of its `config.json`, with another dtype where one is given."""
        cfg = self.config if dtype is None else dataclasses.replace(self.config, dtype=dtype)
        own = self.family.json(cfg, self.source)
        return {**self.source, **own, "architectures": [self.family.architecture], "model_type": self.model_type}


def dtype_of(names: Sequence[str], dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The one dtype in which parameters are not rounded.

    The biases of DeepSeek's routers don't count: they are float32 in models of any dtype.

    >>> dtype_of(["a.weight", "gate.e_score_correction_bias"], [torch.bfloat16, torch.float32])
    torch.bfloat16
    """
    counted = [d for n, d in zip(names, dtypes, strict=True) if not n.endswith("e_score_correction_bias")]
    return ft.reduce(torch.promote_types, counted or dtypes)
