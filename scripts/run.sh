#!/bin/sh
# `slipstream run` from a fresh clone: sets up .venv the first time, then answers the prompt.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
sh "$root/scripts/setup.sh" .venv
exec "$root/.venv/bin/slipstream" run "$@"
