"""Measures each layout of fx_feather beside what PyTorch itself offers for it, in turns, on the CPU ranks of a machine.

    python examples/benchmarks/bench.py                                       # or: make bench
    python examples/benchmarks/bench.py --size medium --ranks 2,4 --rows fsdp,tp --rounds 5

Both sides train the same model from the same weights on the same batches, in processes of their own with one thread
each. A round runs one side and then the other, so that both meet the same noise of the machine. First of all, one
run of each side is compared: losses, norms, and the gradient of every parameter.

CPU time (of a rank and a step, all threads) is the steadier figure. Bytes are those that a rank sends in a step if
each collective runs as a ring: read off the program for fx_feather, counted in a running step for the peer.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ours import as_module, named
from plot import plot
from rows import ROWS
from safetensors.torch import load_file, save_file
from sizes import SIZES

import fx_feather as ff
from fx_feather.models import llama

HERE = Path(__file__).resolve().parent
SIDES = ("ours", "peer")
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
WARM = 2


class Failed(Exception):
    """A side did not run, or the two disagree."""


def positive(text: str) -> int:
    """A count from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure fx_feather beside the parallel modules of PyTorch.")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, joined by commas")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}, joined by commas")
    parser.add_argument("--steps", type=positive, default=10, help="measured steps of each side in a round")
    parser.add_argument("--rounds", type=positive, default=3)
    matmuls = ("auto", "aten", "onednn") if ff.has_onednn() else ("auto", "aten")
    parser.add_argument(
        "--matmul", choices=matmuls, default="auto", help="of fx_feather: auto measures; aten is what the peers use"
    )
    parser.add_argument("--json", default="runs/bench/bench.json", help="where to write all numbers; a plot beside it")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one side may take in a round")
    args = parser.parse_args()
    try:
        args.ranks = [positive(n) for n in args.ranks.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--ranks: {error}")
    args.rows = args.rows.split(",")
    unknown = [r for r in args.rows if r not in ROWS]
    if unknown:
        parser.error(f"--rows: {', '.join(map(repr, unknown))} is none of {', '.join(ROWS)}")
    if all(ROWS[row].axes(n) is None for n in args.ranks for row in args.rows):
        parser.error(f"--rows {','.join(args.rows)} has no mesh of {' or '.join(map(str, args.ranks))} ranks")
    return args


def launch(side: str, row: str, ranks: int, job: dict[str, Any], folder: Path, timeout: float) -> list[dict[str, Any]]:
    """Runs one side on ranks of its own, to the end; what each rank wrote.

    Raises:
        Failed: a rank failed or was too slow; the others are ended.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), env.get("PYTHONPATH", "")])
    job = job | {"side": side, "row": row, "started": time.time()}
    processes, files = [], []
    try:
        for rank in range(ranks):
            out, log = folder / f"{side}.{rank}.json", folder / f"{side}.{rank}.log"
            out.unlink(missing_ok=True)
            command = [sys.executable, str(HERE / "rank.py"), json.dumps(job | {"out": str(out)})]
            with log.open("w") as text:
                here = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=here, stdout=text, stderr=text))
            files.append((out, log))
        until = time.monotonic() + timeout
        while any(p.poll() is None for p in processes):
            if any(p.poll() for p in processes) or time.monotonic() > until:
                break
            time.sleep(0.02)
        codes = [p.poll() for p in processes]
    finally:
        for p in processes:
            if p.poll() is None:
                p.kill()
            p.wait()
    if any(code != 0 for code in codes):
        first = next((i for i, code in enumerate(codes) if code), None)
        tail = files[first or 0][1].read_text()[-3000:]
        what = f"took more than {timeout:g} s" if first is None else f"rank {first} ended with code {codes[first]}"
        raise Failed(f"{side} of row {row!r} on {ranks} ranks: {what}\n{tail}")
    return [json.loads(out.read_text()) for out, _ in files]


def distance(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def compare(ours: list[dict[str, Any]], peer: list[dict[str, Any]], moments: list[Path]) -> dict[str, float]:
    """How far apart the two sides are: losses, gradient norms, and the worst gradient relative to its own norm.

    After one step Adam's first moment is the clipped gradient times a constant.
    """
    a, b = (load_file(path) for path in moments)
    if a.keys() != b.keys():
        raise Failed(f"the sides have other parameters: {sorted(a.keys() ^ b.keys())}")
    apart = {k: ((a[k] - b[k]).double().norm() / b[k].double().norm()).item() for k in b}
    worst = max(apart, key=lambda k: apart[k])
    found = {
        "losses": max(distance(r["losses"], peer[0]["losses"]) for r in [*ours, *peer]),
        "norms": max(distance(r["norms"], peer[0]["norms"]) for r in [*ours, *peer]),
        "gradients": apart[worst],
    }
    if not (found["losses"] < LOSS_TOLERANCE and found["gradients"] < GRADIENT_TOLERANCE):
        raise Failed(f"the sides disagree: {found}, worst gradient that of {worst}")
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "low": low, "high": high}


def summary(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Figures of one side from all its rounds. A step takes as long as its slowest rank."""
    wall = [max(of_ranks) for run in runs for of_ranks in zip(*(r["wall_s"] for r in run), strict=True)]
    cpu = [statistics.mean(of_ranks) for run in runs for of_ranks in zip(*(r["cpu_s"] for r in run), strict=True)]
    return {
        "step_ms": spread([1e3 * x for x in wall]),
        "cpu_ms": spread([1e3 * x for x in cpu]),
        "peak_mb": statistics.median([max(r["peak_bytes"] for r in run) for run in runs]) / 1e6,
        "first_step_s": statistics.median([max(r["first_step_s"] for r in run) for run in runs]),
    }


def measure(row: str, ranks: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures of one row: first the comparison, then rounds of one side and the other."""
    job = {"size": args.size, "weights": str(folder / "weights"), "warm": WARM, "steps": args.steps}
    job |= {"matmul": args.matmul, "check": None}
    moments = [folder / side for side in SIDES]
    checked = [
        launch(side, row, ranks, job | {"check": str(path), "warm": 0, "steps": 3}, folder, args.timeout)
        for side, path in zip(SIDES, moments, strict=True)
    ]
    found: dict[str, Any] = {"row": row, "ranks": ranks, "axes": ROWS[row].axes(ranks), "peer_is": ROWS[row].peer}
    found["apart"] = compare(*checked, moments)
    runs: dict[str, list[Any]] = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side in SIDES:
            runs[side].append(launch(side, row, ranks, job, folder, args.timeout))
    losses = [r["losses"] for of_side in runs.values() for run in of_side for r in run]
    found["apart"]["losses"] = max(distance(x, losses[-1]) for x in losses)
    if found["apart"]["losses"] > LOSS_TOLERANCE:
        raise Failed(f"row {row!r} on {ranks} ranks: losses differ by {found['apart']['losses']:.1e}")
    for side, check in zip(SIDES, checked, strict=True):
        found[side] = summary(runs[side])
        found[side]["sent_mb"] = check[0]["sent_bytes"] / 1e6
        found[side]["collectives"] = check[0]["collectives"]
    found["options"] = checked[0][0]["options"]
    a, b = found["ours"], found["peer"]
    found["ratios"] = {
        "cpu": a["cpu_ms"]["median"] / b["cpu_ms"]["median"],
        "step": a["step_ms"]["median"] / b["step_ms"]["median"],
        "memory": a["peak_mb"] / b["peak_mb"],
        "first_step": a["first_step_s"] / b["first_step_s"],
        "sent": a["sent_mb"] / b["sent_mb"] if b["sent_mb"] else None,
    }
    return found


HEADER = (
    f"{'row':<9}{'ranks':>5} | {'CPU ms/rank/step':^29} | {'step ms (quartiles)':^43} | {'peak MB':^18} | "
    f"{'sent MB':^18} | {'start to 1st step s':^19}\n"
    f"{'':<14} | {'ours':>9}{'peer':>9}{'ratio':>11} | {'ours':>16}{'peer':>18}{'ratio':>9} | "
    f"{'ours':>6}{'peer':>6}{'ratio':>6} | {'ours':>6}{'peer':>6}{'ratio':>6} | {'ours':>6}{'peer':>6}{'ratio':>7}"
)


def line(r: dict[str, Any]) -> str:
    """A row of the table."""
    a, b, ratio = r["ours"], r["peer"], r["ratios"]
    steps = [f"{x['median']:.0f} ({x['low']:.0f}-{x['high']:.0f})" for x in (a["step_ms"], b["step_ms"])]
    sent = f"{ratio['sent']:>6.2f}" if ratio["sent"] is not None else f"{'':>6}"
    return (
        f"{r['row']:<9}{r['ranks']:>5} | "
        f"{a['cpu_ms']['median']:>9.1f}{b['cpu_ms']['median']:>9.1f}{ratio['cpu']:>11.3f} | "
        f"{steps[0]:>16}{steps[1]:>18}{ratio['step']:>9.3f} | "
        f"{a['peak_mb']:>6.0f}{b['peak_mb']:>6.0f}{ratio['memory']:>6.2f} | "
        f"{a['sent_mb']:>6.1f}{b['sent_mb']:>6.1f}{sent} | "
        f"{a['first_step_s']:>6.1f}{b['first_step_s']:>6.1f}{ratio['first_step']:>7.2f}"
    )


def main(args: argparse.Namespace) -> int:
    size, target = SIZES[args.size], Path(args.json)
    print(f"{args.size}: {size}, {size.parameters:,} parameters, fp32, torch {torch.__version__}", flush=True)
    found = ""
    if args.matmul == "auto":
        torch.set_num_threads(1)
        args.matmul, found = ff.faster_matmul(size.products), " (measured as the faster)" if ff.has_onednn() else ""
    print(f"matrices are multiplied by {args.matmul} in fx_feather{found}, by aten in the peers", flush=True)
    todo = [(row, n) for n in args.ranks for row in args.rows if ROWS[row].axes(n) is not None]
    results, failures = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        params = ff.init(llama.template(llama.LlamaConfig(**size.settings())), seed=0)
        save_file({k: as_module(k, x) for k, x in named(params)}, folder / "weights")
        del params
        print(HEADER, flush=True)
        for row, ranks in todo:
            try:
                results.append(measure(row, ranks, args, folder))
                print(line(results[-1]), flush=True)
            except Failed as error:
                failures.append(str(error))
                print(f"{row:<9}{ranks:>5} | failed: {error}", file=sys.stderr, flush=True)
    if not results:
        return 1
    target.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "size": args.size,
        "torch": torch.__version__,
        "rounds": args.rounds,
        "steps": args.steps,
        "matmul": args.matmul,
    }
    target.write_text(json.dumps(report | {"results": results, "failures": failures}, indent=1))
    print(f"wrote {target}; {plot(results, target.with_suffix('.png'))}")
    if not failures:
        worst = max(r["apart"]["gradients"] for r in results)
        print(f"checked: {len(results)} rows, losses to {LOSS_TOLERANCE:g}, every gradient to {worst:.0e} of its norm")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(arguments()))
