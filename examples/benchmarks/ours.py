"""The same decoder, written once for one device, under a layout of fx_feather."""

from collections.abc import Iterator
from typing import Any

import optree
from rows import Row
from sizes import BETAS, CLIP, DECAY, EPS, LEARNING_RATE, Size
from torch import Tensor

import fx_feather as ff
import layouts
from fx_feather.models import llama


def named(params: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree like the parameters, by the names that the module gives them."""
    for path, leaf in zip(optree.tree_paths(params), optree.tree_leaves(params), strict=True):
        yield ".".join(map(str, path)) + ".weight", leaf


def as_module(name: str, x: Tensor) -> Tensor:
    """A parameter, or what belongs to it, as `torch.nn.Linear` has it: outputs first, and heads merged."""
    if ".attention." in name:
        x = x.flatten(0, 1) if name.endswith(".o.weight") else x.flatten(1)
        return x.mT.contiguous()
    return x.mT.contiguous() if ".mlp." in name else x


class Ours:
    """A compiled step and its state."""

    def __init__(self, row: Row, axes: dict[str, int], size: Size, batch: dict[str, Tensor], matmul: str):
        layout = ff.Layout()
        for name, over in row.layouts:
            layout |= getattr(layouts, name)(*over)
        cfg = llama.LlamaConfig(**size.settings())
        adamw = ff.adamw(LEARNING_RATE, *BETAS, eps=EPS, weight_decay=DECAY)
        self.options = {**dict(row.options), "matmul": matmul}
        self._step = ff.compile_step(
            llama.loss(cfg),
            ff.chain(ff.clip_by_global_norm(CLIP), adamw),
            template=llama.template(cfg),
            mesh=ff.Mesh(**axes),
            layout=layout,
            batch=batch,
            device="cpu",
            **self.options,
        )
        self._state = self._step.init(seed=0)

    def shard(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a batch."""
        return self._step.shard(batch)

    def step(self, batch: dict[str, Tensor]) -> tuple[float, float]:
        """Loss and gradient norm of one step."""
        self._state, metrics = self._step(self._state, batch)
        return metrics["loss"], metrics["grad_norm"]

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Adam's first moment of each parameter, whole; every rank must ask."""
        for name, x in named(self._step.whole(self._state).opt[1]["mu"]):
            yield name, as_module(name, x)

    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a step, each collective as a ring."""
        return sum(c.sent_bytes for c in self._step.collectives())

    def sent(self) -> dict[str, int]:
        """How often each collective runs in a step."""
        names = [c.name for c in self._step.collectives()]
        return {name: names.count(name) for name in sorted(set(names))}
