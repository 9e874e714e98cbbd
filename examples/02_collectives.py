"""The typed collectives and their vjps, in per-rank code that is written by hand.

    python examples/02_collectives.py                                       # four ranks, simulated in this process
    torchrun --standalone --nproc-per-node 4 examples/02_collectives.py     # four processes

Inside of `ff.shard_map` a tensor is a rank's own part, and collectives name mesh axes. Each collective is linear, so
with a random cotangent `c` the loss `⟨f(x), c⟩` has the gradient `vjp(c)`: one compiled program gives both sides. They
are compared with what they should be in terms of whole values, and with each other: `⟨f(x), c⟩ = ⟨x, vjp(c)⟩`.
"""

import os
from collections.abc import Callable

import torch

import fx_feather as ff

N = int(os.environ.get("WORLD_SIZE", "4"))
MESH = ff.Mesh(x=N)
ROWS, WHOLE = ff.P("x"), ff.P()  # rank r holds row r (or rows); every rank holds all
TEMPLATE = {"x": ff.Param("row _", (N, N), init=ff.normal(1.0), dtype=torch.float64)}
RING = [(r, (r + 1) % N) for r in range(N)]

Tensor = torch.Tensor
Map = Callable[[Tensor], Tensor]

# name: per-rank code, how x comes in, how the result goes out, the result and the vjp in terms of whole values.
TABLE: dict[str, tuple[Map, ff.P, ff.P, Map, Map]] = {
    "psum": (
        lambda x: ff.psum(x, "x"), ROWS, WHOLE,
        lambda x: x.sum(0, keepdim=True), lambda c: c.expand(N, N),
    ),
    "pvary": (
        lambda x: ff.pvary(x, "x"), WHOLE, ROWS,
        lambda x: x.repeat(N, 1), lambda c: c.view(N, N, N).sum(0),
    ),
    "all_gather": (
        lambda x: ff.all_gather(x, "x", dim=0), ROWS, ROWS,
        lambda x: x.repeat(N, 1), lambda c: c.view(N, N, N).sum(0),
    ),
    "all_gather_invariant": (
        lambda x: ff.all_gather_invariant(x, "x", dim=0), ROWS, WHOLE,
        lambda x: x, lambda c: c,
    ),
    "reduce_scatter": (
        lambda x: ff.reduce_scatter(x, "x", dim=1), ROWS, ff.P(None, "x"),
        lambda x: x.sum(0, keepdim=True), lambda c: c.expand(N, N),
    ),
    "pscatter": (
        lambda x: ff.pscatter(x, "x", dim=0), WHOLE, ROWS,
        lambda x: x, lambda c: c,
    ),
    "all_to_all": (
        lambda x: ff.all_to_all(x, "x", split_dim=1, concat_dim=0), ROWS, ff.P(None, "x"),
        lambda x: x, lambda c: c,
    ),
    "ppermute": (
        lambda x: ff.ppermute(x, "x", RING), ROWS, ROWS,
        lambda x: x.roll(1, 0), lambda c: c.roll(-1, 0),
    ),
}  # fmt: skip


def both_sides(f: Map, in_spec: ff.P, out_spec: ff.P, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`⟨f(x), c⟩`, `f(x)` and `vjp(c)` as whole values, from the ranks of the world or simulated ones."""
    region = ff.shard_map(f, mesh=MESH, in_specs=in_spec, out_specs=out_spec)

    def loss(params: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = region(params["x"])
        return (y * batch).sum(), torch.tensor(1), y

    layout = ff.Layout(compute={"row": "x"})
    g = ff.compile(ff.value_and_grad(loss), template=TEMPLATE, mesh=MESH, layout=layout, batch=c, batch_dims="_ _")
    out, grads = g.run_whole(ff.init(TEMPLATE, seed=0), c)
    return out["loss"], out["aux"], grads["x"]


def main() -> None:
    x = ff.init(TEMPLATE, seed=0)["x"]
    lines, worst = [f"{'collective':<22}{'its type':<24}{'its vjp':<22}sent by a rank for 1 MB"], 0.0
    for name, (f, in_spec, out_spec, result, vjp) in TABLE.items():
        y = result(x)
        c = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        inner, got, grad = both_sides(f, in_spec, out_spec, c)
        off = [got - y, grad - vjp(c), inner - (x * grad).sum()]
        worst = max(worst, *(d.abs().max().item() for d in off))
        row = ff.COLLECTIVES[name]
        lines.append(f"{name:<22}{row.type:<24}{row.vjp or 'none':<22}{row.bytes(1 << 20, N) / (1 << 20):.2f} MB")

    # A maximum is not linear: it has no vjp, and it says so.
    try:
        both_sides(lambda x: ff.pmax(x, "x"), ROWS, WHOLE, x[:1])
        refused = False
    except ff.FeatherError as error:
        refused = True
        lines += ["pmax has no vjp, and asking for one says:", *("  " + text for text in str(error).splitlines())]

    if int(os.environ.get("RANK", "0")) == 0:
        print("\n".join(lines))
        if not (worst < 1e-12 and refused):
            raise SystemExit(f"wrong: a collective or its vjp is off by {worst:.1e}, or pmax was differentiated")
        print(f"checked: {len(TABLE)} collectives and their vjps on {N} ranks are as written (off by {worst:.0e})")


if __name__ == "__main__":
    main()
