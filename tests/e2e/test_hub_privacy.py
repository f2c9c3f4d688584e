"""Requests that leave the box for search, fit and pull are those that the user asked for, and say little."""

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from support.cli_box import Box, box
from support.hub_models import model_files
from support.hub_stub import StubHub, StubRepo, stub_hub

__all__ = ["box"]

NAME = "org/little"
COMMIT = "c" * 40
ASKED = (
    r"hub /api/models\?([a-z]+=[a-z0-9]+&)*search=org(&[a-z]+=[a-z0-9]+)*",
    rf"hub /api/models/{NAME}(/revision/main)?\?blobs=(?i:true)",
    rf"hub /{NAME}/resolve/(main|{COMMIT})/[a-z_]+\.(json|safetensors|jinja)",
    rf"cdn /{NAME}/[a-z_]+\.(json|safetensors)",
)


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """A proxy for every other host: its URL, and the requests that came to it."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def do_GET(self) -> None:
            seen.append(self.requestline)
            self.send_error(502)

        do_CONNECT = do_POST = do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub(box: Box, elsewhere: tuple[str, list[str]]) -> Iterator[StubHub]:
    with stub_hub() as stub:
        stub.repos[NAME] = StubRepo(model_files())
        proxy = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), elsewhere[0])
        box.environ |= proxy | dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
        box.environ |= {"HF_ENDPOINT": stub.url, "LLMBOX_SERVER_MODELS": str(box.model()), "AI_AGENT": "some"}
        for name in ("HF_TOKEN", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"):
            box.environ.pop(name, None)
        yield stub


def test_nothing_is_sent_that_was_not_asked_for(box: Box, hub: StubHub, elsewhere: tuple[str, list[str]]):
    for command in (["search", "org"], ["fit", NAME], ["pull", NAME], ["fit", NAME]):
        done = box.run(*command)
        assert done.code == 0, done.err
    paths = [f"{each.server} {each.path}" for each in hub.seen]
    assert len(paths) > 4
    assert [path for path in paths if not any(re.fullmatch(known, path) for known in ASKED)] == []
    assert {each.method for each in hub.seen} == {"GET"}
    assert {each.headers["User-Agent"] for each in hub.seen} == {"llmbox"}
    assert elsewhere[1] == []
