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
for package in "$PWD"/out/dist/kvjax-*.whl "$PWD"/out/dist/kvjax-*.tar.gz; do
    rm -rf "$scratch/venv"
    .venv/bin/python -m venv "$scratch/venv"
    "$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$package[cli,hf]"
    (
        cd "$scratch"
        export JAX_PLATFORMS=cpu
        venv/bin/python -c 'import sys, kvjax.core; assert "jax" not in sys.modules; import kvjax.engine, kvjax.nnx'
        venv/bin/kvjax plan llama-3-8b --memory 10GiB >/dev/null
        venv/bin/kvjax generate --prompt "The try statement" --max-tokens 4 --no-plot --no-compilation-cache >/dev/null
    )
    echo "installs and runs: $(basename "$package")"
done
