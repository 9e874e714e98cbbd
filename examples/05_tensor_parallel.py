"""Tensor parallel: attention and MLP, and the conjugate pair of collectives around each, seen in the program.

    python examples/05_tensor_parallel.py                                              # two ranks, simulated
    torchrun --standalone --nproc-per-node 2 examples/05_tensor_parallel.py            # two processes

Each rank has some of the heads and some of the hidden features, with their rows of the second weight, so each half of a
block ends in a pending sum: an all-reduce forward, nothing backward. Where a half starts the input is the same on every
rank but used differently: nothing forward, an all-reduce of its cotangent backward. These two are each other's vjp.
With the residual stream split on its sequence dim, they become an all-gather and a reduce-scatter.
"""

import os

import optree
import torch

import fx_feather as ff
import layouts
from fx_feather.nn import attention, mlp, norm, rope

RANKS = int(os.environ.get("WORLD_SIZE", "2"))
EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP = 32, 8, 4, 8, 64
Params = dict[str, dict[str, torch.Tensor]]


def template() -> dict[str, dict[str, ff.Param]]:
    f64 = torch.float64
    return {
        "attention": {
            "norm": norm.rms_template(EMBED, dtype=f64),
            **attention.template(EMBED, HEADS, KV_HEADS, HEAD_DIM, qk_norm=True, dtype=f64),
        },
        "mlp": {"norm": norm.rms_template(EMBED, dtype=f64), **mlp.template(EMBED, MLP, dtype=f64)},
    }


# Each half is a block of its own, so that it is a function of its own in the program that is printed below.
@ff.block
def attention_half(p: dict[str, torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x + attention.attention(p, norm.rms_norm(p["norm"], x), cos, sin)


@ff.block
def mlp_half(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x + mlp.swiglu(p, norm.rms_norm(p["norm"], x))


def loss_fn(params: Params, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x = ff.constrain(batch["x"], "batch residual_seq embed")
    cos, sin = rope.tables(batch["positions"], HEAD_DIM, dtype=torch.float64)
    y = mlp_half(params["mlp"], attention_half(params["attention"], x, cos, sin))
    return (y - batch["y"]).square().sum(), torch.tensor(y.numel())


def main() -> None:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 2, 8, EMBED, dtype=torch.float64, generator=random)
    batch = {"x": x, "y": y, "positions": torch.arange(8).repeat(2, 1)}
    dims = {"x": "batch residual_seq embed", "y": "batch residual_seq embed", "positions": "batch seq"}
    params = ff.init(template(), seed=0)
    expected_out, expected = ff.value_and_grad(loss_fn)(params, batch)  # on one device

    mesh, lines, worst = ff.Mesh(tp=RANKS), [], 0.0
    for layout in (layouts.tp("tp"), layouts.tp_sp("tp")):
        g = ff.compile(
            ff.value_and_grad(loss_fn), template=template(), mesh=mesh, layout=layout, batch=batch, batch_dims=dims
        )
        out, grads = g.run_whole(params, batch)
        off = optree.tree_map(lambda a, b: ((a - b).norm() / b.norm()).item(), grads, expected)
        worst = max(worst, abs(out["loss"] - expected_out["loss"]).item(), *optree.tree_leaves(off))
        lines.append(f"{layout}\n  on {mesh!r}: the program calls, in order")
        for section in g.program.sections.values():
            for call in section.instrs:
                found = list(call.func.collectives())
                if found or "half" in call.func.name:
                    lines.append(f"    {call.func.name:<26}{', '.join(repr(c) for c in found) or '-'}")

    if int(os.environ.get("RANK", "0")) == 0:
        print("\n".join(lines))
        if not worst < 1e-12:
            raise SystemExit(f"wrong: loss or a gradient of {RANKS} ranks is off by {worst:.1e}")
        print(f"checked: loss and every gradient under tp and tp_sp on {RANKS} ranks equal one device "
              f"(largest difference {worst:.0e})")  # fmt: skip


if __name__ == "__main__":
    main()
