"""Socket between rank 0 and one worker: frames of JSON and int32 on an inherited descriptor.

frame = JSON bytes u32 | integer bytes u32 | JSON | int32...

No pickle, no network. No msgspec either: the engine's runner works where only torch is installed.
"""

import contextlib
import json
import socket
import struct
from array import array
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import RankLost

_HEADER: Final = struct.Struct("<II")
NUMBER: Final = "i"


@dataclass(frozen=True, slots=True)
class Frame:
    kind: str
    body: dict[str, Any] = field(default_factory=dict)
    numbers: "array[int]" = field(default_factory=lambda: array(NUMBER))

    def encode(self) -> bytes:
        text = json.dumps([self.kind, self.body], separators=(",", ":")).encode()
        numbers = self.numbers.tobytes()
        return _HEADER.pack(len(text), len(numbers)) + text + numbers


class Link:
    """One end of the socket; sends and receives block."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, frame: bytes) -> None:
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise RankLost(f"the other rank is gone: {error}") from error

    def receive(self) -> Frame:
        """Receive one frame. Raises RankLost at the end of the stream."""
        text_size, numbers_size = _HEADER.unpack(self._exactly(_HEADER.size))
        kind, body = json.loads(self._exactly(text_size))
        numbers = array(NUMBER)
        numbers.frombytes(self._exactly(numbers_size))
        return Frame(kind, body, numbers)

    def end(self) -> None:
        """Shut the stream down, from any thread: pending and later calls at both ends raise RankLost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise RankLost(f"the other rank is gone: {error}") from error
            if not count:
                raise RankLost("the other rank closed its end")
            view = view[count:]
        return data
