"""A hub that lies about ranges, sizes and addresses is refused in bounded time and memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from llmbox.app.hub.errors import HubError
from llmbox.app.hub.http import HubHttpClient


@contextmanager
def lying_hub(status: int, headers: dict[str, str], body: bytes = b"") -> Iterator[HubHttpClient]:
    class LyingHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), LyingHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield HubHttpClient(f"http://127.0.0.1:{server.server_port}", None)
        server.shutdown()


MANY = "9" * 5000


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (206, {"Content-Range": "bytes 900000-999999/1000000"}),
        (206, {"Content-Range": f"bytes {MANY}-/*"}),
        (302, {"Location": "http://[::1"}),
        (302, {"Location": "http://127.0.0.1:99999999/"}),
        (302, {"Location": "file:///etc/passwd"}),
        (302, {"Location": "/config.json"}),
    ],
)
def test_a_small_file_is_never_more_than_its_limit(status: int, headers: dict[str, str]):
    with lying_hub(status, headers, b"x" * 100_000) as web, pytest.raises(HubError):
        web.read(f"{web.endpoint}/config.json", "config.json", 1000)


@pytest.mark.parametrize("body", [b"", b"x" * 999])
def test_a_range_that_arrives_short_is_an_error(body: bytes):
    """Whoever reads a header piece by piece would ask for the rest for ever."""
    headers = {"Content-Range": "bytes 0-999/5000", "Content-Length": str(len(body))}
    with lying_hub(206, headers, body) as web, pytest.raises(HubError, match=f"{len(body)} of 1000"):
        web.read(f"{web.endpoint}/model.gguf", "model.gguf", 1000, start=0, end=1000)


def test_a_size_with_thousands_of_digits_counts_as_none():
    with (
        lying_hub(206, {"Content-Range": f"bytes 0-/{MANY}"}, b"{}") as web,
        web.get(f"{web.endpoint}/config.json", "config.json") as answer,
    ):
        assert answer.total is None
