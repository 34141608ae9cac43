#!/usr/bin/env bash
# Everything worth knowing of a GPU in 38 minutes: facts, tests, times, rivals, tuning (scripts/first_light/stages.py).
#
#   scripts/first_light_gpu.sh                  installs what it needs, runs, goes on where an earlier run stopped
#   scripts/first_light_gpu.sh --dry-run        all stages without a card, at small sizes
#   scripts/first_light_gpu.sh --list           the rows
#
# Environment: KVJAX_READY_PYTHON, an interpreter that has jax with CUDA and what the tests need: nothing is installed.
# Results: out/first_light/results.jsonl, table.md and roofline.png.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${KVJAX_READY_PYTHON:-}
if [ -z "$python" ]; then
    extras=(test)
    if [ -e /dev/nvidiactl ]; then extras+=("$(scripts/cuda_extra.sh)"); fi
    scripts/setup.sh "${extras[@]}"
    python=${KVJAX_VENV:-.venv}/bin/python
fi
exec env PYTHONPATH="$PWD" "$python" -m scripts.first_light "$@"
