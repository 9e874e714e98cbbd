"""The benchmark runs at a tiny size: both sides agree, and every figure is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "benchmarks"
LIMIT_S = 240


def run(*command: str) -> subprocess.CompletedProcess[str]:
    outside = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in outside}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, str(FOLDER / "bench.py"), "--size", "tiny", "--steps", "2", "--rounds", "1", *args)


@pytest.mark.parametrize("row", ["fsdp_tp", pytest.param("ddp", marks=pytest.mark.deep)])
def test_both_sides_agree_and_are_measured(row, tmp_path):
    out = tmp_path / "bench.json"
    done = bench("--ranks", "2", "--rows", row, "--json", str(out))
    assert done.stdout.splitlines()[-1].startswith("checked: 1 row")
    assert ", losses to 1e-05, every gradient to " in done.stdout.splitlines()[-1]
    report = json.loads(out.read_text())
    assert [r["row"] for r in report["results"]] == [row] and not report["failures"]
    for r in report["results"]:
        assert r["apart"]["losses"] < 1e-5 and r["apart"]["gradients"] < 1e-4
        for side in (r["ours"], r["peer"]):
            assert side["step_ms"]["low"] <= side["step_ms"]["median"] <= side["step_ms"]["high"]
            assert side["cpu_ms"]["median"] > 0 and side["first_step_s"] > 0 and side["sent_mb"] > 0
            assert sum(side["collectives"].values()) > 0
        assert r["ratios"].keys() == {"cpu", "step", "memory", "first_step", "sent"}


def test_an_unknown_row_is_named():
    command = [sys.executable, str(FOLDER / "bench.py"), "--rows", "ddp,fsbp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and "'fsbp' is none of eager, compiled, ddp" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (["--ranks", "1,"], "--ranks: '' is not a positive integer"),
        (["--ranks", "0"], "--ranks: '0' is not a positive integer"),
        (["--rounds", "0"], "'0' is not a positive integer"),
        (["--steps", "-1"], "'-1' is not a positive integer"),
        (["--ranks", "3", "--rows", "hsdp"], "--rows hsdp has no mesh of 3 ranks"),
    ],
)
def test_options_that_measure_nothing_are_refused(wrong, text, tmp_path):
    command = [sys.executable, str(FOLDER / "bench.py"), *wrong, "--json", str(tmp_path / "kept.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and text in done.stderr and not (tmp_path / "kept.json").exists()


@pytest.mark.deep
def test_scaling(tmp_path):
    out = tmp_path / "scaling.json"
    done = run(sys.executable, str(FOLDER / "scaling.py"), "--tiny", "--json", str(out))
    assert "checked: 4 layers compile in " in done.stdout
    points = json.loads(out.read_text())
    shallow, deep = points[0], points[1]
    assert (shallow["layers"], deep["layers"]) == (1, 4)
    # Each distinct block is one function, whatever the depth.
    assert deep["functions"] <= shallow["functions"] + 4
    assert points[-1]["ranks"] == 4 and points[-1]["simulate_s"] > 0


def test_one_device(tmp_path):
    done = run(str(FOLDER / "gpu.sh"), "--tiny", "--steps", "2", "--backend", "none", "--out", str(tmp_path))
    assert "checked: both sides ran 2 steps" in done.stdout
    report = json.loads((tmp_path / "gpu.json").read_text())
    for side in (report["ours"], report["peer"]):
        assert side["tokens_per_s"] > 0 and side["tflops"] > 0 and len(side["losses"]) == 5
    assert "no CUDA device: the tests that need one were not run" in done.stdout
