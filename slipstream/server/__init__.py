"""HTTP: OpenAI's API over the `Serving` seam."""

from slipstream.server.app import create_app

__all__ = ["create_app"]
