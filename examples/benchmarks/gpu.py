"""Measures a Llama-style model on one device: fx_feather beside the same model under torch.compile.

    python examples/benchmarks/gpu.py                     # 1B parameters on the first CUDA device
    python examples/benchmarks/gpu.py --tiny              # seconds on CPU: to see that it runs

Parameters, gradients as the optimizer takes them and Adam's moments are fp32, the compute is bf16: the layout `mixed`
on the one side, `torch.autocast` on the other. Each side runs in a process of its own, one after the other.

Model FLOPs utilisation follows PaLM (Chowdhery et al., 2022, appendix B): a token costs 6 N + 12 L d S FLOPs, with N
the parameters without the embedding table, L blocks, d the residual stream, S the sequence, recomputation and the
saving of causal attention not counted; it is divided by the dense bf16 peak of the device.
"""

import argparse
import dataclasses
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from sizes import BETAS, CLIP, DECAY, EPS, LEARNING_RATE, Size

# 1.1B parameters; the tokens of a step fill the device without recomputation.
LARGE = Size(layers=22, embed=2048, mlp=5632, heads=16, vocab=32000, batch=8, seq=2048)
TINY = Size(layers=2, embed=32, mlp=64, heads=2, vocab=64, batch=2, seq=16)

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Dense bf16, in FLOPs a second, from the vendors' data sheets (SXM boards)."""

WARM = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure one device: fx_feather beside torch.compile.")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for any device")
    parser.add_argument("--batch", type=int, help="sequences in a step")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--side", choices=["ours", "peer"], help="measure this side in this process")
    parser.add_argument("--out", default="runs/gpu", help="folder of the results")
    parser.add_argument(
        "--backend", choices=["inductor", "none"], default="inductor", help="of both; none: no code generation"
    )
    parser.add_argument("--timeout", type=float, default=200, help="seconds for one side")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> Size:
    given = {k: v for k, v in (("batch", args.batch), ("layers", args.layers)) if v is not None}
    return dataclasses.replace(TINY if args.tiny else LARGE, **given)


def on_device(batches: list[dict[str, torch.Tensor]], device: str) -> list[dict[str, torch.Tensor]]:
    return [{k: v.to(device) for k, v in b.items()} for b in batches]


def ours(size: Size, device: str, batch: dict[str, torch.Tensor], backend: str, used: dict[str, Any]) -> Any:
    """A function of a batch that takes one step and gives the loss."""
    import fx_feather as ff
    import layouts
    from fx_feather.models import llama

    cfg = llama.LlamaConfig(**size.settings())
    known = inspect.signature(ff.compile_step).parameters
    options = {"backend": backend} if "backend" in known and backend != "none" else {}
    used["what"] = "fx_feather, " + (f"backend {backend}" if options else "its operators one by one")
    step = ff.compile_step(
        llama.loss(cfg),
        ff.chain(ff.clip_by_global_norm(CLIP), ff.adamw(LEARNING_RATE, *BETAS, eps=EPS, weight_decay=DECAY)),
        template=llama.template(cfg),
        mesh=ff.Mesh(),
        layout=layouts.mixed(),
        batch=batch,
        device=device,
        **options,
    )
    state = step.init(seed=0)

    def run(batch: dict[str, torch.Tensor]) -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return run


def peer(size: Size, device: str, batch: dict[str, torch.Tensor], backend: str, used: dict[str, Any]) -> Any:
    """The same from torch.compile."""
    from peers import Decoder, rope_tables

    used["what"] = ("eager" if backend == "none" else "torch.compile") + ", autocast to bf16, fused AdamW"
    with torch.device(device):
        model = Decoder(size)
    for table, values in zip((model.cos, model.sin), rope_tables(size.seq, model.head_dim), strict=True):
        table.copy_(values)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02) if p.ndim >= 2 else torch.nn.init.ones_(p)
    weights = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": weights, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = model(batch["tokens"])
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())

    compiled = loss_of if backend == "none" else torch.compile(loss_of, backend=backend)

    def run(batch: dict[str, torch.Tensor]) -> float:
        loss = compiled(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One side's figures."""
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = chosen(args)
    batches = on_device(size.batches(2), device)
    out: dict[str, Any] = {}
    run = (ours if args.side == "ours" else peer)(size, device, batches[0], args.backend, out)
    losses, took = [], []
    for k in range(WARM + args.steps):
        start = time.perf_counter()
        losses.append(run(batches[k % len(batches)]))  # the loss is a Python number: the device is done
        took.append(time.perf_counter() - start)
        if k == 0:
            out["first_step_s"] = time.perf_counter() - started
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
    middle = statistics.median(took[WARM:])
    tokens = size.batch * size.seq
    flops = 6 * (size.parameters - size.vocab * size.embed) + 12 * size.layers * size.embed * size.seq
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    peak = next((v for k, v in PEAK_FLOPS.items() if k in name), None)
    return out | {
        "device": name,
        "step_ms": 1e3 * middle,
        "quartiles_ms": [1e3 * x for x in statistics.quantiles(took[WARM:], n=4, method="inclusive")],
        "tokens_per_s": tokens / middle,
        "tflops": flops * tokens / middle / 1e12,
        "mfu": flops * tokens / middle / peak if peak else None,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
        "losses": losses,
    }


def side(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures one side in a process of its own, so that neither sees the other's memory."""
    command = [sys.executable, __file__, *sys.argv[1:], "--side", name]
    here = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": here}, capture_output=True, text=True, timeout=args.timeout
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {args.timeout:g} s"}
    if done.returncode:
        return {"failed": done.stderr[-3000:]}
    return json.loads(done.stdout.splitlines()[-1])


def main(args: argparse.Namespace) -> int:
    size = chosen(args)
    results = {name: side(name, args) for name in ("ours", "peer")}
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    about = {"size": dataclasses.asdict(size), "parameters": size.parameters, "torch": torch.__version__}
    (out / "gpu.json").write_text(json.dumps(about | {"python": platform.python_version(), **results}, indent=1))
    print(f"{size}: {size.parameters:,} parameters, compute in bf16, fp32 at rest")
    for name, r in results.items():
        if "failed" in r:
            print(f"{name}: failed\n{r['failed']}", file=sys.stderr)
            continue
        mfu = f"{r['mfu']:.1%} of peak" if r["mfu"] else "peak not known"
        memory = f"{r['peak_gb']:.1f} GB" if r["peak_gb"] else "-"
        print(
            f"{name} ({r['what']}) on {r['device']}: {r['tokens_per_s']:,.0f} tokens/s, {r['step_ms']:.1f} ms a step, "
            f"{r['tflops']:.1f} model TFLOPs/s ({mfu}), peak memory {memory}, "
            f"first step after {r['first_step_s']:.0f} s"
        )
    if any("failed" in r for r in results.values()):
        return 1
    ratio = results["ours"]["step_ms"] / results["peer"]["step_ms"]
    print(f"checked: both sides ran {args.steps} steps; step time fx_feather / torch.compile {ratio:.3f}")
    return 0


if __name__ == "__main__":
    arguments_ = arguments()
    if arguments_.side:
        print(json.dumps(measure(arguments_)))
    else:
        sys.exit(main(arguments_))
