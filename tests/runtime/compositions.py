"""Small models under layouts for few ranks, which the ranks of a world and the test that watches them build alike."""

import dataclasses
from typing import Any
from unittest import mock

import torch

import fx_feather as ff
import layouts
from fx_feather.models import llama
from fx_feather.passes import parts

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Composition:
    """A model, a mesh, a layout, and the microbatches of a step."""

    mesh: ff.Mesh
    layout: ff.Layout
    config: llama.LlamaConfig
    accumulate: int = 2

    def batch(self, seed: int = 0, rows: int = 8, seq: int = 4) -> dict[str, torch.Tensor]:
        """Random tokens, some of which don't count."""
        g = torch.Generator().manual_seed(seed)
        tokens, targets = torch.randint(0, self.config.vocab, (2, rows, seq), generator=g)
        targets[0, :3] = targets[3] = -100
        return {"tokens": tokens, "targets": targets, "positions": torch.arange(seq).expand(rows, seq).contiguous()}

    def step(self) -> ff.Step:
        """The compiled step, with clipping, decay and a schedule; values of any size are summed in parts."""
        rate = ff.warmup_cosine(1e-2, 2, 10)
        with mock.patch.object(parts, "WORTH_PARTS", 1):
            return ff.compile_step(
                llama.loss(self.config),
                ff.chain(ff.clip_by_global_norm(0.3), ff.adamw(lr=rate, weight_decay=0.1)),
                template=llama.template(self.config),
                mesh=self.mesh,
                layout=self.layout,
                batch=self.batch(),
                accumulate=self.accumulate,
                device="cpu",
            )


def config(**changes: Any) -> llama.LlamaConfig:
    """A model of one block in float64, in which no two sizes are equal."""
    sizes: dict[str, Any] = {"vocab": 14, "layers": 1, "embed": 8, "heads": 4, "kv_heads": 2, "head_dim": 2, "mlp": 12}
    return llama.LlamaConfig(**{**sizes, "dtype": torch.float64, "qk_norm": True, **changes})


COMPOSITIONS = {
    "ddp": Composition(ff.Mesh(dp=2), layouts.ddp("dp"), config(vocab=13)),
    "fsdp": Composition(ff.Mesh(dp=4), layouts.fsdp("dp"), config(embed=6)),
    "hsdp": Composition(ff.Mesh(replica=2, shard=2), layouts.hsdp("replica", "shard"), config(tied=True)),
    "fsdp_tp_sp": Composition(ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp_sp("tp"), config()),
    "fsdp_cp": Composition(ff.Mesh(dp=2, cp=2), layouts.fsdp("dp") | layouts.cp("cp"), config()),
    "zero2_uneven": Composition(
        ff.Mesh(dp=2, tp=2), layouts.zero2("dp") | layouts.tp("tp"), config(vocab=13, embed=7, tied=True)
    ),
}
"""Between them all three collectives of gradients, padded parts, a tied table, two orders of gather and scatter, and
for the norm parts of gradients along the first dim and the second."""
