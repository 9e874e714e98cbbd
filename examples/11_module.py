"""A model written as `torch.nn.Module`, split as any other: its layers are blocks, and its values go back at the end.

    python examples/11_module.py                                           # two ranks, simulated
    torchrun --standalone --nproc-per-node 2 examples/11_module.py         # two processes

A table of patterns names the dims of its parameters. A `torch.autograd.Function` inside keeps its own backward: here
the weights of the recurrence are rounded, and their gradient goes straight through. The recurrence is a scan, traced
once for a chunk of steps.
"""

import copy
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fx_feather as ff
import layouts

RANKS = int(os.environ.get("WORLD_SIZE", "2"))
VOCAB, WIDTH, STEPS, RATE = 16, 12, 8, 0.5


class Rounded(torch.autograd.Function):
    """To eighths; the gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, *cts: Any) -> Any:
        return cts[0]


class Recurrent(nn.Module):
    """A gated recurrence over time, with rounded weights, beside a feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.gate = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        keep = torch.sigmoid(F.linear(h, Rounded.apply(self.gate.weight), self.gate.bias))

        def step(state: torch.Tensor, now: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            k, new = now
            state = k * state + (1 - k) * new
            return state, state

        _, states = ff.scan(step, torch.zeros_like(h[:, 0]), (keep, h), dim=1)
        return x + self.down(F.silu(self.up(states)))


class Model(nn.Module):
    """Embedding, layers, and a head that shares the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        self.layers = nn.Sequential(Recurrent(), Recurrent())
        self.head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(ids)))


DIMS = {
    "embed.weight": "vocab embed",
    "*.norm.*": "embed",
    "*.gate.weight": "_ embed",
    "*.gate.bias": "_",
    "*.up.weight": "mlp embed",
    "*.up.bias": "mlp",
    "*.down.weight": "embed mlp",
    "*.down.bias": "embed",
}


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCAB, (4, 13), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1].clone(), "targets": tokens[:, 1:].clone()}


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, torch.tensor(targets.numel(), device=targets.device)


def in_pytorch(module: nn.Module) -> list[float]:
    """The specification: the module itself, with PyTorch's optimizer."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=RATE), []
    for _ in range(STEPS):
        total, count = loss_of(module(batch()["tokens"]), batch()["targets"])
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    module = Model()
    reference = copy.deepcopy(module)
    template, apply = ff.from_module(module, DIMS, blocks="layers.*")
    mesh, layout = ff.Mesh(fsdp=RANKS), layouts.fsdp("fsdp")
    step = ff.compile_step(
        lambda params, data: loss_of(apply(params, data["tokens"]), data["targets"]), ff.sgd(lr=RATE),
        template=template, mesh=mesh, layout=layout, batch=batch(), remat="full",
    )  # fmt: skip
    state, losses = step.init(seed=0), []
    for _ in range(STEPS):
        state, metrics = step(state, step.shard(batch())) if step.local else step.simulate(state, batch())
        losses.append(metrics["loss"])
    module.load_state_dict(step.whole(state).params, strict=False)

    expected = in_pytorch(reference)
    pairs = zip(module.state_dict().values(), reference.state_dict().values(), strict=True)
    off = [abs(a - b) for a, b in zip(losses, expected, strict=True)] + [(a - b).abs().max().item() for a, b in pairs]
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{type(module).__name__}: {len(template)} parameters, the tied table once")
        print(next(part for part in step.explain().split("\n\n") if part.startswith("first")))
        print(f"loss {losses[0]:.4f} before, {losses[-1]:.4f} after {STEPS} steps")
        if not (max(off) < 1e-9 and losses[-1] < losses[0]):
            raise SystemExit(f"wrong: something is off by {max(off):.1e}")
        print(f"checked: the module, split and trained, equals PyTorch's own (largest difference {max(off):.0e})")


if __name__ == "__main__":
    main()
