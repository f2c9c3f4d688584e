"""What is told of a download as it goes."""

import os
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.http.ollama.model_routes import follow_pull
from llmbox.app.hub.download import Download
from llmbox.app.hub.errors import HubError, disk_full
from llmbox.app.hub.repo_files import RepoFile
from llmbox.app.hub.transfer import TransferProgress
from llmbox.app.lifecycle.drain import Drain
from llmbox.app.models.catalog import hub_cache

DONE = {"status": "success"}
WEIGHTS, CONFIG = RepoFile("model.safetensors", 1000, "a" * 64), RepoFile("config.json", 10, "b" * 40)


class Hub:
    """Downloads whose steps a test has written down."""

    def __init__(self, *steps: Any) -> None:
        self.download = Download("org/name", "org/name", None)
        self.drain = Drain()
        self._steps = steps
        self.library = self.downloads = self.services = self

    async def follow(self, download: Download) -> AsyncGenerator[Download, None]:
        for step in self._steps:
            step(self)
            yield download

    def at(self, done: int) -> None:
        self.download.state = "downloading"
        self.download.files = {WEIGHTS: TransferProgress(1000, done), CONFIG: TransferProgress(10, 10)}

    async def told(self) -> list[dict[str, Any]]:
        control: Any = SimpleNamespace(library=self, services=self)
        return [step async for step in follow_pull(control, self.download, DONE)]


def ends(state: Any, error: HubError | None = None) -> Any:
    def step(hub: Hub) -> None:
        hub.download.state, hub.download.error = state, error

    return step


async def test_weights_are_told_as_they_come_and_only_what_is_new() -> None:
    hub = Hub(lambda h: None, lambda h: h.at(0), lambda h: h.at(400), lambda h: h.at(400), ends("ready"))
    told = await hub.told()
    assert [told[0], told[-1]] == [{"status": "pulling manifest"}, DONE]
    assert [step["completed"] for step in told[1:-1]] == [0, 400]
    layer = {"status": "pulling aaaaaaaaaaaa", "digest": "sha256:" + "a" * 64, "total": 1000, "completed": 0}
    assert told[1] == layer


@pytest.mark.parametrize(
    ("last", "status", "code"),
    [
        (ends("paused"), 409, "download_state"),
        (ends("failed", HubError("repo_gated", "it is gated", "why", "ask")), 403, "repo_gated"),
        (ends("failed", HubError("does_not_fit", "too large")), 400, "does_not_fit"),
        (ends("failed", HubError("integrity", "a wrong hash")), 502, "integrity"),
        (lambda hub: hub.drain.begin(), 503, "shutting_down"),
    ],
)
async def test_how_else_it_ends(last: Any, status: int, code: str) -> None:
    hub = Hub(lambda h: h.at(0), last)
    with pytest.raises(ApiError) as refused:
        await hub.told()
    assert (refused.value.status, refused.value.code) == (status, code)


async def test_a_full_disk_is_told_without_its_place() -> None:
    hub = Hub(ends("failed", disk_full(hub_cache(os.environ), 10**9, 10**6)))
    with pytest.raises(ApiError, match="the disk of the model cache is too full") as refused:
        await hub.told()
    assert refused.value.status == 400
    assert str(hub_cache(os.environ)) not in refused.value.message
