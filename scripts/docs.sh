#!/usr/bin/env bash
# Builds the docs site into out/site; fails on a warning. Its own environment: .venv-docs, or KVJAX_VENV.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export KVJAX_VENV=${KVJAX_VENV:-.venv-docs} NO_MKDOCS_2_WARNING=1
scripts/setup.sh docs
"$KVJAX_VENV/bin/mkdocs" build --strict --quiet
echo "built out/site"
