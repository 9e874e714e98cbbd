"""Random numbers: dropout whose masks are the same bits in six layouts, for any number of microbatches.

    python examples/09_dropout.py                                           # four ranks, simulated in this process
    torchrun --standalone --nproc-per-node 4 examples/09_dropout.py         # four processes

A random number is a function of a seed, the step, the call of a block, the number of the draw in it, and the place of
the element in the whole tensor of the whole batch. A rank draws its own part and nothing else, and what is computed
again for the backward is drawn again, so no mask is kept or sent. `ff.random.seeded` gives the very numbers to the
plain function on one device, which is what all others are held to.
"""

import os

import torch
import torch.nn.functional as F

import fx_feather as ff
import layouts

RANKS = int(os.environ.get("WORLD_SIZE", "4"))
HALF = RANKS // 2 if RANKS % 2 == 0 else RANKS
GRID = ff.Mesh(dp=RANKS // HALF, tp=HALF)
SEED, STEPS = 7, 3

LAYOUTS = {
    "single": (GRID, layouts.single()),
    "ddp": (ff.Mesh(dp=RANKS), layouts.ddp("dp")),
    "zero1": (ff.Mesh(dp=RANKS), layouts.zero1("dp")),
    "fsdp": (ff.Mesh(dp=RANKS), layouts.fsdp("dp")),
    "tp": (ff.Mesh(tp=RANKS), layouts.tp("tp")),
    "fsdp and tp": (GRID, layouts.fsdp("dp") | layouts.tp("tp")),
}


def mlp(x: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
    return x + F.dropout(torch.relu(F.dropout(x, 0.1) @ p["up"]) @ p["down"], 0.2)


layer = ff.block(mlp)


def loss(params: list[dict[str, torch.Tensor]], batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = batch
    for p in params:
        x = layer(x, p)
    return ((x - 1) ** 2).sum(), torch.tensor(batch.shape[0])


def main() -> None:
    up, down = ff.Param("embed mlp", (16, 32)), ff.Param("mlp embed", (32, 16))
    template = [{"up": up, "down": down} for _ in range(2)]
    batch = torch.randn(4 * RANKS, 16, generator=torch.Generator().manual_seed(0))
    common = {"template": template, "batch": batch, "batch_dims": "batch embed", "seed": SEED}

    # The plain function on one device: the masks of the batch's dropout, and the loss of each step.
    params = ff.init(template)
    with ff.random.seeded(SEED):
        mask = F.dropout(torch.ones_like(batch), 0.5)
    plain, optimizer = [], ff.sgd(lr=0.01)
    state = optimizer.init(params)
    for k in range(STEPS):
        with ff.random.seeded(SEED, k):
            out, grads = ff.value_and_grad(loss)(params, batch)
        params, state = optimizer.step(grads, state, params)
        plain.append(out["loss"].item())

    worst = 0.0
    for name, (mesh, layout) in LAYOUTS.items():
        draw = ff.compile(lambda p, x: F.dropout(torch.ones_like(x), 0.5), mesh=mesh, layout=layout, **common)
        if not torch.equal(draw.run_whole(ff.init(template), batch), mask):
            raise SystemExit(f"wrong: another mask under {name}")
        for accumulate in (1, 4):
            step = ff.compile_step(loss, optimizer, mesh=mesh, layout=layout, accumulate=accumulate, **common)
            now, losses = step.init(), []
            for _ in range(STEPS):
                now, metrics = step.run_whole(now, batch)
                losses.append(metrics["loss"])
            worst = max([worst, *(abs(a / b - 1) for a, b in zip(losses, plain, strict=True))])
        say(f"{name:12}", " ".join(f"{x:.6f}" for x in losses))
    if not worst < 1e-5:
        raise SystemExit(f"wrong: a loss is off by {worst:.0e}")
    dropped = int((mask == 0).sum())
    say(f"checked: {dropped} of {mask.numel()} elements dropped, the same in six layouts; losses alike to {worst:.0e}")


def say(*words: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(*words)


if __name__ == "__main__":
    main()
