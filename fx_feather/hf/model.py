"""A model with its config: what a folder is loaded into and saved from."""

import dataclasses
from collections.abc import Mapping
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

    >>> from fx_feather.models.llama import LlamaConfig
    >>> model = Model(LlamaConfig(vocab=256, layers=1, embed=8, heads=2, kv_heads=1, mlp=16))
    >>> model.template["embed"].shape
    (256, 8)
    """

    def __init__(self, config: Any, source: Mapping[str, Any] | None = None, dtypes: list[torch.dtype] | None = None):
        self.config, self.source = config, dict(source or {})
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

    def json(self) -> Json:
        """The settings of its `config.json`."""
        own = self.family.json(self.config, self.source)
        return {**self.source, **own, "architectures": [self.family.architecture], "model_type": self.model_type}
