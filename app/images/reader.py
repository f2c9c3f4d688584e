"""Images of a request, from URLs to what the engine takes: fetched, decoded in a worker, kept a while."""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec

from llmbox.engine.ipc.messages import PreparedImage
from llmbox.engine.model_config.vision.config import VisionConfig

from ..config.settings import LimitSettings
from ..errors import ApiError
from ..sandbox.pool import WorkerPool, workers_busy
from ..sandbox.worker import ATTACHED, to_frame
from ..util.threads import FairSlots, off_loop
from .source import SECONDS as FETCH_SECONDS
from .source import FetchError, ImageSource, fetch_image

WORKERS: Final = 3
SECONDS: Final = (15.0, 10.0)
"""Time of each attempt to decode an image; a worker's processor time is bounded too (`image_worker.py`)."""
MOST_FETCH_SECONDS: Final = 4 * FETCH_SECONDS
"""Time to fetch all images of a request, which holds places in the model's queue meanwhile."""
KEPT_BYTES: Final = 64 << 20
"""Pixels of decoded images that are kept: a conversation sends its images again with every turn."""
MOST_PIXEL_BYTES: Final = 48 << 20
"""Pixels of all images of a request, which one message to the engine holds."""


OPEN_IMAGE_BYTES: Final = 1 << 30
"""Pixels of the images of all requests that are being prepared or answered."""
MOST_FETCHES, MOST_FETCHES_PER_CALLER = 6, 4
"""Images that are fetched and decoded at once: a short request may name a large one."""
MOST_WORKERS_PER_CALLER: Final = 2
"""Images of one caller that may be with the workers at once: there is one more worker for the others."""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    images: list[PreparedImage]
    """Images without their places in the prompt: one, or the whole and its crops."""
    text: str
    """Text that replaces the placeholder of the chat template."""

    @property
    def nbytes(self) -> int:
        return sum(len(image.pixels) for image in self.images)


class ImageLease:
    """Memory that a request's images take, from their decoding until `release`, or until the task that
    prepares it ends without having submitted it.
    """

    def __init__(self, reader: "ImageReader") -> None:
        self.is_submitted = False
        """True once the request is open: its end gives the memory back."""
        self._reader = reader
        self._size = 0
        task = asyncio.current_task()
        assert task is not None, "requests are prepared on the event loop"
        task.add_done_callback(self._forget)

    def add(self, size: int) -> None:
        """Count an image. Raises ApiError 429 where open requests have too many already."""
        if self._reader.open_bytes + size > OPEN_IMAGE_BYTES:
            raise ApiError(
                429,
                f"The images of open requests take {OPEN_IMAGE_BYTES >> 20} MB already. Try again later.",
                code="too_many_images",
                type="rate_limit_error",
                headers={"Retry-After": "5"},
            )
        self._reader.open_bytes += size
        self._size += size

    def _forget(self, _: object) -> None:
        if not self.is_submitted:
            self.release()

    def release(self) -> None:
        self._reader.open_bytes -= self._size
        self._size = 0


