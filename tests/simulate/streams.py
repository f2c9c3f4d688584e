"""Sockets and pipes of the virtual machine: bytes that arrive later, in order, in any pieces."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from llmbox.engine.ipc.spawn import PID_BYTES

if TYPE_CHECKING:
    from .machine import Machine

READ, WRITE = 1, 4


class Pipe:
    """One direction of bytes: they arrive in order, after a delay each, in any pieces."""

    def __init__(self, machine: "Machine", capacity: int = 1 << 30) -> None:
        self._machine = machine
        self._capacity = capacity
        self._flying: deque[bytes] = deque()
        self._arrived: deque[bytes] = deque()
        self._last = 0.0
        self.unread = 0
        self.at_end = False
        self.garbles_next = False
        """Change one bit of the next write."""
        self.take: Callable[[], None] = lambda: None
        """Called when something has arrived, or the end."""
        self.on_room: Callable[[], None] = lambda: None

    def write(self, data: bytes) -> int:
        """Return how many bytes were taken; 0 if the pipe is full."""
        count = min(len(data), self._capacity - self.unread)
        if count > 0:
            self.unread += count
            sent = bytearray(data[:count])
            if self.garbles_next:
                self.garbles_next = False
                sent[self._machine.chance.randrange(count)] ^= 1 << self._machine.chance.randrange(8)
            self._flying.append(bytes(sent))
            self._later(self._land)
        return count

    def end(self, *, torn: bool = False) -> None:
        """Close the writer's end. `torn`: the last write had not been taken whole."""
        if torn and self._flying:
            last = self._flying.pop()
            self._flying.append(last[: self._machine.chance.randrange(len(last) + 1)])
        self._later(self._finish)

    def read(self, most: int = 1 << 30) -> bytes:
        data = b"".join(self._arrived)
        self._arrived.clear()
        if len(data) > most:
            self._arrived.append(data[most:])
            data = data[:most]
        if data:
            self.unread -= len(data)
            self.on_room()
        return data

    @property
    def is_readable(self) -> bool:
        return bool(self._arrived) or self.at_end

    @property
    def has_room(self) -> bool:
        return self.unread < self._capacity

    def _later(self, call: Callable[[], None]) -> None:
        loop = self._machine.loop
        self._last = max(self._last, loop.time() + self._machine.latency())
        loop.call_at(self._last, call)

    def _land(self) -> None:
        data = self._flying.popleft()
        if data:
            self._arrived.append(data)
        self.take()

    def _finish(self) -> None:
        self.at_end = True
        self.take()


class DaemonEnd:
    """The daemon's end of a socket or a pipe: an asyncio transport once a protocol is attached."""

    def __init__(self, machine: "Machine", incoming: Pipe, outgoing: Pipe | None, kind: str) -> None:
        self._machine, self._incoming, self._outgoing = machine, incoming, outgoing
        self._protocol: Any = None
        self._is_closing = False
        self.number = machine.open_descriptor(kind)
        incoming.take = self._take

    def attach(self, protocol: Any) -> "DaemonEnd":
        self._protocol = protocol
        loop = self._machine.loop
        loop.call_soon(protocol.connection_made, self)
        loop.call_soon(self._take)
        return self

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def write(self, data: bytes) -> None:
        if not self._is_closing and self._outgoing is not None:
            self._outgoing.write(data)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._machine.close_descriptor(self.number)
        if self._outgoing is not None:
            self._outgoing.end()
        if self._protocol is not None:
            self._machine.loop.call_soon(self._protocol.connection_lost, None)

    def _take(self) -> None:
        if self._protocol is None or self._is_closing:
            return
        chance = self._machine.chance
        data = self._incoming.read()
        while data:
            count = len(data) if chance.random() < 0.7 else chance.randint(1, len(data))
            self._protocol.data_received(data[:count])
            data = data[count:]
            if self._is_closing:
                return
        if self._incoming.at_end:
            self.close()


class EngineSocket:
    """The engine's end: a non-blocking socket."""

    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self.incoming, self.outgoing = incoming, outgoing

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def settimeout(self, seconds: float) -> None:
        return

    def recv(self, most: int) -> bytes:
        if not self.incoming.is_readable:
            raise BlockingIOError
        return self.incoming.read(most)

    def send(self, data: memoryview) -> int:
        if self.incoming.at_end:
            raise BrokenPipeError
        count = self.outgoing.write(bytes(data))
        if not count:
            raise BlockingIOError
        return count

    def sendall(self, data: bytes) -> None:
        self.outgoing.write(data)

    def close(self) -> None:
        return


class Poll:
    """`select.poll` of one socket of a virtual process."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._events = READ

    def register(self, sock: EngineSocket, events: int) -> None:
        self._sock, self._events = sock, events

    def modify(self, _: EngineSocket, events: int) -> None:
        self._events = events

    def poll(self, milliseconds: float | None = None) -> None:
        sock = self._sock
        if sock.incoming.is_readable or (self._events & WRITE and sock.outgoing.has_room):
            return
        process = self._machine.current
        sock.incoming.take = process.wake
        sock.outgoing.on_room = process.wake if self._events & WRITE else lambda: None
        process.suspend(None if milliseconds is None else milliseconds / 1000)
        sock.incoming.take = sock.outgoing.on_room = lambda: None


class ForkChannel:
    """The daemon's end of the socket of a fork server, which forks as soon as it is asked."""

    def __init__(self, machine: "Machine", server: Any) -> None:
        self._machine, self._server = machine, server
        self._answer = b""
        self.number = machine.open_descriptor("control socket")

    def fork(self, files: tuple[int, ...]) -> None:
        pid = self._machine.fork(self._server, *files)
        self._answer = b"" if pid is None else pid.to_bytes(PID_BYTES, "little", signed=True)

    def settimeout(self, seconds: float) -> None:
        return

    def recv(self, most: int) -> bytes:
        assert most == PID_BYTES
        return self._answer

    def close(self) -> None:
        self._machine.close_descriptor(self.number)


class ChildEnd:
    """The end of a socket pair that a new process gets."""

    def __init__(self, machine: "Machine", pipes: tuple[Pipe, Pipe]) -> None:
        self._machine, self.pipes = machine, pipes
        self._number = machine.open_descriptor("end of a child")

    def fileno(self) -> int:
        return self._number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._machine.close_descriptor(self._number)
