"""A daemon with the admin panel for one module of tests, and ways into it."""

from collections.abc import Iterator
from contextlib import closing
from functools import cached_property
from pathlib import Path

import httpx
import pytest

from support.cli_box import PATIENCE, Box, until
from support.hub_models import model_files
from support.hub_stub import StubHub, StubRepo, stub_hub

__all__ = ["panel", "signed_in"]


class Panel:
    def __init__(self, box: Box, hub: StubHub) -> None:
        self.box, self.hub = box, hub
        hub.repos["org/little"] = StubRepo(model_files())
        box.environ["HF_ENDPOINT"] = hub.url
        box.environ["PIP_INDEX_URL"] = f"{hub.url}/simple"
        hello = [72, 101, 108, 108, 111, 32]
        box.serve(box.model(step_delay=0.02, hold_at=500, vocab_size=480, script=hello * 4))

    @property
    def url(self) -> str:
        assert self.box.running is not None
        return self.box.running.url

    def sign_in_link(self) -> str:
        link: str = self.box.client.post("/admin/api/signin-link", {})["url"]
        return link

    def client(self) -> httpx.Client:
        """A browser without scripts: keeps cookies, follows redirects."""
        return httpx.Client(base_url=self.url, follow_redirects=True, timeout=PATIENCE)

    def sign_in(self) -> httpx.Client:
        client = self.client()
        token = self.sign_in_link().partition("token=")[2]
        assert client.post("/admin/signin", data={"token": token}).status_code == 200
        return client

    @cached_property
    def cookie(self) -> dict[str, str | bool]:
        """Cookie of a sign-in, as a browser keeps it."""
        with closing(self.sign_in()) as client:
            ((name, value),) = client.cookies.items()
        return {"name": name, "value": value, "url": self.url, "httpOnly": True, "sameSite": "Strict"}

    def complete(self, max_tokens: int = 6) -> None:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": max_tokens}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)
        assert answer.status_code == 200
        self.logged(answer.json()["id"])

    def logged(self, request_id: str) -> None:
        """Wait for its row."""
        until(lambda: request_id in {row["id"] for row in self.box.api("requests")["requests"]})


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Panel]:
    folder: Path = tmp_path_factory.mktemp("panel")
    box = Box(folder)
    with stub_hub() as hub:
        try:
            yield Panel(box, hub)
        finally:
            box.close()


@pytest.fixture(scope="module")
def signed_in(panel: Panel) -> Iterator[httpx.Client]:
    client = panel.sign_in()
    yield client
    client.close()
