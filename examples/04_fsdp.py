"""Fully sharded data parallel: what rests is split, what computes is whole, and the table says so in two rows.

    python examples/04_fsdp.py                                              # four ranks, simulated in this process
    torchrun --standalone --nproc-per-node 4 examples/04_fsdp.py            # four processes

Between uses each rank holds its part of every parameter, gradient and moment of the optimizer. A block's parameters are
gathered where the block runs, all in one collective, and freed after it. Its gradients are reduce-scattered.
"""

import math
import os
from collections import Counter
from typing import Any

import optree
import torch

import fx_feather as ff
import layouts
from fx_feather.models import llama

RANKS = int(os.environ.get("WORLD_SIZE", "4"))
STEPS = 3
CONFIG = llama.LlamaConfig(vocab=61, layers=2, embed=32, heads=4, kv_heads=2, mlp=48, qk_norm=True, dtype=torch.float64)


def batches() -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(CONFIG.vocab, (8, 17), generator=random) for _ in range(STEPS)]
    positions = torch.arange(16).repeat(8, 1)
    return [{"tokens": t[:, :-1].clone(), "targets": t[:, 1:].clone(), "positions": positions} for t in texts]


def on_one_device(optimizer: ff.Transform) -> tuple[Any, list[float]]:
    """The specification: the same steps with plain PyTorch on whole values."""
    params = ff.init(llama.template(CONFIG), seed=0)
    state, losses = optimizer.init(params), []
    for batch in batches():
        out, grads = ff.value_and_grad(llama.loss(CONFIG))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optree.tree_map(torch.add, params, updates)
        losses.append(out["loss"].item())
    return params, losses


def main() -> None:
    optimizer = ff.chain(ff.clip_by_global_norm(0.3), ff.adamw(lr=1e-2, weight_decay=0.1))
    mesh, layout = ff.Mesh(fsdp=RANKS), layouts.fsdp("fsdp")
    template: Any = llama.template(CONFIG)
    step = ff.compile_step(
        llama.loss(CONFIG), optimizer, template=template, mesh=mesh, layout=layout, batch=batches()[0], accumulate=2
    )
    state, losses = step.init(seed=0), []
    for batch in batches():
        # In a run each rank holds local parts and its rows of the batch; `simulate` takes whole values.
        state, metrics = step(state, step.shard(batch)) if step.local else step.simulate(state, batch)
        losses.append(metrics["loss"])
    params = step.whole(state).params

    expected, expected_losses = on_one_device(optimizer)
    off = optree.tree_map(lambda x, y: ((x - y).norm() / y.norm()).item(), params, expected)
    worst = max(*optree.tree_leaves(off), *(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)))
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{layout}\non {mesh!r}")
        up = template["layers"][0]["mlp"]["up"]
        here = layout.param_types(up.dim_names, up.shape, up.dtype)
        print(f"params['layers'][0]['mlp']['up'] at rest {here.store}, in use {here.compute}")
        whole = sum(8 * math.prod(p.shape) for p in optree.tree_leaves(template))
        print(f"parameters {whole:,} B in all; a step of two microbatches communicates")
        for (name, axes), count in Counter((c.name, c.axes) for c in step.collectives()).items():
            sent = sum(c.sent_bytes for c in step.collectives() if (c.name, c.axes) == (name, axes))
            print(f"  {count:>3} {name + '@' + ','.join(axes):<24}{sent:>10,} B sent by each rank")
        if not worst < 1e-9:
            raise SystemExit(f"wrong: after {STEPS} steps something is off by {worst:.1e}")
        print(f"checked: {STEPS} AdamW steps on {RANKS} ranks equal one device (largest difference {worst:.0e})")


if __name__ == "__main__":
    main()
