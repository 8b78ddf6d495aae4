"""Third-party fixtures beside the checkout: test data that is not ours to publish."""

from __future__ import annotations

from pathlib import Path


def shared(name: str) -> Path | None:
    """The fixture, or None where it is absent (a test then skips, with that as its reason)."""
    path = Path(__file__).resolve().parents[2] / "shared" / "data" / name
    return path if path.is_file() else None
