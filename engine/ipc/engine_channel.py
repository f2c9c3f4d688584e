"""Engine's end of the socket to the daemon: sending never blocks a step, receiving wakes up at once.

When the daemon does not read (stopped, starved), outputs are buffered here. Past `OUTBOX_LIMIT` the channel
is `congested` and the engine stops stepping until the daemon has read: nothing is dropped and memory is
bounded. A daemon that is gone for good ends the wait with EOF.
"""

import select
import socket
from collections import deque
from typing import Any, Final, Generic, TypeVar

from .codec import FrameReader, Message, encode
from .messages import ToDaemon, ToEngine

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
