#!/usr/bin/env bash
# Installs what the tests need and runs them; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh test
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
exec "${KVJAX_VENV:-.venv}/bin/python" -m pytest -n 2 --dist worksteal "$@"
