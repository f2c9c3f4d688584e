"""Images of prompts: when each is encoded, and how long its embeddings are kept. Knows no tensors.

A prompt is computed up to its first image that is not encoded, and goes on once it is. Slices of the tower
run between steps, one a step, so that decoding goes on meanwhile. Embeddings are kept by last use; an image
that a request is about to read is never dropped.

    waiting --first rows need an image--> set aside --encoded--> waiting --> running
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Protocol

from ..errors import InvalidRequest
from ..ipc.messages import ModelInfo, PreparedImage
from .request import Request, first_image

MOST_READERS: Final = 8
"""Requests whose images are encoded for them or read at one time; others wait. It bounds what the cache may
hold beyond its size."""


class ImageEncoder(Protocol):
    """Tower that the runner owns."""

    def advance(self, image: PreparedImage) -> bool:
        """Compute one slice of an image. True once its embeddings are kept; raises where it cannot be
        encoded.
        """
        ...

    def drop(self, content_hash: bytes) -> None:
        """Free the embeddings of an image, complete or partial."""
        ...


class ImageScheduler:
    """Order in which images are encoded, and the bounded cache of their embeddings."""

    def __init__(
        self, encoder: ImageEncoder, *, row_bytes: int, cache_bytes: int, is_bidirectional: bool = False
    ) -> None:
        """`row_bytes`: size of the embeddings of one row. `cache_bytes`: size of all that are kept; one
        image is kept whatever its size. `is_bidirectional`: rows of an image need those after them, so
        that it is never cut.
        """
        self._is_bidirectional = is_bidirectional
        self._encoder = encoder
        self._row_bytes = row_bytes
        self._room = cache_bytes
        self._encoded: OrderedDict[bytes, int] = OrderedDict()
        """Bytes of each image that is encoded, least recently used first."""
        self._wanted: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._readers: dict[str, tuple[Request, bytes]] = {}
        """Requests that wait for an image or read it now, with its hash."""
        self._aside: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._wanted)

    def limit(self, request: Request, start: int, tokens: int) -> int:
        """Return how many of `tokens` from position `start` on can be computed now: as far as the first
        image that is not encoded, which then will be.
        """
        images, end = request.images, start + tokens
        for image in images[first_image(images, start) :]:
            if image.start >= end:
                break
            if image.content_hash not in self._encoded:
                self._wanted.setdefault(image.content_hash, image)
                self._readers[request.request_id] = request, image.content_hash
                return max(0, image.start - start)
            self._encoded.move_to_end(image.content_hash)
            if self._is_bidirectional and end < (image_end := image.start + image.num_tokens):
                # The budget is exceeded for an image alone, so that one larger than it is computed too.
                tokens = image.start - start if image.start > start else image_end - start
                end = start + tokens
                break
        following = first_image(images, end)
        if following < len(images) and images[following].start < end:
            self._readers[request.request_id] = request, images[following].content_hash
        else:  # the next one is encoded when the prompt comes to it
            self._readers.pop(request.request_id, None)
        return tokens

    def may_begin(self, request: Request, start: int) -> bool:
        """Return True if a waiting request can compute its row at `start`. Else it is set aside until
        `take_ready` returns it.
        """
        index = first_image(request.images, start)
        image = request.images[index] if index < len(request.images) else None
        if image is None or image.start > start or image.content_hash in self._encoded:
            return True
        if request.request_id in self._readers or len(self._readers) < MOST_READERS:
            self.limit(request, start, 1)
        self._aside.append(request)
        return False

    def take_ready(self) -> list[Request]:
        """Return the requests set aside whose image is encoded."""
        if not self._aside:
            return []
        ready = [each for each in self._aside if self._is_ready(each)]
        self._aside = [each for each in self._aside if not self._is_ready(each)]
        return ready

    def _is_ready(self, request: Request) -> bool:
        reader = self._readers.get(request.request_id)
        return len(self._readers) < MOST_READERS if reader is None else reader[1] in self._encoded

    def leave(self, request: Request) -> None:
        """Forget a request that was preempted or is gone. An image that no other request needs is dropped."""
        _, content_hash = self._readers.pop(request.request_id, (request, b""))
        self._aside = [each for each in self._aside if each is not request]
        if content_hash in self._wanted and not self._is_read(content_hash):
            del self._wanted[content_hash]
            self._encoder.drop(content_hash)

    def _is_read(self, content_hash: bytes) -> bool:
        return any(read == content_hash for _, read in self._readers.values())

    def advance(self) -> None:
        """Compute one slice of the image that was wanted first. Raises what the tower raises: then
        `give_up` has to be called.
        """
        content_hash, image = next(iter(self._wanted.items()))
        if self._encoder.advance(image):
            del self._wanted[content_hash]
            self._encoded[content_hash] = image.num_tokens * self._row_bytes
            self._shrink(content_hash)

    def give_up(self) -> list[Request]:
        """Drop the image that failed; return the requests that need it now and must be ended."""
        content_hash, _ = self._wanted.popitem(last=False)
        self._encoder.drop(content_hash)
        return [request for request, read in self._readers.values() if read == content_hash]

    def _shrink(self, newest: bytes) -> None:
        """Drop embeddings that nobody reads until the rest has room."""
        size = sum(self._encoded.values())
        for content_hash in list(self._encoded):
            if size <= self._room:
                return
            if content_hash != newest and not self._is_read(content_hash):
                size -= self._encoded.pop(content_hash)
                self._encoder.drop(content_hash)


def check_images(images: Sequence[PreparedImage], prompt_ids: list[int], info: ModelInfo) -> None:
    """Check that the images are inside the prompt and do not overlap. Raises InvalidRequest."""
    end, image_token_id = 0, info.image_token_id
    if images and info.image_problem:
        raise InvalidRequest(f"this model cannot read images: {info.image_problem}")
    for image in images:
        first, last = image.start, image.start + image.num_tokens - 1
        if not (end <= first <= last < len(prompt_ids)):
            raise InvalidRequest(f"an image at token {first} does not come after the previous one")
        if prompt_ids[first] != image_token_id or prompt_ids[last] != image_token_id:
            raise InvalidRequest(f"an image at token {first} does not begin and end with image tokens")
        if prompt_ids[first : last + 1].count(image_token_id) != image.num_rows:
            raise InvalidRequest(f"an image of {image.num_rows} rows has another number of image tokens")
        rows, columns = image.grid
        if rows < 0 or columns < 0 or rows * columns not in (0, image.num_rows):
            raise InvalidRequest(f"an image of {image.num_rows} rows has a grid of {rows} x {columns}")
        if len(image.content_hash) != 32:
            raise InvalidRequest("the hash of an image does not have 32 bytes")
        if 3 * sum(height * width for height, width in image.tiles) != len(image.pixels):
            raise InvalidRequest("the pixels of an image do not fill its tiles")
        end = last + 1
