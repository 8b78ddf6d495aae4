#!/bin/sh
# Make the virtual environment VENV with slipstream in it, for the CPU. Quick when it is up to date.
#
#   sh scripts/setup.sh VENV [EXTRA]
#
# VENV is relative to the repository. EXTRA is an extra of pyproject.toml, such as dev.
# PYTHON=... in the environment chooses the interpreter.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
venv=$1
extra=${2:-}

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

# The first interpreter of a version that pyproject.toml allows.
python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
    then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    found=$("${PYTHON:-python3}" --version 2>&1) || found="no ${PYTHON:-python3}"
    fail "Python 3.11, 3.12 or 3.13 is needed, found $found: install one, or name it with PYTHON=/path/to/python3"
fi

# What the environment was made from; an equal stamp means there is nothing to do.
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
stamp="$version $root $extra $(cat pyproject.toml scripts/cpu.txt | cksum)"
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python has no venv module: apt install python3-venv (or python$version-venv), then try again"

printf 'Setting up %s with Python %s (once; the first time it downloads packages for some minutes)\n' \
    "$venv" "$version" >&2
kept=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || kept=
if [ "$kept" != "$version" ]; then
    "$python" -m venv --clear "$venv" || fail "could not make the virtual environment $venv"
fi
rm -f "$venv/stamp"

log=$venv/pip.log
# A few retries only: without a network, each package would otherwise wait its turn to fail.
if ! PIP_RETRIES=${PIP_RETRIES:-2} "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
    -c scripts/cpu.txt torch numpy -e ".${extra:+[$extra]}" >"$log" 2>&1 </dev/null
then
    tail -n 15 "$log" >&2
    if grep -qiE 'failed to establish a new connection|name resolution|network is unreachable|connection (refused|timed out)|proxyerror|NewConnectionError' "$log"
    then
        fail "the package index cannot be reached: check the network or pip's settings, then try again"
    elif grep -qi 'no space left' "$log"; then
        fail "the disk is full: make room (about 3 GB with the extra dev), then try again"
    fi
    fail "pip could not install the packages; the lines above and $log say why"
fi
printf '%s\n' "$stamp" >"$venv/stamp"
