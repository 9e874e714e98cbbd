"""One rank of one side of a row: trains some steps, and writes what they took; started by bench.py."""

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rows import ROWS
from sizes import SIZES


def peak_bytes() -> int:
    """Peak resident memory of this process; where there is /proc, without that of the parent it was forked from."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(job: dict[str, Any], out: dict[str, Any]) -> None:
    """Trains, and fills in `out`."""
    row, size, rank = ROWS[job["row"]], SIZES[job["size"]], int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    axes = row.axes(ranks)
    batches = size.batches(job["warm"] + job["steps"])
    # Tracing with fake tensors brings this on the one side, an optimizer on the other: neither is a step's memory.
    importlib.import_module("torch._dynamo")
    if job["side"] == "ours":
        from ours import Ours

        out["imported_bytes"] = peak_bytes()
        side: Any = Ours(row, axes, size, batches[0], job["matmul"])
        out["options"] = side.options
    else:
        from peers import Peer

        out["imported_bytes"] = peak_bytes()
        if ranks > 1:
            torch.distributed.init_process_group("gloo")
        side = Peer(job["row"], axes, size, job["weights"])
    out["losses"], out["norms"], out["wall_s"], out["cpu_s"] = [], [], [], []
    for k, batch in enumerate(batches):
        wall, cpu = time.perf_counter(), time.process_time()
        loss, norm = side.step(side.shard(batch))
        took = time.perf_counter() - wall, time.process_time() - cpu
        if k == 0:
            out["first_step_s"] = time.time() - job["started"]
        if k == 0 and job["check"]:
            moments = {name: x.contiguous() for name, x in side.moments()}
            if rank == 0:
                from safetensors.torch import save_file

                save_file(moments, job["check"])
        if k >= job["warm"]:
            out["wall_s"].append(took[0])
            out["cpu_s"].append(took[1])
        out["losses"].append(loss)
        out["norms"].append(norm)
    out["peak_bytes"] = peak_bytes() - out["imported_bytes"]
    if job["check"]:
        if job["side"] == "ours":
            out["sent_bytes"], out["collectives"] = side.sent_bytes(), side.sent()
        else:
            from traffic import Traffic

            with Traffic() as traffic:
                side.step(side.shard(batches[-1]))
            out["sent_bytes"], out["collectives"] = traffic.sent_bytes, traffic.calls


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    out: dict[str, Any] = {}
    measure(job, out)
    Path(job["out"]).write_text(json.dumps(out))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        # Threads of gloo let go of the last tensors on their own time, and abort a process whose interpreter is gone.
        time.sleep(0.1)


if __name__ == "__main__":
    main()
