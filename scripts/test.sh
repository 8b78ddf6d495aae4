#!/bin/sh
# The CPU tests, in an environment of their own (.venv-test). Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
sh scripts/setup.sh .venv-test dev
exec .venv-test/bin/python -m pytest -q -n 2 "$@"
