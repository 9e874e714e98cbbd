"""Fine-tuning: parameters are frozen and grouped by patterns of their paths, and an average of the weights is kept.

    python examples/10_finetune.py                                           # two ranks, simulated
    torchrun --standalone --nproc-per-node 2 examples/10_finetune.py         # two processes

What is frozen costs no gradient, no communication of one, and no optimizer state. The rest is moved by groups, each
with an optimizer of its own: here the head by AdamW, whose rate a Python function gives, and the last norm by SGD.
"""

import os
from typing import Any

import torch

import fx_feather as ff
import layouts
from fx_feather.models import llama

RANKS = int(os.environ.get("WORLD_SIZE", "2"))
STEPS, NORM_RATE, DECAY = 12, 0.5, 0.8
CONFIG = llama.LlamaConfig(vocab=24, layers=2, embed=16, heads=4, kv_heads=2, mlp=24, dtype=torch.float64)
BASE = ("*['embed']*", "*['layers']*")


def rate(step: int) -> float:
    """It runs in Python at each step: it may branch, and look up what it likes."""
    return 0.05 if step < STEPS // 2 else 0.02


OPTIMIZER = ff.freeze(
    ff.ema(
        ff.chain(
            ff.clip_by_global_norm(0.5),
            ff.multi_transform({"*['head']*": ff.adamw(rate, weight_decay=0.1), "*": ff.sgd(NORM_RATE)}),
        ),
        decay=DECAY,
    ),
    *BASE,
)


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(CONFIG.vocab, (8, 9), generator=torch.Generator().manual_seed(0))
    return {
        "tokens": tokens[:, :-1].clone(),
        "targets": tokens[:, 1:].clone(),
        "positions": torch.arange(8).repeat(8, 1),
    }


def in_pytorch() -> tuple[Any, dict[str, torch.Tensor], list[float]]:
    """The specification: the same with `requires_grad`, PyTorch's optimizers, and an average by hand."""
    params: Any = ff.init(llama.template(CONFIG), seed=0)
    moved = {path: x for path, x in zip(ff.tree.paths(params), ff.tree.leaves(params), strict=True) if is_moved(path)}
    head = [x.requires_grad_() for path, x in moved.items() if "head" in path]
    rest = [x.requires_grad_() for path, x in moved.items() if "head" not in path]
    adamw = torch.optim.AdamW(head, betas=(0.9, 0.95), weight_decay=0.1)
    sgd = torch.optim.SGD(rest, lr=NORM_RATE)
    averages = {path: x.detach().clone() for path, x in moved.items()}
    losses = []
    for k in range(STEPS):
        total, count = llama.loss(CONFIG)(params, batch())
        grads = torch.autograd.grad(total / count, list(moved.values()))
        for x, g in zip(moved.values(), grads, strict=True):
            x.grad = g
        torch.nn.utils.clip_grad_norm_(list(moved.values()), 0.5)
        adamw.param_groups[0]["lr"] = rate(k)
        adamw.step()
        sgd.step()
        averages = {path: DECAY * averages[path] + (1 - DECAY) * x.detach() for path, x in moved.items()}
        losses.append((total / count).item())
    return params, averages, losses


def is_moved(path: str) -> bool:
    return "['embed']" not in path and "['layers']" not in path


def main() -> None:
    mesh, layout = ff.Mesh(fsdp=RANKS), layouts.fsdp("fsdp")
    template: Any = llama.template(CONFIG)
    step = ff.compile_step(llama.loss(CONFIG), OPTIMIZER, template=template, mesh=mesh, layout=layout, batch=batch())
    everything = ff.compile_step(
        llama.loss(CONFIG), ff.ema(ff.adamw(1e-3)), template=template, mesh=mesh, layout=layout, batch=batch()
    )
    state, losses = step.init(seed=0), []
    start = [x.clone() for x in ff.tree.leaves(step.whole(state).params)]
    for _ in range(STEPS):
        state, metrics = step(state, step.shard(batch())) if step.local else step.simulate(state, batch())
        losses.append(metrics["loss"])
    whole = step.whole(state)
    average = ff.averaged(whole.opt, whole.params)

    params, averages, expected = in_pytorch()
    paths, leaves = ff.tree.paths(params), ff.tree.leaves(whole.params)
    off = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    off += [((x - y).norm() / y.norm()).item() for x, y in zip(leaves, ff.tree.leaves(params), strict=True)]
    off += [
        ((x - averages[path]).norm() / averages[path].norm()).item()
        for path, x in zip(paths, ff.tree.leaves(average), strict=True)
        if path in averages
    ]
    frozen = [torch.equal(x, y) for path, x, y in zip(paths, leaves, start, strict=True) if not is_moved(path)]
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{OPTIMIZER!r}\non {mesh!r}")
        for name, each in (("all parameters", everything), ("the head", step)):
            sent = sum(c.sent_bytes for c in each.collectives())
            kept = sum(8 * x.numel() for x in ff.tree.leaves(each.init().opt)) if not each.local else None
            held = "" if kept is None else f", and the state of its optimizer takes {kept:,} B"
            print(f"  a step of {name:<15}{sent:>8,} B sent by each rank{held}")
        print(f"loss {losses[0]:.4f} before, {losses[-1]:.4f} after {STEPS} steps; {len(frozen)} leaves as they were")
        if not (max(off) < 1e-9 and all(frozen) and losses[-1] < losses[0]):
            raise SystemExit(f"wrong: something is off by {max(off):.1e}, or moved that is frozen: {frozen}")
        print(f"checked: a frozen base, two groups and an average equal PyTorch's (largest difference {max(off):.0e})")


if __name__ == "__main__":
    main()