class ImageReader:
    """Reader of all requests' images, with a cache of decoded ones. Belongs to one event loop."""

    def __init__(self) -> None:
        self.open_bytes = 0
        """Pixels that `ImageLease` counts."""
        self._pool = WorkerPool("image_worker", WORKERS, SECONDS, MOST_WORKERS_PER_CALLER)
        self._fetches = FairSlots(MOST_FETCHES, MOST_FETCHES_PER_CALLER)
        self._kept: OrderedDict[bytes, DecodedImage] = OrderedDict()
        self._size = 0

    async def close(self) -> None:
        await self._pool.close()

    async def read(
        self,
        sources: Sequence[ImageSource],
        vision: VisionConfig,
        limits: LimitSettings,
        lease: ImageLease,
        *,
        may_fetch: bool,
    ) -> list[DecodedImage]:
        """Fetch and decode images. Raises ApiError: 400 with the place of one that cannot be used, 429."""
        facts = msgspec.json.encode(replace(vision, tensors={})).decode()
        found, size, left = [], 0, MOST_FETCH_SECONDS
        for source in sources:
            try:
                async with self._place(source):
                    started = time.monotonic()
                    data = await self._data(source, limits, left, may_fetch=may_fetch)
                    left -= time.monotonic() - started
                    decoded = await self._decode(data, facts, source, limits)
            except (FetchError, ValueError) as error:
                raise image_error(source.param, str(error)) from None
            size += decoded.nbytes
            if size > MOST_PIXEL_BYTES:
                raise image_error(
                    source.param,
                    f"the images of this request have more than {MOST_PIXEL_BYTES // 3:,} pixels together "
                    "after they are resized: send fewer, or smaller ones",
                )
            lease.add(decoded.nbytes)
            found.append(decoded)
        return found

    @contextlib.asynccontextmanager
    async def _place(self, source: ImageSource) -> AsyncIterator[None]:
        """Hold a place among the images that are fetched. Raises ApiError 503 where none becomes free."""
        if source.url[:5].lower() == "data:":  # the request's body has it already
            yield
            return
        try:
            async with asyncio.timeout(MOST_FETCH_SECONDS):
                caller = await self._fetches.acquire()
        except TimeoutError:
            raise workers_busy() from None
        try:
            yield
        finally:
            self._fetches.release(caller)

    async def _data(
        self, source: ImageSource, limits: LimitSettings, left: float, *, may_fetch: bool
    ) -> bytes:
        scheme = source.url[:8].lower()
        if scheme.startswith("data:"):
            return await off_loop(len(source.url), lambda: decode_data_url(source.url))
        if not scheme.startswith(("http://", "https://")):
            raise FetchError("it is neither a data: URL with base64 nor an http or https URL")
        if not may_fetch:
            raise FetchError(
                "this server does not fetch images: send it as a data: URL, or let the owner set "
                "server.fetch_images"
            )
        return await fetch_image(source.url, limits.image_bytes, seconds=max(0.0, min(left, FETCH_SECONDS)))

    async def _decode(
        self, data: bytes, facts: str, source: ImageSource, limits: LimitSettings
    ) -> DecodedImage:
        if not data:
            raise ValueError("it is empty")
        if len(data) > limits.image_bytes:
            most = f"at most {limits.image_bytes:,} are allowed (limits.image_bytes)"
            raise ValueError(f"it has {len(data):,} bytes, {most}")
        job = {"vision": facts, "low": source.low_detail, "most_pixels": limits.image_pixels}
        named = f"{facts}\0{job['low']}\0{job['most_pixels']}\0".encode()
        key = await off_loop(len(data), lambda: hashlib.sha256(named + data).digest())
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        frame = await asyncio.to_thread(to_frame, job | {ATTACHED: data})
        reply = await self._pool.answer_frame(frame)
        if "error" in reply:
            raise ValueError(reply["error"])
        decoded = _decoded(reply)
        self._keep(key, decoded)
        return decoded

    def _keep(self, key: bytes, decoded: DecodedImage) -> None:
        if key in self._kept:  # another request has decoded it meanwhile
            return
        self._kept[key] = decoded
        self._size += decoded.nbytes
        while self._size > KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._size -= oldest.nbytes


def _decoded(reply: dict[str, Any]) -> DecodedImage:
    tiles, pixels, hashes = reply["tiles"], reply[ATTACHED], reply["hashes"]
    share, size, rows = (each // len(hashes) for each in (len(tiles), len(pixels), reply["num_rows"]))
    images = [
        PreparedImage(
            content_hash=bytes.fromhex(digest),
            tiles=[(height, width) for height, width in tiles[number * share : (number + 1) * share]],
            pixels=pixels[number * size : (number + 1) * size],
            grid=tuple(reply["grid"]),
            size=tuple(reply["size"]),
            num_rows=rows,
        )
        for number, digest in enumerate(hashes)
    ]
    return DecodedImage(images, reply["text"])


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a `data:` URL. Raises ValueError."""
    head, comma, data = url.partition(",")
    if not comma:
        raise ValueError("its data: URL has no comma before the data")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode(unquote_to_bytes(data) if "%" in data else data, validate=True)
    except binascii.Error:
        pass
    try:  # line breaks, and URLs' alphabet, as some clients send
        compact = "".join(data.split()).translate(str.maketrans("-_", "+/")).rstrip("=")
        return base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("it is not valid base64") from None


def image_error(param: str, why: str) -> ApiError:
    return ApiError(400, f"An image cannot be used: {why}.", code="invalid_image", param=param)


def place_images(
    ids: Sequence[int], decoded: Sequence[DecodedImage], vision: VisionConfig
) -> list[PreparedImage]:
    """Return the images with their places in a prompt. Raises ApiError for other image tokens."""
    images, position = [], 0
    for image in (image for each in decoded for image in each.images):
        try:
            start = end = ids.index(vision.image_token_id, position)
            for _ in range(image.num_rows - 1):
                end = ids.index(vision.image_token_id, end + 1)
        except ValueError:
            raise _misplaced() from None
        position = end + 1
        images.append(replace(image, start=start, num_tokens=position - start))
    if vision.image_token_id in ids[position:]:
        raise _misplaced()
    return images


def _misplaced() -> ApiError:
    return ApiError(
        400,
        "The model's chat template and tokenizer do not give a prompt with one place for each image.",
        code="chat_template_error",
        param="messages",
    )
