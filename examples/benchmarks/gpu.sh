#!/usr/bin/env bash
# Measures one CUDA device (a 1B-parameter model, fx_feather beside torch.compile) and runs the tests that need one.
# Takes less than 8 minutes; writes JSON to $OUT (runs/gpu by default). `gpu.sh --tiny` runs on any device.
set -euo pipefail
cd "$(dirname "$0")/../.."

out="${OUT:-runs/gpu}"
python="${PYTHON:-$(if [ -x .venv/bin/python ]; then echo .venv/bin/python; else echo python3; fi)}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

status=0
"$python" examples/benchmarks/gpu.py --out "$out" "$@" || status=$?

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    timeout 120 "$python" -m pytest -q tests -k cuda -p no:cacheprovider 2>&1 | tee "$out/tests.txt" || status=$?
else
    echo "no CUDA device: the tests that need one were not run"
fi
exit "$status"
