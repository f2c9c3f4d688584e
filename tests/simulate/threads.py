"""Threads of the virtual machine: greenlets that give way wherever a real thread would wait.

A thread belongs to an engine process, or to the daemon. The daemon's event loop never waits for one, but for
`join`, which runs the thread to its end.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from greenlet import getcurrent, greenlet

from .virtual_loop import StuckError

if TYPE_CHECKING:
    from .machine import Machine, VirtualProcess


class Strand:
    """Something that runs and waits: a thread, or the main thread of a process."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self.greenlet: Any = None
        self._ticket = 0
        self._is_due = False
        self._is_waiting = False

    @property
    def process(self) -> "VirtualProcess | None":
        raise NotImplementedError

    @property
    def has_ended(self) -> bool:
        raise NotImplementedError

    def suspend(self, seconds: float | None, *, alone: bool = False) -> None:
        """Give way until `wake`, or for `seconds`. `alone`: nothing else wakes it."""
        self._ticket += 1
        self._is_waiting = not alone
        loop = self._machine.loop
        timer = None if seconds is None else loop.call_later(seconds, self._resume, self._ticket)
        self.greenlet.parent.switch()
        self._is_waiting = False
        if timer is not None:
            timer.cancel()

    def wake(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._machine.loop.call_soon(self._resume, self._ticket)

    def go_on(self) -> None:
        """Go on after a stop, if its time has come meanwhile."""
        if self._is_due:
            self._is_due = False
            self._machine.loop.call_soon(self._resume, self._ticket)

    def _resume(self, ticket: int) -> None:
        if self.has_ended or ticket != self._ticket:
            return
        process, machine = self.process, self._machine
        if process is not None and process.letter == "T":
            self._is_due = True
            return
        before = machine.strand
        if process is not None:
            machine.current = process
        machine.strand = self
        self.greenlet.parent = getcurrent()
        try:
            self.greenlet.switch()
        finally:
            machine.strand = before


class VirtualThread(Strand):
    """Stands for `threading.Thread`. It never runs while its process is stopped, and ends with it."""

    def __init__(
        self, machine: "Machine", *, target: Callable[[], None], name: str = "", daemon: bool = False
    ) -> None:
        super().__init__(machine)
        del daemon
        self.name = name
        self._process = None if machine.strand is None else machine.strand.process
        self._target = target
        self._is_begun = self._is_over = False
        self._joining: list[Strand] = []
        self.greenlet = greenlet(self._main)

    @property
    def process(self) -> "VirtualProcess | None":
        return self._process

    @property
    def has_ended(self) -> bool:
        return self._is_over or (self._process is not None and self._process.exited is not None)

    def start(self) -> None:
        self._is_begun = True
        if self._process is not None:
            self._process.threads.append(self)
        self._machine.loop.call_soon(self._resume, self._ticket)

    def is_alive(self) -> bool:
        return self._is_begun and not self.has_ended

    def join(self, timeout: float | None = None) -> None:
        strand = self._machine.strand
        if strand is not None:
            while not self.has_ended and timeout != 0.0:
                self._joining.append(strand)
                strand.suspend(timeout)
                timeout = 0.0 if timeout is not None else None
            return
        for _ in range(10_000):
            if self.has_ended:
                return
            self._resume(self._ticket)
        raise StuckError(f"the thread {self.name} does not end")

    def _main(self) -> None:
        self._target()
        self._is_over = True
        for strand in self._joining:
            strand.wake()


class Condition:
    """Stands for `threading.Condition`. No lock is needed: nothing runs beside a strand."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._waiting: list[Strand] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for strand in waiting:
            strand.wake()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        strand, loop = self._machine.strand, self._machine.loop
        end = None if timeout is None else loop.time() + timeout
        while not (result := predicate()):
            left = None if end is None else end - loop.time()
            if left is not None and left <= 0:
                break
            assert strand is not None, "the daemon's loop would block"
            self._waiting.append(strand)
            strand.suspend(left)
        return result


class Event:
    """Stands for `threading.Event`."""

    def __init__(self, machine: "Machine") -> None:
        self._condition = Condition(machine)
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self._condition.notify_all()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._condition.wait_for(self.is_set, timeout))


class Queue:
    """Stands for `queue.Queue`."""

    def __init__(self, machine: "Machine", maxsize: int = 0) -> None:
        self._condition = Condition(machine)
        self._items: deque[Any] = deque()
        self._most = maxsize

    def empty(self) -> bool:
        return not self._items

    def put_nowait(self, item: Any) -> None:
        if self._most and len(self._items) >= self._most:
            raise queue.Full
        self._items.append(item)
        self._condition.notify_all()

    def put(self, item: Any, timeout: float | None = None) -> None:
        del timeout
        self.put_nowait(item)

    def get(self, timeout: float | None = None) -> Any:
        if not self._condition.wait_for(lambda: self._items, timeout):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


def threading_of(machine: "Machine") -> Any:
    """Return the module `threading` as a machine has it."""
    return SimpleNamespace(
        Thread=lambda **options: VirtualThread(machine, **options),
        Condition=lambda: Condition(machine),
        Event=lambda: Event(machine),
        Lock=threading.Lock,
    )


def queue_of(machine: "Machine") -> Any:
    """Return the module `queue` as a machine has it."""
    make = lambda most=0: Queue(machine, most)  # noqa: E731
    return SimpleNamespace(Queue=_Generic(make), Full=queue.Full, Empty=queue.Empty)


class _Generic:
    """A class with type arguments."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __getitem__(self, _: object) -> Callable[..., Any]:
        return self._make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)
