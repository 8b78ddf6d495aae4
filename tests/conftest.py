"""What every test shares: threads that fit the machine, one hypothesis profile."""

from __future__ import annotations

import os

from hypothesis import settings

# Tiny matrices gain nothing from threads, and threads that fight over busy cores lose much. Set
# before torch is imported by any test.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ[name] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

# The same examples on every run: a failure in CI fails at a desk too.
settings.register_profile("fixed", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fixed")
