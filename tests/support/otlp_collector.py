"""A collector of traces on loopback that keeps what came."""

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """Answers with `statuses`, one a request, then with 200. While `gate` is not set it does not answer."""

    def __init__(self, statuses: Sequence[int] = (), answer: bytes = b"{}") -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.arrived = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.url = ""
        self._statuses = iter(statuses)
        self._answer = answer

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [
            span
            for _, _, body in list(self.requests)
            for resource in body["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.path, headers, json.loads(body)))
        self.arrived.release()
        self.gate.wait()
        with contextlib.suppress(OSError):  # the exporter has given up
            request.send_response(next(self._statuses, 200))
            request.send_header("Content-Length", str(len(self._answer)))
            request.end_headers()
            request.wfile.write(self._answer)


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    """Values by name; those of 64 bits are text in OTLP's JSON."""
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


@contextlib.contextmanager
def collecting(statuses: Sequence[int] = (), answer: bytes = b"{}") -> Iterator[Collector]:
    collector = Collector(statuses, answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.handle(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        collector.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
