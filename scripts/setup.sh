#!/usr/bin/env bash
# Makes or reuses the virtual environment and installs kvjax with the extras named, editable.
#
#   scripts/setup.sh [extra ...]        extras as in pyproject.toml: demo, test, dev, cuda, tpu, tpu-aot and cuda-aot
#                                      (to compile for TPU and GPU without one), ...
#
# Needs nothing but a Python 3.11 or newer; the newest that works is taken. A second run that has nothing to do ends
# at once. Environment: KVJAX_PYTHON (interpreter), KVJAX_VENV (default .venv), KVJAX_CONSTRAINTS (pip constraints file).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${KVJAX_VENV:-.venv}
constraints=${KVJAX_CONSTRAINTS:-}
stamp=$venv/.kvjax-installed

known() { # the extras of pyproject.toml, one a line
    sed -n '/^\[project.optional-dependencies\]/,/^\[project.scripts\]/s/^\([a-z0-9-]*\) = \[.*/\1/p' pyproject.toml
}

usable() { # a Python of 3.11 or newer that can make virtual environments
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

candidates() { # newest first
    if [ -n "${KVJAX_PYTHON:-}" ]; then
        echo "$KVJAX_PYTHON"
        return
    fi
    local minor path
    for minor in 15 14 13 12 11; do
        command -v "python3.$minor" || true
        for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python3."$minor"; do
            if [ -x "$path" ]; then echo "$path"; fi
        done
    done
    command -v python3 || true
    command -v python || true
}

checksum() { # of everything that decides what gets installed
    cat pyproject.toml ${constraints:+"$constraints"} | cksum
}

wanted() { # extras already installed together with those asked for, as a sorted list
    { [ -f "$stamp" ] && sed -n 2p "$stamp" | tr , '\n'; printf '%s\n' "$@"; } | sed '/^$/d' | sort -u | paste -sd, -
}

install() { # quiet when it works, the end of pip's own words when it does not
    local target=".${1:+[$1]}" log=$venv/install.log
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check ${constraints:+-c "$constraints"} \
        -e "$target" >"$log" 2>&1 || { tail -n 8 "$log" >&2; return 1; }
}

for extra in "$@"; do
    if ! known | grep -qx -- "$extra"; then
        echo "kvjax: expected extras out of $(known | paste -sd ' ' -), got '$extra'" >&2
        exit 2
    fi
done
if [ -x "$venv/bin/python" ] && ! usable "$venv/bin/python"; then rm -rf "$venv"; fi
extras=$(wanted "$@")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(checksum; echo "$extras")" ]; then exit 0; fi

if [ -x "$venv/bin/python" ]; then
    echo "kvjax: installing into $venv: ${extras:-core}"
    install "$extras"
else
    made=
    tried=
    while read -r python; do
        usable "$python" || continue
        version=$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')
        case " $tried " in *" $version "*) continue ;; esac
        tried="$tried $version"
        echo "kvjax: Python $version, installing into $venv: ${extras:-core} (about a minute)"
        rm -rf "$venv"
        if "$python" -m venv "$venv" && install "$extras"; then
            made=1
            break
        fi
        echo "kvjax: that failed with $python; trying the next Python" >&2
    done < <(candidates)
    if [ -z "$made" ]; then
        rm -rf "$venv"
        echo "kvjax: expected a Python 3.11 or newer with venv that the dependencies install on, found none;" \
            "install one or name it in KVJAX_PYTHON" >&2
        exit 1
    fi
fi
{ checksum; echo "$extras"; } >"$stamp"
