"""Time that the pictures of one request may take, their memory, and callers' shares of the workers."""

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from llmbox.app.config.settings import LimitSettings
from llmbox.app.errors import ApiError
from llmbox.app.images import reader
from llmbox.app.images.source import ImageSource
from llmbox.app.sandbox.worker import ATTACHED
from llmbox.app.util.threads import TENANT


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
        return SimpleNamespace(nbytes=0)

    monkeypatch.setattr(reader, "fetch_image", fetch_image)
    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: now[0]))
    images = reader.ImageReader()
    monkeypatch.setattr(images, "_decode", decode)
    sources = [ImageSource("https://pictures.example/", False, "image")] * 6

    async def read() -> None:
        await images.read(sources, Facts(), LimitSettings(), reader.ImageLease(images), may_fetch=True)

    asyncio.run(read())
    assert given == [15.0, 15.0, 15.0, 15.0, 4.0, 0.0]  # no time is left for the last


def picture(content: bytes) -> ImageSource:
    return ImageSource(f"data:image/png;base64,{base64.b64encode(content).decode()}", False, "image")


def reply(size: int) -> dict[str, object]:
    layout = {"hashes": ["00"], "tiles": [], "grid": (0, 0), "size": (1, 1), "num_rows": 1, "text": ""}
    return layout | {ATTACHED: bytes(size)}


async def read(
    images: reader.ImageReader, content: bytes, lease: reader.ImageLease, caller: str = ""
) -> None:
    TENANT.set(caller)
    limits = LimitSettings()
    await images.read([picture(content)], Facts(), limits, lease, may_fetch=False)


async def test_requests_that_are_prepared_count_for_the_memory_of_open_pictures(monkeypatch):
    monkeypatch.setattr(reader, "OPEN_IMAGE_BYTES", 100)
    images, decoded, is_over = reader.ImageReader(), asyncio.Event(), asyncio.Event()

    async def answer_frame(_frame: bytes) -> dict[str, object]:
        return reply(60)

    monkeypatch.setattr(images._pool, "answer_frame", answer_frame)

    async def prepare() -> None:
        await read(images, b"first", reader.ImageLease(images))
        decoded.set()
        await is_over.wait()

    async with asyncio.timeout(60):
        first = asyncio.create_task(prepare())
        await decoded.wait()
        with pytest.raises(ApiError, match="images of open requests") as refused:
            await asyncio.create_task(read(images, b"second", reader.ImageLease(images)))
        assert refused.value.status == 429
        is_over.set()
        await first
        await asyncio.sleep(0)
        assert images.open_bytes == 0  # it was never submitted
        lease = reader.ImageLease(images)
        await read(images, b"second", lease)
        lease.release()
        assert images.open_bytes == 0


async def test_slow_pictures_of_one_caller_leave_a_worker_to_others(monkeypatch):
    images, go_on = reader.ImageReader(), asyncio.Event()

    async def attempt(frame: bytes, _seconds: float) -> dict[str, object]:
        if b"slow" in frame:
            await go_on.wait()
        return reply(1)

    async def to_thread(work: Callable[..., object], *arguments: object) -> object:
        return work(*arguments)

    monkeypatch.setattr(images._pool, "_try", attempt)
    monkeypatch.setattr(reader.asyncio, "to_thread", to_thread)
    async with asyncio.timeout(60):
        slow = [
            asyncio.create_task(read(images, b"slow%d" % number, reader.ImageLease(images), "greedy"))
            for number in range(9)
        ]
        await asyncio.sleep(0)  # all of them run until they wait for a worker
        await read(images, b"quick", reader.ImageLease(images), "other")
        assert not any(task.done() for task in slow)
        go_on.set()
        await asyncio.gather(*slow)
        assert not images._pool._slots._held


def test_crops_are_pictures_of_their_own_with_places_of_their_own():
    """Gemma 3's pan and scan: each attends to itself in both directions, and is kept by its own hash."""
    tiles = [(4, 4)] * 3
    told = {"hashes": ["00", "01", "02"], "tiles": tiles, "grid": (1, 2), "num_rows": 6, "text": ""}
    told |= {"size": (4, 3)}
    pixels = bytes(range(144))
    decoded = reader._decoded({**told, ATTACHED: pixels})
    ids = [5, 9, 9, 5, 9, 9, 9, 9, 5]
    images = reader.place_images(ids, [decoded], SimpleNamespace(image_token_id=9))
    assert [(each.start, each.num_tokens, each.num_rows) for each in images] == [
        *((1, 2, 2), (4, 2, 2), (6, 2, 2))
    ]
    assert [each.content_hash for each in images] == [b"\0", b"\1", b"\2"]
    assert b"".join(each.pixels for each in images) == pixels
    assert all(each.tiles == [(4, 4)] for each in images)


async def test_images_fetched_at_once_are_few_however_many_requests_name_them(monkeypatch):
    images, most, now = reader.ImageReader(), 0, 0

    async def fetch_image(*_: object, **__: object) -> bytes:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        return b"picture"

    async def decode(*_: object) -> object:
        nonlocal now
        await asyncio.sleep(0)
        now -= 1
        return reader._decoded(reply(1))

    monkeypatch.setattr(reader, "fetch_image", fetch_image)
    monkeypatch.setattr(images, "_decode", decode)
    named = [ImageSource("https://pictures.example/a.png", False, "image")]

    async def ask(caller: str) -> None:
        TENANT.set(caller)
        await images.read(named, Facts(), LimitSettings(), reader.ImageLease(images), may_fetch=True)

    async with asyncio.timeout(60):
        await asyncio.gather(*(asyncio.create_task(ask("greedy")) for _ in range(50)))
        assert most == reader.MOST_FETCHES_PER_CALLER
        await asyncio.gather(*(asyncio.create_task(ask(name)) for name in "abcd" * 20))
        assert most == reader.MOST_FETCHES
