"""Messages between daemon and engine as frames on a byte stream, checked when decoded; and the engine's end
of the socket, where sending never blocks a step and receiving wakes up at once.

frame = length u32 | crc32 u32 | tag u8 | msgpack payload        (length and crc cover tag + payload)

Both ends run the same llmbox, so there is no versioning. A local socket does not flip bits; the checksum
detects bugs of this code (a half-written or interleaved frame), which must end in an error and never in
plausible tokens. It costs microseconds for a frame of some kilobytes.

When the daemon does not read (stopped, starved), outputs are buffered here. Past `OUTBOX_LIMIT` the channel
is `congested` and the engine stops stepping until the daemon has read: nothing is dropped and memory is
bounded. A daemon that is gone for good ends the wait with EOF.
"""

import select
import socket
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec

from . import MAX_FRAME, messages
from .handover_messages import HandedBlocks, Prefill, TakenSlots
from .messages import ToDaemon, ToEngine
from .profile_messages import AskProfile, AskRows, BlockMap, StepProfile, WeightRows

Message = ToEngine | ToDaemon
M = TypeVar("M")

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
    AskRows: 0x0C,
    messages.Progress: 0x81,
    messages.Ready: 0x82,
    messages.LoadFailed: 0x83,
    messages.StepOutputs: 0x84,
    messages.Pong: 0x85,
    BlockMap: 0x86,
    StepProfile: 0x87,
    HandedBlocks: 0x88,
    WeightRows: 0x89,
}
_TAG_BYTES: Final = {kind: bytes([tag]) for kind, tag in _TAGS.items()}
_encoder: Final = msgspec.msgpack.Encoder()


class TransportError(Exception):
    """Stream is corrupt: it does not carry whole, typed messages, and nothing after this point is valid."""


class FrameTooLarge(TransportError):  # noqa: N818 - named for what happened
    """Message to send is over the limit. Nothing was written, so the stream is intact."""


def encode(message: Message, max_frame: int = MAX_FRAME) -> bytes:
    """Encode a message as one frame. Raises FrameTooLarge."""
    tag, payload = _TAG_BYTES[type(message)], _encoder.encode(message)
    length = len(tag) + len(payload)
    if length > max_frame:
        raise FrameTooLarge(f"{type(message).__name__} of {length} bytes is over the limit of {max_frame}")
    return _HEADER.pack(length, zlib.crc32(payload, zlib.crc32(tag))) + tag + payload


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


Received = TypeVar("Received")

OUTBOX_LIMIT: Final = 8 << 20
"""Bytes of unsent frames above which a channel is congested."""
_RECEIVE: Final = 256 << 10


class DaemonGone(Exception):  # noqa: N818 - an end, not an error
    """Daemon closed its end of the socket."""


class MessageChannel(Generic[Received]):
    """Non-blocking message channel over one socket, with an outbox."""

    def __init__(self, sock: socket.socket, kinds: Any, outbox_limit: int = OUTBOX_LIMIT) -> None:
        """`kinds`: union of the messages that are received."""
        sock.setblocking(False)
        self._socket = sock
        self._reader: FrameReader[Received] = FrameReader(kinds)
        self._outbox: deque[memoryview] = deque()
        self._unsent = 0
        self._limit = outbox_limit
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @property
    def congested(self) -> bool:
        """True if the unsent frames are over the limit."""
        return self._unsent > self._limit

    def send(self, message: Message) -> None:
        """Queue a message and send as much as the socket takes. Raises DaemonGone."""
        frame = encode(message)
        self._outbox.append(memoryview(frame))
        self._unsent += len(frame)
        self._flush()

    def receive(self, *, block: bool) -> list[Received]:
        """Return all messages that have arrived. With `block`, wait for one, or until a congested outbox is
        no longer congested.

        Raises DaemonGone at EOF and TransportError at a bad frame.
        """
        congested = block and self.congested
        inbox = self._read()
        while block and not inbox and (self.congested or not congested):
            self._wait()
            self._flush()
            inbox = self._read()
        if self._outbox:
            self._flush()
        return inbox

    def drain(self, seconds: float) -> None:
        """Send the rest of the outbox, for `seconds` at most. Called before the process exits."""
        if self._outbox:
            self._socket.settimeout(seconds)
            try:
                self._socket.sendall(b"".join(self._outbox))
            except OSError:
                return

    def wait(self, seconds: float) -> None:
        """Wait until something arrives, for `seconds` at most."""
        self._poll.modify(self._socket, select.POLLIN)
        self._poll.poll(seconds * 1000)

    def close(self) -> None:
        self._socket.close()

    def _wait(self) -> None:
        wanted = select.POLLIN | (select.POLLOUT if self._outbox else 0)
        self._poll.modify(self._socket, wanted)
        self._poll.poll()

    def _read(self) -> list[Received]:
        inbox: list[Received] = []
        while True:
            try:
                data = self._socket.recv(_RECEIVE)
            except BlockingIOError:
                return inbox
            except ConnectionError as error:
                raise DaemonGone from error
            if not data:
                raise DaemonGone
            inbox.extend(self._reader.feed(data))
            if len(data) < _RECEIVE:
                return inbox

    def _flush(self) -> None:
        while self._outbox:
            try:
                sent = self._socket.send(self._outbox[0])
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise DaemonGone from error
            self._unsent -= sent
            if sent == len(self._outbox[0]):
                self._outbox.popleft()
            else:
                self._outbox[0] = self._outbox[0][sent:]


class Channel(MessageChannel[ToEngine]):
    """Engine's end of the socket to its daemon."""

    def __init__(self, sock: socket.socket, outbox_limit: int = OUTBOX_LIMIT) -> None:
        super().__init__(sock, ToEngine, outbox_limit)


class DaemonChannel(MessageChannel[ToDaemon]):
    """Other end of such a socket, for a decode engine that drives a prefill engine."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, ToDaemon)
