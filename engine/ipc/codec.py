"""Codec of the messages between daemon and engine: frames on a byte stream, checked when decoded.

frame = length u32 | crc32 u32 | tag u8 | msgpack payload        (length and crc cover tag + payload)

Both ends run the same llmbox, so there is no versioning. A local socket does not flip bits; the checksum
detects bugs of this code (a half-written or interleaved frame), which must end in an error and never in
plausible tokens. It costs microseconds for a frame of some kilobytes.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec

from . import messages
from .handover_messages import HandedBlocks, Prefill, TakenSlots
from .messages import ToDaemon, ToEngine
from .profile_messages import AskProfile, BlockMap, StepProfile

Message = ToEngine | ToDaemon
M = TypeVar("M")

# Room for prompt logprobs (20 alternatives) of a 128k prompt; an AddRequest of a million tokens is 5 MB.
MAX_FRAME: Final = 64 << 20

_HEADER: Final = struct.Struct("<II")
_TAGS: Final[dict[type, int]] = {
    messages.Start: 0x01,
    messages.AddRequest: 0x02,
    messages.AbortRequest: 0x03,
    messages.Ping: 0x04,
    messages.Shutdown: 0x05,
    messages.AskBlocks: 0x06,
    messages.Vocabulary: 0x07,
    messages.KeepImages: 0x08,
    AskProfile: 0x09,
    Prefill: 0x0A,
    TakenSlots: 0x0B,
    messages.Progress: 0x81,
    messages.Ready: 0x82,
    messages.LoadFailed: 0x83,
    messages.StepOutputs: 0x84,
    messages.Pong: 0x85,
    BlockMap: 0x86,
    StepProfile: 0x87,
    HandedBlocks: 0x88,
}
_encoder: Final = msgspec.msgpack.Encoder()


class TransportError(Exception):
    """Stream is corrupt: it does not carry whole, typed messages, and nothing after this point is valid."""


class FrameTooLarge(TransportError):  # noqa: N818 - named for what happened
    """Message to send is over the limit. Nothing was written, so the stream is intact."""


def encode(message: Message, max_frame: int = MAX_FRAME) -> bytes:
    """Encode a message as one frame. Raises FrameTooLarge."""
    frame = bytearray(_HEADER.size + 1)
    frame[_HEADER.size] = _TAGS[type(message)]
    _encoder.encode_into(message, frame, _HEADER.size + 1)
    length = len(frame) - _HEADER.size
    if length > max_frame:
        raise FrameTooLarge(f"{type(message).__name__} of {length} bytes is over the limit of {max_frame}")
    _HEADER.pack_into(frame, 0, length, zlib.crc32(memoryview(frame)[_HEADER.size :]))
    return bytes(frame)


class FrameReader(Generic[M]):
    """Incremental decoder: takes chunks of bytes and yields whole messages of one direction."""

    def __init__(self, kinds: Any, max_frame: int = MAX_FRAME) -> None:
        """`kinds`: union of the messages to accept, `ToEngine` or `ToDaemon`."""
        self._decoders: dict[int, msgspec.msgpack.Decoder[M]] = {
            _TAGS[kind]: msgspec.msgpack.Decoder(kind) for kind in get_args(kinds)
        }
        self._max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[M]:
        """Yield the messages that `data` completes. Raises TransportError at the first bad frame."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) >= (body := start + _HEADER.size):
                length, crc = _HEADER.unpack_from(buffer, start)
                if not 1 <= length <= self._max_frame:
                    raise TransportError(f"frame of {length} bytes, allowed are 1 to {self._max_frame}")
                end = body + length
                if len(buffer) < end:
                    return
                frame = bytes(memoryview(buffer)[body:end])
                if zlib.crc32(frame) != crc:
                    raise TransportError("frame with a wrong checksum")
                start = end
                tag = frame[0]
                decoder = self._decoders.get(tag)
                if decoder is None:
                    raise TransportError(f"message tag {tag:#04x} does not belong on this side")
                try:
                    message = decoder.decode(memoryview(frame)[1:])
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    raise TransportError(f"message {tag:#04x} does not have its type: {error}") from error
                yield message
        finally:
            del buffer[:start]

    def finish(self) -> None:
        """Check at the end of the stream that no message is incomplete. Raises TransportError."""
        if self._buffer:
            raise TransportError(f"stream ended inside a message after {len(self._buffer)} bytes of it")
