#!/usr/bin/env bash
# Lint, format, types and host tests: what to run before a commit. Under a minute once installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev
bin=${KVJAX_VENV:-.venv}/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
JAX_PLATFORMS=cpu "$bin/python" -m pytest -q -n 2 tests/core tests/test_architecture.py "$@"
