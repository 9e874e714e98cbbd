"""Block matrix multiply: one function, and six layouts that split it in six ways.

    python examples/01_matmul.py                                            # four ranks, simulated in this process
    torchrun --standalone --nproc-per-node 4 examples/01_matmul.py          # four processes

`a @ b` has three dims: `row` and `col`, which the result keeps, and `inner`, which is summed over. A layout says which
mesh axes split each. What has to be communicated follows, and is printed.
"""

import os

import torch

import fx_feather as ff

RANKS = int(os.environ.get("WORLD_SIZE", "4"))
MESH = ff.Mesh(x=2 if RANKS % 2 == 0 else 1, y=RANKS // 2 if RANKS % 2 == 0 else RANKS)
ALL = ("x", "y")

LAYOUTS = {
    "by rows": ff.Layout(compute={"row": ALL}),
    "by columns": ff.Layout(compute={"col": ALL}),
    # Each rank has a part of every sum: the result is pending until it is added up, ...
    "by the contraction": ff.Layout(compute={"inner": ALL}),
    # ... and if the result shall be split as well, each rank needs only its own part of the sums.
    "by the contraction, result by rows": ff.Layout(compute={"inner": ALL, "row": ALL}),
    "in two dims": ff.Layout(compute={"row": "x", "col": "y"}),
    # Rows are split while computing, and b rests in parts: it is gathered at its use (this is FSDP).
    "by rows, b at rest in parts": ff.Layout(compute={"row": ALL}, store=ff.Store(params={"inner": ALL})),
}


def multiply(params: dict[str, torch.Tensor], a: torch.Tensor) -> torch.Tensor:
    return ff.constrain(a @ params["b"], "row col")


def main() -> None:
    template = {"b": ff.Param("inner col", (16, 32), init=ff.normal(1.0), dtype=torch.float64)}
    a = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    params = ff.init(template, seed=0)
    expected = multiply(params, a)  # the same function, on one device

    lines, worst = [f"a @ b, [8, 16] @ [16, 32] on {MESH!r}"], 0.0
    for name, layout in LAYOUTS.items():
        f = ff.compile(multiply, template=template, mesh=MESH, layout=layout, batch=a, batch_dims="row inner")
        # Whole values in and out: on the ranks that torchrun started, or on simulated ones in this process.
        worst = max(worst, (f.run_whole(params, a) - expected).abs().max().item())
        sent = ", ".join(repr(c) for c in f.collectives()) or "nothing"
        lines.append(f"{name:<36} result {f.out_types!s:<20} communicates {sent}")

    if int(os.environ.get("RANK", "0")) == 0:
        print("\n".join(lines))
        if not worst < 1e-12:
            raise SystemExit(f"wrong: a layout is {worst:.1e} off the product on one device")
        print(f"checked: {len(LAYOUTS)} layouts on {MESH.size} ranks equal one device (largest difference {worst:.0e})")


if __name__ == "__main__":
    main()
