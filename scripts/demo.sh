#!/usr/bin/env bash
# Installs what the demo needs and shows kvjax at work on this machine: text from the demo model with prefix caching,
# a synthetic chat workload through the managers, and a plan. Plots go to out/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh demo
kvjax=${KVJAX_VENV:-.venv}/bin/kvjax
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
mkdir -p out

say() { printf '\n\033[1m$ kvjax %s\033[0m\n' "$*"; }

say generate --plot out/pool.png "$@"
"$kvjax" generate --plot out/pool.png "$@"

say replay --generate chat --num-requests 200 --num-blocks 1200 --plot out/replay.png
"$kvjax" replay --generate chat --num-requests 200 --num-blocks 1200 --plot out/replay.png

say plan gemma-3-27b --memory 40GiB --max-model-len 32768
"$kvjax" plan gemma-3-27b --memory 40GiB --max-model-len 32768
