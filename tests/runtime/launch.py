"""Starts the ranks of a small world as processes of this machine, waits for them, and always ends them."""

import dataclasses
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one rank ended: its exit code (None if it had to be killed), its output, and when, in seconds."""

    code: int | None
    text: str
    seconds: float


def launch(
    job: str,
    ranks: int,
    out: Path,
    limit_s: float = 280,
    timeout_s: float = 120,
    stuck: int = 0,
    missing: int = 0,
    **variables: str,
) -> list[Ended]:
    """Runs a job of `tests.runtime.jobs` on several ranks of one gloo world.

    Args:
        job: its name.
        ranks: number of processes.
        out: the folder that it writes to.
        limit_s: seconds after which ranks that still run are killed.
        timeout_s: seconds that a rank waits for the others in a collective.
        missing: ranks, the last ones, that are never started.
        stuck: ranks that never end, so that they are killed as soon as all others have ended.
        variables: of their environment.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "FX_FEATHER_TIMEOUT": str(timeout_s),
        **variables,
    }
    command = [sys.executable, "-m", "tests.runtime.jobs", job, str(out)]
    logs = [out / f"log{r}.txt" for r in range(ranks - missing)]
    started, processes = time.monotonic(), []
    try:
        for r, log in enumerate(logs):
            own = {**common, "RANK": str(r), "LOCAL_RANK": str(r)}
            with log.open("wb") as f:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=f, stderr=subprocess.STDOUT))
        ended: dict[int, float] = {}
        while len(ended) < len(logs) - stuck and time.monotonic() - started < limit_s:
            for r, p in enumerate(processes):
                if r not in ended and p.poll() is not None:
                    ended[r] = time.monotonic() - started
            time.sleep(0.05)
    finally:
        for p in processes:
            if p.poll() is None:
                p.kill()
            p.wait()
    return [
        Ended(p.returncode if r in ended else None, log.read_text(errors="replace"), ended.get(r, math.inf))
        for r, (p, log) in enumerate(zip(processes, logs, strict=True))
    ]
