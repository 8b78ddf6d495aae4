"""A server in a thread, on a free loopback port."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import openai
import uvicorn
from fake import ByteText, FakeEngine

from slipstream.server import create_app

HELLO = [{"role": "user", "content": "hello"}]


class Site:
    """A server on a loopback port, its engine, and clients of it."""

    def __init__(self, engine: FakeEngine, text: Any = None, **options: Any) -> None:
        self.engine = engine
        self.text = text or ByteText()
        self.app = create_app(engine, self.text, ["fake", "org/other"], **options)
        config = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_config=None, lifespan="off")
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        until = time.monotonic() + 10
        while not self.server.started:
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.005)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        # One pool for all requests: a new client each time would cost more than the test.
        self.http = httpx.Client(timeout=20, verify=False, trust_env=False)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=self.http
        )

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(f"{self.url}{path}", content=content, **options)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": HELLO, **fields})

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "hello", **fields})

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join()

    def close(self) -> None:
        self.stop()
        self.engine.close()
