#!/usr/bin/env bash
# vLLM's own tests of its core on this machine's CPU, with vLLM's KV cache manager and with kvjax's under its scheduler,
# and its engine with kvjax as a plugin (vllm_conformance/engine.py).
#
# Usage:   scripts/vllm_conformance.sh VERSION [--setup-only | FILE ...]      for example 0.16.0, or 0.33.0 scheduler
# Needs:   Python 3.12 or 3.13 ($PYTHON, or the first found), some 4 GB in .cache/vllm/VERSION, a package index
# Result:  .cache/vllm/VERSION/{own,kvjax}.xml, touched.txt, and a table of files on the terminal (docs/vllm.md)
#
# vLLM comes as its source distribution; nothing of it is compiled. Models of the tests are folders of published shapes
# (vllm_conformance/stand_in_models.py), so no test reaches for the network.
set -euo pipefail
version=${1:?expected a version of vLLM, for example 0.16.0}
repository=$(cd "$(dirname "$0")/.." && pwd)
home=${KVJAX_VLLM_DIR:-$repository/.cache/vllm}/$version
source=$home/vllm-$version
python=$home/venv/bin/python
mkdir -p "$home"

is_usable() { # the releases' torch and torchvision have wheels for these alone
  local asked='import sys, venv, ensurepip; print(sys.version_info[:2] in ((3, 12), (3, 13)))'
  [ "$("$1" -c "$asked" 2>/dev/null)" = True ]
}

usable_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[32].*/bin/python3; do
    if is_usable "$candidate"; then
      echo "$candidate"
      return
    fi
    if [ "$candidate" = "${PYTHON:-}" ]; then break; fi
  done
  echo "vllm_conformance.sh: expected Python 3.12 or 3.13, got ${PYTHON:-none of them}; name one with PYTHON=" >&2
  return 1
}

if [ ! -x "$python" ]; then
  found=$(usable_python)
  "$found" -m venv "$home/venv"
  "$python" -m pip install -q torch==2.13.0 torchvision==0.28.0
  "$python" -m pip install -q "setuptools<81" setuptools_scm setuptools-rust wheel packaging cmake ninja
fi
if [ ! -d "$source" ]; then
  # Without a target device the sources' metadata can be made where there is no compiler for any.
  VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version "$python" -m pip download -q --no-deps --no-binary :all: \
    --no-build-isolation -d "$home" "vllm==$version"
  tar -xzf "$home/vllm-$version.tar.gz" -C "$home"
fi
if [ ! -e "$home/installed" ]; then
  # No test reads a certificate, so any certifi will do.
  sed 's/^certifi.*/certifi/' "$source/requirements/common.txt" > "$home/requirements.txt"
  "$python" -m pip install -q -r "$home/requirements.txt" pytest pytest-timeout pytest-asyncio xxhash
  touch "$home/installed"
fi
"$python" "$repository/scripts/vllm_conformance/stand_in_models.py" "$home/models"

"$python" -m pip install -q --no-deps -e "$repository"  # its entry point is how vLLM finds the plugin
metadata=$home/metadata/vllm-$version+cpu.dist-info  # older releases take the CPU by the version of the wheel alone
mkdir -p "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version+cpu" > "$metadata/METADATA"

cat > "$home/python" <<END
#!/usr/bin/env bash
# Python with vLLM $version and kvjax, in the folder of the stand-in models.
export VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export PYTHONPATH=$home/metadata:$source:$repository:$repository/scripts/vllm_conformance
cd "$home/models" && exec "$python" "\$@"
END
chmod +x "$home/python"
[ "${2:-}" = --setup-only ] && exit 0

shift
core=$source/tests/v1/core
if [ $# = 0 ]; then  # all but those that generate with a model on a GPU
  mapfile -t tests < <(find "$core" -name "test_*.py" ! -name "*_e2e.py" | sort)
else
  tests=("${@/#/$core/test_}")
  tests=("${tests[@]/%/.py}")
fi
run() {  # run NAME PLUGIN...: one pass over the tests; failures are what the table is about
  local name=$1 plugins=()
  shift
  for plugin in "$@"; do plugins+=(-p "$plugin"); done
  KVJAX_TOUCHED=$home/touched.txt "$home/python" -m pytest -q -p no:cacheprovider "${plugins[@]}" --rootdir "$source" \
    --noconftest --timeout 1800 --junitxml "$home/$name.xml" "${tests[@]}" > "$home/$name.txt" 2>&1 || true
}
"$home/python" -m pytest -q -p no:cacheprovider --noconftest -c /dev/null --rootdir "$repository" \
  "$repository/tests/adapters/vllm/test_drift.py::test_an_installed_vllm_is_as_it_was_recorded"
"$home/python" "$repository/scripts/vllm_conformance/engine.py"
run own on_cpu
run kvjax on_cpu under_kvjax private_names
"$home/python" "$repository/scripts/vllm_conformance/table.py" "$home"
