"""Context parallel: each rank keeps its part of every sequence, and attention gathers keys and values.

    python examples/12_long_sequences.py                                           # two ranks, simulated
    torchrun --standalone --nproc-per-node 2 examples/12_long_sequences.py         # two processes

What a rank keeps of its activations for the backward shrinks with the ranks. What travels are keys and values, whose
heads are fewer than those of queries, and with latent attention the latents alone.
"""

import math
import os
from typing import Any

import torch

import fx_feather as ff
import layouts
from fx_feather.models import deepseek_v3, llama

RANKS = int(os.environ.get("WORLD_SIZE", "2"))
ROWS, LENGTH, STEPS = 1, 256, 3
SIZES: dict[str, Any] = {"vocab": 32, "layers": 2, "embed": 32, "heads": 4, "dtype": torch.float64}
MODELS: dict[str, tuple[Any, Any]] = {
    "grouped queries": (llama, llama.LlamaConfig(**SIZES, kv_heads=1, mlp=64)),
    "latents": (
        deepseek_v3,
        deepseek_v3.DeepSeekV3Config(
            **SIZES,
            dense_layers=2,
            q_rank=None,
            kv_rank=4,
            plain_dim=8,
            rope_dim=4,
            value_dim=8,
            mlp=64,
            expert_mlp=16,
            experts=2,
            top_k=1,
            shared_experts=1,
        ),
    ),
}


def batch() -> dict[str, torch.Tensor]:
    """Two documents in one sequence, the second from two thirds on."""
    tokens = torch.randint(32, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    first = 2 * LENGTH // 3
    return {
        "tokens": tokens[:, :-1].clone(),
        "targets": tokens[:, 1:].clone(),
        "positions": torch.cat([torch.arange(first), torch.arange(LENGTH - first)]).repeat(ROWS, 1),
        "documents": (torch.arange(LENGTH) >= first).long().repeat(ROWS, 1),
    }


def kept(step: ff.Step) -> int:
    """Bytes of activations that a rank keeps between its calls forward and backward."""
    section = step.program.sections["first"]
    calls = [(i.func.name, ins, outs) for i in section.instrs for ins, outs in zip(i.ins, i.outs, strict=True)]
    read = {v for name, ins, _ in calls if name.endswith(".backward") for v in ins}
    made = [v for name, _, outs in calls if name.endswith(".forward") for v in outs if v in read]
    return sum(math.prod(section.types[v].local_shape(step.mesh)) * section.types[v].dtype.itemsize for v in made)


def compiled(model: Any, config: Any, mesh: ff.Mesh, layout: ff.Layout) -> ff.Step:
    return ff.compile_step(
        model.loss(config), ff.adamw(lr=1e-2, weight_decay=0.0), template=model.template(config), mesh=mesh,
        layout=layout, batch=batch(),
    )  # fmt: skip


def trained(step: ff.Step) -> list[float]:
    state, losses = step.init(seed=0), []
    for _ in range(STEPS):
        state, metrics = step(state, step.shard(batch())) if step.local else step.simulate(state, batch())
        losses.append(metrics["loss"])
    return losses


def in_pytorch(model: Any, config: Any) -> list[float]:
    """The specification: the same model on one device, with PyTorch's optimizer."""
    params: Any = ff.init(model.template(config), seed=0)
    leaves = [x.requires_grad_() for x in ff.tree.leaves(params)]
    adamw = torch.optim.AdamW(leaves, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        total, count = model.loss(config)(params, batch())[:2]
        adamw.zero_grad()
        (total / count).backward()
        adamw.step()
        losses.append((total / count).item())
    return losses


def main() -> None:
    mesh, off, lines = ff.Mesh(cp=RANKS), 0.0, []
    for name, (model, config) in MODELS.items():
        step = compiled(model, config, mesh, layouts.cp("cp"))
        off = max([off, *(abs(a - b) for a, b in zip(trained(step), in_pytorch(model, config), strict=True))])
        gathers = [c for c in step.collectives() if c.name == "all_gather"]
        sent = sum(c.sent_bytes for c in gathers)
        alone = kept(compiled(model, config, ff.Mesh(), layouts.single()))
        kept_here = f"{kept(step):>10,} B kept, of {alone:>10,} on one device"
        lines.append(f"  {name:<16}{kept_here}; {len(gathers)} gathers that send {sent:>7,} B")
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"a sequence of {LENGTH} tokens on {mesh!r}, a rank:", *lines, sep="\n")
        if off > 1e-9:
            raise SystemExit(f"wrong: a loss is off by {off:.1e}")
        print(f"checked: split sequences, of two documents, equal PyTorch's (largest difference {off:.0e})")


if __name__ == "__main__":
    main()
