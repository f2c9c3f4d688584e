"""Virtual time: clocks that stand still while code runs, and an event loop that jumps to its next timer."""

import asyncio
import heapq
from asyncio.events import TimerHandle
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

_RESOLUTION = 1e-9
"""Seconds within which timers are called together."""


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


class VirtualHandle(TimerHandle):
    """Callback of a `VirtualLoop`, with a time or without. A run makes thousands: nothing is kept for
    debugging, and the loop itself calls it.
    """

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: "VirtualLoop",
        context: Context | None,
    ) -> None:
        self._when, self._callback, self._args, self._loop = when, callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None


class VirtualLoop(asyncio.BaseEventLoop):
    """Event loop in virtual time, without descriptors, threads and signals.

    Timers of the same time are called in the order in which they were set.
    Transports come from the virtual machine: `connect` gives the transport of a socket or a pipe. Work for
    threads is done at once, `thread_delay()` seconds later.
    """

    def __init__(self, clock: VirtualClock, most_turns: int = 200_000) -> None:
        super().__init__()
        self.clock = clock
        self._turns_left = most_turns
        self._clock_resolution = _RESOLUTION
        self._timers: list[tuple[float, int, VirtualHandle]] = []
        self._timers_set = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self.thread_delay: Callable[[], float] = float
        self.watch: Callable[[int, Callable[[], None]], None] = lambda *_: None
        self.unwatch: Callable[[int], None] = lambda _: None
        self.failures: list[str] = []
        """Exceptions that reached the loop, which nobody handled."""
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        return self.clock.now

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> "asyncio.Task[Any]":
        task = super().create_task(coro, name=name, context=context)
        self._tasks.append(task)
        return task

    @property
    def tasks(self) -> "list[asyncio.Task[Any]]":
        """Tasks that have not ended. `asyncio.all_tasks` goes through those of all runs."""
        return [task for task in self._tasks if not task.done()]

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> VirtualHandle:
        handle = VirtualHandle(0.0, callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> VirtualHandle:
        """Call after a delay, which is long enough for the clock to move: rounding leaves shorter ones."""
        if 0 < delay < 2 * _RESOLUTION:
            delay = 2 * _RESOLUTION
        return self.call_at(self.clock.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> VirtualHandle:
        timer = VirtualHandle(when, callback, args, self, context)
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, timer))
        return timer

    def _run_once(self) -> None:
        """Take turns until the loop is stopped: call what is ready, and where nothing is, move the clock to
        the next timer.
        """
        ready, timers, clock, pop = self._ready, self._timers, self.clock, heapq.heappop
        while True:
            self._turns_left -= 1
            if self._turns_left < 0:
                raise StuckError("the loop goes round without an end")
            while timers and timers[0][2]._cancelled:
                pop(timers)
            if not ready and not self._stopping:
                if not timers:
                    raise StuckError("tasks wait and no timer is set: a deadlock")
                clock.now = max(clock.now, timers[0][0])
            end = clock.now + _RESOLUTION
            while timers and timers[0][0] < end:
                ready.append(pop(timers)[2])
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    try:
                        handle._context.run(handle._callback, *handle._args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:  # noqa: BLE001 - as every loop does
                        self.call_exception_handler(
                            {"message": f"exception in {handle!r}", "exception": error}
                        )
            if self._stopping:
                return

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
        return [repr(handle) for *_, handle in self._timers if not handle.cancelled()]

    def _note_failure(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(
            str(error) if isinstance(error, AssertionError) else f"{context['message']}: {error!r}"
        )
        self.stop()

    def _write_to_self(self) -> None:
        return
