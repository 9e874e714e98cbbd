"""Layouts and operators of one's own: the compiler needs a table for the ones, a line for the others.

    python examples/06_custom.py                                            # four ranks, simulated in this process
    torchrun --standalone --nproc-per-node 4 examples/06_custom.py          # four processes

The first operator is a product with a matrix of low rank, `x @ down @ up`, made of operators that torch can
differentiate. The second rounds its operand, and has a handwritten backward that lets gradients through as if it did
not: a straight-through estimator. Both are registered with torch.library: to a trace each is one node. Its rule names
the factors of its dims, and its vjp if it has one. From that line follow the local shapes, the collectives and the
gradients of every layout, also of those that are thought of later.
"""

import os
from typing import Any

import optree
import torch

import fx_feather as ff

RANKS = int(os.environ.get("WORLD_SIZE", "4"))
MESH = ff.Mesh(dp=2 if RANKS % 2 == 0 else 1, tp=RANKS // 2 if RANKS % 2 == 0 else RANKS)

# An operator made of other differentiable ones: autograd sees through it, a trace does not.
LIBRARY = torch.library.Library("mylib", "DEF")
LIBRARY.define("low_rank(Tensor x, Tensor down, Tensor up) -> Tensor")
LIBRARY.impl("low_rank", lambda x, down, up: x @ down @ up, "CompositeImplicitAutograd")


# An operator that autograd can't see into: a kernel, or whatever else computes values.
@torch.library.custom_op("mylib::quantize", mutates_args=())
def quantize(x: torch.Tensor, steps: int) -> torch.Tensor:
    return torch.round(x * steps) / steps


@quantize.register_fake
def _(x: torch.Tensor, steps: int) -> torch.Tensor:
    return torch.empty_like(x)


def straight_through(ct: torch.Tensor, result: torch.Tensor, x: torch.Tensor, steps: int) -> torch.Tensor:
    """The cotangent of `quantize`'s result as the cotangent of `x`, where `x` is in range."""
    return ct * (x.abs() <= 1)


# Two tables of one's own. A model may use any dim names; here the low-rank dim is named `rank`.
LAYOUTS = {
    # The rank is summed over, so its parts leave a pending sum: one all-reduce.
    "by the rank": ff.Layout(compute={"batch": "dp", "rank": "tp"}),
    # The output is split, and what has an embed dim rests in parts. `down` is small: its own table leaves it whole.
    "by the output": ff.Layout(
        compute={"batch": "dp", "mlp": "tp"},
        store=ff.Store(params={"embed": "dp"}),
        overrides={"*['down']": ff.Layout()},
    ),
}


def template() -> dict[str, ff.Param]:
    f64 = torch.float64
    return {
        "down": ff.Param("embed rank", (16, 4), init=ff.normal(0.25), dtype=f64),
        "up": ff.Param("rank mlp", (4, 32), init=ff.normal(0.5), dtype=f64),
        "out": ff.Param("mlp embed", (32, 16), init=ff.normal(0.2), dtype=f64),
    }


def loss_fn(params: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = torch.ops.mylib.low_rank(x, params["down"], params["up"])
    y = torch.relu(quantize(h, 8)) @ params["out"]
    return (y - x).square().sum(), torch.tensor(x.shape[0])


def by_hand(params: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    """The gradients on one device, from formulas that use neither operator."""
    down, up, out = params["down"], params["up"], params["out"]
    h = x @ down @ up
    q = torch.round(h * 8) / 8
    ct = 2 * (q.relu() @ out - x) / len(x)
    ct_h = (ct @ out.T) * (q > 0) * (h.abs() <= 1)
    return {"down": x.T @ ct_h @ up.T, "up": (x @ down).T @ ct_h, "out": q.relu().T @ ct}


def main() -> None:
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def compiled(layout: ff.Layout) -> ff.Compiled:
        fn = ff.value_and_grad(loss_fn)
        return ff.compile(fn, template=template(), mesh=MESH, layout=layout, batch=x, batch_dims="batch embed")

    try:
        compiled(LAYOUTS["by the rank"])
        lines = ["wrong: an operator without a rule was split"]
    except ff.FeatherError as error:
        lines = ["without a rule:", *("  " + text for text in str(error).splitlines())]

    # The rule: x is [..., e], down [e, r], up [r, o], the result [..., o]. In each operand alone it is linear.
    ff.rule("mylib::low_rank", "... e, e r, r o -> ... o", linear="0|1|2")
    # The dims of the result are those of the operand, and each may be split.
    ff.rule("mylib::quantize", "... -> ...", vjp=straight_through)

    params = ff.init(template(), seed=0)
    expected_out, _ = ff.value_and_grad(loss_fn)(params, x)  # on one device
    expected, worst = by_hand(params, x), 0.0
    for name, layout in LAYOUTS.items():
        g = compiled(layout)
        out, grads = g.run_whole(params, x)
        off = optree.tree_map(lambda a, b: ((a - b).norm() / b.norm()).item(), grads, expected)
        worst = max(worst, abs(out["loss"] - expected_out["loss"]).item(), *optree.tree_leaves(off))
        lines += [f"{name}: {layout}", *(f"  {c!r}" for c in g.collectives())]

    if int(os.environ.get("RANK", "0")) == 0:
        print("\n".join(lines))
        if not worst < 1e-12 or lines[0].startswith("wrong"):
            raise SystemExit(f"wrong: loss or a gradient on {MESH!r} is off by {worst:.1e}")
        print(f"checked: two operators and two layouts of one's own on {MESH.size} ranks equal one device "
              f"(largest difference {worst:.0e})")  # fmt: skip


if __name__ == "__main__":
    main()
