#!/usr/bin/env bash
# Installs what the tests need and runs them; arguments go to pytest. Where there is a TPU or an NVIDIA GPU, the tests of
# its kernels run on it (tests/conftest.py): on a TPU in one process, since only one can hold it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=(test) workers=2
if [ -e /dev/accel0 ] || [ -e /dev/vfio/0 ]; then
    extras+=(tpu)
    workers=0
fi
if [ -e /dev/nvidiactl ]; then extras+=("$(scripts/cuda_extra.sh)"); fi
scripts/setup.sh "${extras[@]}"
unset PYTHONDONTWRITEBYTECODE  # the processes that tests start compile no module again
exec "${KVJAX_VENV:-.venv}/bin/python" -m pytest -n "$workers" --dist worksteal "$@"
