"""Virtual time: clocks that stand still while code runs, and an event loop that jumps to its next timer."""

import asyncio
from collections.abc import Callable
from typing import Any


class StuckError(Exception):
    """Nothing can happen any more, or too much happens without an end."""


class VirtualClock:
    """Monotonic clock that the loop moves on, and a wall clock that may jump."""

    def __init__(self, now: float = 1000.0, wall: float = 1.8e9) -> None:
        self.now = now
        self._wall = wall - now

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + self._wall

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward, or back. The monotonic one does not notice."""
        self._wall += seconds


class _NextTimer:
    """Selector without descriptors: waiting moves the clock to the next timer."""

    def __init__(self, loop: "VirtualLoop", most: int) -> None:
        self._loop = loop
        self._left = most

    def select(self, timeout: float | None) -> list[Any]:
        self._left -= 1
        if self._left < 0:
            raise StuckError("the loop goes round without an end")
        if timeout is None:
            raise StuckError("tasks wait and no timer is set: a deadlock")
        if timeout > 0:
            clock = self._loop.clock
            clock.now = max(clock.now, self._loop._scheduled[0].when())
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """Event loop in virtual time, without descriptors, threads and signals.

    Transports come from the virtual machine: `connect` gives the transport of a socket or a pipe. Work for
    threads is done at once, `thread_delay()` seconds later.
    """

    def __init__(self, clock: VirtualClock, most_turns: int = 200_000) -> None:
        super().__init__()
        self.clock = clock
        self._selector = _NextTimer(self, most_turns)
        self._clock_resolution = 1e-9
        self.thread_delay: Callable[[], float] = float
        self.watch: Callable[[int, Callable[[], None]], None] = lambda *_: None
        self.unwatch: Callable[[int], None] = lambda _: None
        self.failures: list[str] = []
        """Exceptions that reached the loop, which nobody handled."""
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        return self.clock.now

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """Call after a delay, which is long enough for the clock to move: rounding leaves shorter ones."""
        if 0 < delay < 2 * self._clock_resolution:
            delay = 2 * self._clock_resolution
        return super().call_later(delay, callback, *args, context=context)

    def add_reader(self, fd: int, callback: Callable[..., object], *args: object) -> None:
        self.watch(fd, lambda: callback(*args))

    def remove_reader(self, fd: int) -> None:
        self.unwatch(fd)

    async def create_unix_connection(self, factory: Callable[[], Any], *, sock: Any) -> tuple[Any, Any]:
        return await self._connect(factory, sock)

    async def connect_read_pipe(self, factory: Callable[[], Any], pipe: Any) -> tuple[Any, Any]:
        return await self._connect(factory, pipe)

    async def _connect(self, factory: Callable[[], Any], end: Any) -> tuple[Any, Any]:
        protocol = factory()
        transport = end.attach(protocol)
        await asyncio.sleep(0)
        return transport, protocol

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()

        def work() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - handed to the one who waits
                done.set_exception(error)

        self.call_later(self.thread_delay(), work)
        return done

    @property
    def timers(self) -> list[str]:
        """Timers that are set, described."""
        return [repr(handle) for handle in self._scheduled if not handle.cancelled()]

    def _note_failure(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(
            str(error) if isinstance(error, AssertionError) else f"{context['message']}: {error!r}"
        )
        self.stop()

    def _process_events(self, event_list: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        return
