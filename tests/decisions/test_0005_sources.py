"""Decision 0005: what may decide the source of a draft, and whether it is verified.

The enumeration of output laws is in `laws.py`. As a program this prints the table of the record.
"""

from __future__ import annotations

import pytest
from laws import rule_distance, rules

SEEDS = (2, 3, 4, 5)  # drafters


@pytest.mark.parametrize("name", rules())
def test_exactly_the_rules_that_never_look_at_the_draft_are_exact(name: str) -> None:
    worst = max(rule_distance(name, seed) for seed in SEEDS)
    assert worst < 1e-12 if rules()[name][1] else worst > 0.005


if __name__ == "__main__":
    print(f"total variation from the target's law, drafters {SEEDS}")
    for name, (_, exact) in rules().items():
        values = [rule_distance(name, seed) for seed in SEEDS]
        cells = "  ".join("0" if v < 1e-12 else f"{v:.4f}" for v in values)
        print(f"{name:42s} {'exact' if exact else 'wrong':6s} {cells}")
