"""The models and batches that the benchmark measures, by name."""

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Size:
    """A Llama-style decoder, with as many key as query heads, and the global batch of a step."""

    layers: int
    embed: int
    mlp: int
    heads: int
    vocab: int
    batch: int
    seq: int

    def batches(self, count: int) -> list[dict[str, torch.Tensor]]:
        """Random tokens, the same on every rank and on both sides."""
        random = torch.Generator().manual_seed(0)
        positions = torch.arange(self.seq).repeat(self.batch, 1)
        texts = [torch.randint(self.vocab, (self.batch, self.seq + 1), generator=random) for _ in range(count)]
        return [
            {"tokens": t[:, :-1].contiguous(), "targets": t[:, 1:].contiguous(), "positions": positions} for t in texts
        ]

    def settings(self) -> dict[str, Any]:
        """What `LlamaConfig` takes."""
        sizes = {"vocab": self.vocab, "layers": self.layers, "embed": self.embed, "mlp": self.mlp}
        return {**sizes, "heads": self.heads, "kv_heads": self.heads}

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """The matrix products of a layer and of the head, as (rows, inner, columns)."""
        rows = self.batch * self.seq
        return [(rows, self.embed, n) for n in (self.embed, self.mlp, self.vocab)] + [(rows, self.mlp, self.embed)]

    @property
    def parameters(self) -> int:
        """Number of parameters: embedding, head, and what the blocks and the norms hold."""
        block = 4 * self.embed**2 + 3 * self.embed * self.mlp + 2 * self.embed
        return 2 * self.vocab * self.embed + self.layers * block + self.embed


SIZES = {
    "tiny": Size(layers=2, embed=16, mlp=32, heads=4, vocab=32, batch=4, seq=16),
    "small": Size(layers=4, embed=256, mlp=704, heads=8, vocab=4096, batch=8, seq=128),
    "medium": Size(layers=8, embed=512, mlp=1408, heads=8, vocab=8192, batch=8, seq=256),
}

LEARNING_RATE, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
"""Of AdamW, and the largest gradient norm; only parameters of two dims and more decay."""
