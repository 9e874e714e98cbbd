"""Every example runs, alone and on two real ranks, and prints its checked line. The main job says what is wrong."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUMBERED = sorted(p.name for p in (ROOT / "examples").glob("[0-9]*.py"))
TINY = ["--steps", "3", "--batch", "4", "--seq", "16", "--embed", "16", "--layers", "1", "--sample", "3"]
LIMIT_S = 240


def run(name: str, *args: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs an example to its end, on ranks of its own under torchrun if there are several; ends it when it hangs."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, f"examples/{name}", *args]
    outside = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in outside}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "FX_FEATHER_TIMEOUT": "120"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            # torchrun ends its ranks when it is asked to end, not when it is killed.
            process.terminate()
            try:
                out, err = process.communicate(timeout=30)
            finally:
                process.kill()
            pytest.fail(f"{name} took more than {LIMIT_S} s\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(b"".join(p.read_bytes() for p in sorted((ROOT / "examples").glob("*.py"))))
    return path


def steps(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_examples_are_numbered_in_order():
    assert [name[:2] for name in NUMBERED] == ["01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11", "12"]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        # Two processes take longer, and do what other tests do with real ranks: some of them serve.
        pytest.param(name, ranks, marks=[pytest.mark.deep] if ranks == 2 and name[:2] < "08" else [])
        for name in NUMBERED
        for ranks in (1, 2)
    ],
)
def test_numbered(name, ranks):
    done = run(name, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("checked: ") == 1, "one rank prints one checked line"
    assert done.stdout.splitlines()[-1].startswith("checked: ")


def test_train_alone_and_on_two_ranks_is_one_run(text, tmp_path):
    kinds = {"one": (1, "single"), "two": (2, "tp_sp=2")}
    for name, (ranks, layout) in kinds.items():
        out = str(tmp_path / name)
        done = run("train.py", *TINY, "--data", str(text), "--out", out, "--layout", layout, ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "checked: held-out " in done.stdout.splitlines()[-1] and "order-2" in done.stdout
        assert done.stdout.count("step 3/3") == 1 and "--- import os" in done.stdout
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert [line["step"] for line in one] == [line["step"] for line in two] == [1, 2, 3]
    for a, b in zip(one, two, strict=True):
        assert math.isclose(a["loss"], b["loss"], rel_tol=1e-4)
        assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-3)
    last = json.loads((tmp_path / "two" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last.keys() >= {"held_out_bits_per_byte", "order2_bits_per_byte"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_without_its_data_says_so_on_every_rank(ranks, tmp_path):
    done = run("train.py", *TINY, "--data", str(tmp_path / "missing"), "--out", str(tmp_path), ranks=ranks)
    # torchrun has a code and a report of its own for ranks that end badly.
    assert done.returncode == (2 if ranks == 1 else 1)
    assert done.stderr.count("problem: no file or folder is there") == 1
    assert all(part in done.stderr for part in ("  got: ", "  problem: ", "  rule: ", "  fix: "))
    assert 'examples/train.py", line' not in done.stderr, "no traceback"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--layout", "fsbp=2"], "no layout is named 'fsbp'"),
        (["--layout", "hsdp=2"], "hsdp splits over 2 axes ['replica', 'shard'], but '2' is not 2 sizes"),
        (["--layout", "ddp=2,ddp=2"], "an axis of ['dp'] has a size already"),
        (["--layout", "ddp=2"], "the mesh has 2 ranks, the world has 1"),
        (["--batch", "6", "--accumulate", "4"], "dim 0 (batch) has size 6, in 4 microbatches"),
        (["--lr", "1e30"], "first leaf with a gradient that is not finite"),
        (["--lr", "1e38"], "first new value that is not finite"),
    ],
)
def test_train_names_what_is_wrong(args, problem, text, tmp_path):
    done = run("train.py", *TINY, "--data", str(text), "--out", str(tmp_path), *args)
    assert done.returncode == 2, done.stdout + done.stderr
    assert problem in done.stderr and "Traceback" not in done.stderr


def test_train_with_an_empty_file(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    done = run("train.py", *TINY, "--data", str(empty), "--out", str(tmp_path))
    assert done.returncode == 2 and "0 bytes of text" in done.stderr and "Traceback" not in done.stderr
