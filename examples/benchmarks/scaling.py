"""Shows what compiling costs as models and meshes grow: time, size of the program, memory.

    python examples/benchmarks/scaling.py            # depth 8 to 128, 1 to 4 mesh axes, 2 to 64 simulated ranks
    python examples/benchmarks/scaling.py --tiny     # a few points, in seconds

Each point is a process of its own that compiles a tiny model first, so that imports and caches are not counted. Memory
is what the process grows by at its peak. The model is small: nothing here depends on the sizes of tensors.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rank import peak_bytes

import fx_feather as ff
import layouts
from fx_feather.models import llama

MESHES: dict[int, tuple[dict[str, int], Any]] = {
    1: ({"dp": 2}, lambda: layouts.fsdp("dp")),
    2: ({"dp": 2, "tp": 2}, lambda: layouts.fsdp("dp") | layouts.tp_sp("tp")),
    3: ({"replica": 2, "shard": 2, "tp": 2}, lambda: layouts.hsdp() | layouts.tp_sp("tp")),
    4: ({"replica": 2, "shard": 2, "far": 2, "near": 2}, lambda: layouts.hsdp() | layouts.tp_sp(("far", "near"))),
}
"""For a number of axes, their sizes and a layout that uses all."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile time, program size and memory against depth, axes and ranks.")
    parser.add_argument("--tiny", action="store_true", help="a few small points")
    parser.add_argument("--json", default="runs/bench/scaling.json")
    parser.add_argument("--point", help="measure one point in this process: layers, axes, ranks, whether to simulate")
    return parser.parse_args()


def compiled(layers: int, axes: int, ranks: int) -> tuple[ff.Step, dict[str, torch.Tensor]]:
    """A training step; with more ranks than the axes have by themselves, the outermost axis grows."""
    sizes, layout = MESHES[axes]
    sizes = dict(sizes)
    sizes[next(iter(sizes))] *= max(1, ranks // 2**axes)
    cfg = llama.LlamaConfig(vocab=256, layers=layers, embed=64, heads=8, kv_heads=8, mlp=128)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (max(8, ranks), 17), generator=random)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": torch.arange(16).repeat(len(tokens), 1)}
    batch = {k: v.contiguous() for k, v in batch.items()}
    optimizer = ff.chain(ff.clip_by_global_norm(1.0), ff.adamw(3e-4))
    made = ff.compile_step(
        llama.loss(cfg),
        optimizer,
        template=llama.template(cfg),
        mesh=ff.Mesh(**sizes),
        layout=layout(),
        batch=batch,
        device="cpu",
    )
    return made, batch


def measure(layers: int, axes: int, ranks: int, simulate: bool) -> dict[str, Any]:
    """The figures of one point."""
    compiled(1, axes, ranks)
    before, start = peak_bytes(), time.process_time()
    step, batch = compiled(layers, axes, ranks)
    out: dict[str, Any] = {"layers": layers, "axes": axes, "ranks": step.mesh.size}
    out["compile_s"] = time.process_time() - start
    out["compile_mb"] = (peak_bytes() - before) / 1e6
    funcs = step.program.funcs()
    out["functions"] = len(funcs)
    out["nodes"] = sum(len(f.graph.nodes) for f in funcs)
    out["instructions"] = sum(len(i.ins) for s in step.program.sections.values() for i in s.instrs)
    out["collectives"] = len(step.collectives())
    if simulate:
        before = peak_bytes()
        state = step.init(seed=0)
        step.simulate(state, batch)  # what is made once for each function is made here
        start = time.process_time()
        step.simulate(state, batch)
        out["simulate_s"] = time.process_time() - start
        out["simulate_mb"] = (peak_bytes() - before) / 1e6
    return out


COLUMNS = {
    "layers": "d",
    "axes": "d",
    "ranks": "d",
    "compile_s": ".2f",
    "compile_mb": ".0f",
    "functions": "d",
    "nodes": "d",
    "instructions": "d",
    "collectives": "d",
    "simulate_s": ".2f",
    "simulate_mb": ".0f",
}


def main(args: argparse.Namespace) -> None:
    depths, axes, ranks = ((8, 16, 32, 64, 128), (1, 2, 3, 4), (2, 4, 8, 16, 32, 64))
    if args.tiny:
        depths, axes, ranks = (1, 4), (2,), (4,)
    # The outermost axis of the first layout takes any number of ranks.
    points = [(n, 2, 4, False) for n in depths] + [(4, n, 2**n, False) for n in axes] + [(2, 1, n, True) for n in ranks]
    here = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    results = []
    print("".join(f"{name:>14}" for name in COLUMNS), flush=True)
    for point in points:
        command = [sys.executable, __file__, "--point", json.dumps(point)]
        env = os.environ | {"PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
        r = json.loads(done.stdout.splitlines()[-1])
        results.append(r)
        print("".join(f"{format(r[k], f) if k in r else '-':>14}" for k, f in COLUMNS.items()), flush=True)
    target = Path(args.json)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(results, indent=1))
    deep = [r for r, p in zip(results, points, strict=True) if p in points[: len(depths)]]
    growth = deep[-1]["compile_s"] / deep[0]["compile_s"]
    print(f"checked: {deep[-1]['layers']} layers compile in {growth:.1f} times the time of {deep[0]['layers']}")


if __name__ == "__main__":
    given = arguments()
    if given.point:
        print(json.dumps(measure(*json.loads(given.point))))
    else:
        main(given)
