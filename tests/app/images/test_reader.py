"""Time that the pictures of one request may take."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

from llmbox.app.config.settings import LimitSettings
from llmbox.app.images import reader
from llmbox.app.images.source import ImageSource


@dataclass
class Facts:
    tensors: dict[str, int] = field(default_factory=dict)


def test_all_urls_of_a_request_share_their_time(monkeypatch):
    given: list[float] = []
    now = [0.0]

    async def fetch_image(_url: str, _most: int, *, seconds: float) -> bytes:
        given.append(seconds)
        now[0] += 14.0
        return b"file"

    async def decode(*_args: object) -> SimpleNamespace:
        return SimpleNamespace(image=SimpleNamespace(pixels=b""))

    monkeypatch.setattr(reader, "fetch_image", fetch_image)
    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: now[0]))
    images = reader.ImageReader()
    monkeypatch.setattr(images, "_decode", decode)
    sources = [ImageSource("https://pictures.example/", False, "image")] * 6
    asyncio.run(images.read(sources, Facts(), LimitSettings(), may_fetch=True))
    assert given == [15.0, 15.0, 15.0, 15.0, 4.0, -10.0]  # no time is left for the last
