#!/bin/sh
# `slipstream run` from a fresh clone: sets up .venv the first time, then answers the prompt.
# Without arguments it shows both models: the embedded one at what it does fastest, and a real one.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
sh "$root/scripts/setup.sh" .venv
slipstream="$root/.venv/bin/slipstream"
[ $# -eq 0 ] || exec "$slipstream" run "$@"

text="Repeat this text: The parser reads config.toml at line 4217, checks the keys host, port and
timeout, and raises ConfigError if port is not between 1024 and 65535."
echo "The embedded model copies; most of its tokens are drafted from the prompt and verified at once:"
"$slipstream" run "$text" --temperature 0
echo
echo "SmolLM2-135M-Instruct answers (the first time its 93 MB are fetched):"
"$slipstream" run "Why is the sky blue?" --model smollm2 --max-tokens 64
