"""Data parallel from one rule: a loss is a sum and a count, and both are added up over the whole global batch.

    python examples/03_ddp.py                                               # four ranks, simulated in this process
    torchrun --standalone --nproc-per-node 4 examples/03_ddp.py             # four processes

Rank 0 has one sequence of a single valid token beside full ones. If each rank took the mean of its own tokens, and the
means were averaged, that rank's tokens would weigh more than the others'. With a sum and a count nothing can go wrong:
the gradient is that of total sum / total count, whatever each rank holds.
"""

import math
import os
from typing import Any

import optree
import torch

import fx_feather as ff
import layouts
from fx_feather.nn.loss import cross_entropy

RANKS = int(os.environ.get("WORLD_SIZE", "4"))
VOCAB, EMBED, SEQ = 11, 16, 8


def template() -> dict[str, ff.Param]:
    f64 = torch.float64
    return {
        "table": ff.Param("vocab embed", (VOCAB, EMBED), init=ff.normal(1.0), dtype=f64),
        "up": ff.Param("embed mlp", (EMBED, 4 * EMBED), init=ff.normal(0.3), dtype=f64),
        "down": ff.Param("mlp vocab", (4 * EMBED, VOCAB), init=ff.normal(0.3), dtype=f64),
    }


def loss_fn(params: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the loss over valid tokens, and their number. It knows nothing of ranks."""
    x = torch.nn.functional.embedding(batch["tokens"], params["table"])
    return cross_entropy(torch.relu(x @ params["up"]) @ params["down"], batch["targets"])


def main() -> None:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (2 * RANKS, SEQ), generator=random)
    targets = (tokens * 3 + 1) % VOCAB
    targets[0, 1:] = -100  # of the first sequence one token counts, ...
    targets[1] = -100  # ... of the second none: rank 0 has one valid token, each other rank 16
    batch = {"tokens": tokens, "targets": targets}

    mesh, layout = ff.Mesh(dp=RANKS), layouts.ddp("dp")
    g = ff.compile(ff.value_and_grad(loss_fn), template=template(), mesh=mesh, layout=layout, batch=batch)
    whole = ff.init(template(), seed=0)
    out, grads = g.run_whole(whole, batch)
    expected: Any
    expected_out, expected = ff.value_and_grad(loss_fn)(whole, batch)  # on one device
    # The classic mistake, for comparison: every rank divides by its own count, and the gradients are averaged.
    parts = [{k: v[2 * r : 2 * r + 2] for k, v in batch.items()} for r in range(RANKS)]
    own = [ff.value_and_grad(loss_fn)(whole, part)[1] for part in parts]
    mistaken = optree.tree_map(lambda *rank: sum(rank) / RANKS, *own)

    def distance(a: Any) -> float:
        """The largest over all leaves of |a - expected| / |expected|."""
        off = optree.tree_map(lambda x, y: ((x - y).norm() / y.norm()).item(), a, expected)
        return max(optree.tree_leaves(off))

    size = sum(8 * math.prod(p.shape) for p in template().values())
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{mesh!r}, valid tokens {out['count'].item()}, loss {out['loss'].item():.6f}")
        print(f"parameters: {size} B; communicated: {', '.join(repr(c) for c in g.collectives())}")
        print(f"a mean of the ranks' means would be off by {distance(mistaken):.0%} of the gradient")
        off = max(distance(grads), abs(out["loss"] - expected_out["loss"]).item())
        if not off < 1e-12:
            raise SystemExit(f"wrong: the gradient of {RANKS} ranks is off by {off:.1e}")
        print(f"checked: loss and every gradient on {RANKS} ranks equal one device (largest difference {off:.0e})")


if __name__ == "__main__":
    main()
