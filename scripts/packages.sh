#!/usr/bin/env bash
# Builds wheel and sdist into out/dist, installs each into an empty environment, and uses it from another folder: the
# core, the shipped configs, the command line, the demo model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev
rm -rf out/dist
.venv/bin/python -m build --outdir out/dist . >/dev/null
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

try_out() { # a package, in a folder of its own
    local venv=$scratch/${1##*.}/venv
    .venv/bin/python -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$1[cli,hf]"
    cd "$venv/.."
    export JAX_PLATFORMS=cpu
    venv/bin/python -c 'import sys, kvjax.core; assert "jax" not in sys.modules; import kvjax.engine, kvjax.nnx'
    venv/bin/kvjax plan llama-3-8b --memory 10GiB >/dev/null
    venv/bin/kvjax generate --prompt "The try statement" --max-tokens 4 --no-compilation-cache >/dev/null
    echo "installs and runs: $(basename "$1")"
}

runs=()
for package in "$PWD"/out/dist/kvjax-*.whl "$PWD"/out/dist/kvjax-*.tar.gz; do
    try_out "$package" &
    runs+=($!)
done
status=0
for run in "${runs[@]}"; do wait "$run" || status=1; done
exit "$status"
