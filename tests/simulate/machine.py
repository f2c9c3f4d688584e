"""Virtual machine: engine processes as greenlets, their sockets and pipes, signals, and what /proc says.

A process runs the engine's own main loop. It hands over wherever a real one would sleep in the kernel or
compute, and only there can it be killed, stopped or starved. Every delay is drawn from the seed.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent, greenlet

from llmbox.engine.hardware.proc import ProcessState
from llmbox.engine.ipc.spawn import SpawnedProcess

from .streams import READ, WRITE, DaemonEnd, Pipe, Poll
from .virtual_loop import VirtualLoop


class ProcessKilled(BaseException):
    """Signal that ends the process which it is raised in."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(slots=True)
class Death:
    """End of a process, as the machine knows it."""

    pid: int
    at: float
    code: int
    cause: str
    """Fault that caused it; empty for an exit that was asked for."""
    said: str = ""
    """Text that the daemon's log must have about it."""
    name: str = ""
    """Model that it served; empty if it had none yet."""


class VirtualProcess:
    """Engine process; stands for its `subprocess.Popen` too."""

    def __init__(self, machine: "Machine", pid: int) -> None:
        self._machine = machine
        self.pid = pid
        self.returncode: int | None = None
        self.name = ""
        self.engine: Any = None
        self.letter = "S"
        self.exited: int | None = None
        self.cause = self.said = ""
        self.is_killed_by_daemon = False
        self._used = 0.0
        self._since: float | None = None
        self._ticket = 0
        self._is_due = False
        self._is_waiting = False
        self.inbox, self.outbox = Pipe(machine), Pipe(machine, machine.capacity)
        self.log = Pipe(machine)
        self.greenlet = greenlet(self._main)

    # ------------------------------------------------------------------ as subprocess.Popen

    def poll(self) -> int | None:
        self.returncode = self.exited
        return self.returncode

    def wait(self) -> int:
        assert self.exited is not None, "the daemon would block"
        self.returncode = self.exited
        return self.returncode

    def kill(self) -> None:
        self._machine.killpg(self.pid, signal.SIGKILL)

    # ------------------------------------------------------------------ inside the process

    def print(self, line: str) -> None:
        self.log.write(line.encode() + b"\n")

    def compute(self, seconds: float, letter: str = "R") -> None:
        """Use a core for so long, or with another letter wait for something else."""
        self.letter = letter
        self._since = self._machine.loop.time() if letter == "R" else None
        self.suspend(seconds, alone=True)
        if self._since is not None:
            self._used += self._machine.loop.time() - self._since
        self._since, self.letter = None, "S"

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

    # ------------------------------------------------------------------ outside of it

    def start(self) -> None:
        self._resume(self._ticket)

    @property
    def seconds(self) -> float:
        """Processor time that it has used."""
        return self._used + (self._machine.loop.time() - self._since if self._since is not None else 0.0)

    def stop(self) -> None:
        if self.exited is None and self.letter != "T":
            self._used, self._since, self.letter = self.seconds, None, "T"

    def go_on(self) -> None:
        if self.exited is None and self.letter == "T":
            self.letter = "S"
            if self._is_due:
                self._is_due = False
                self._machine.loop.call_soon(self._resume, self._ticket)

    def die(self, number: int, cause: str, said: str = "") -> None:
        """End it by a signal, wherever it is."""
        if self.exited is not None:
            return
        self.cause, self.said = self.cause or cause, self.said or said
        if getcurrent() is self.greenlet:
            raise ProcessKilled(number)
        if self.greenlet:
            self._machine.current = self
            self.greenlet.throw(ProcessKilled(number))
        else:  # it had not begun
            self._end(-number)

    def _resume(self, ticket: int) -> None:
        if self.exited is not None or ticket != self._ticket:
            return
        if self.letter == "T":
            self._is_due = True
            return
        self._machine.current = self
        self.greenlet.parent = getcurrent()
        self.greenlet.switch()

    def _main(self) -> None:
        try:
            code = self._machine.program(self)
        except ProcessKilled as killed:
            code = -killed.number
        self._end(code)

    def _end(self, code: int) -> None:
        self.exited = code
        self.letter = "Z"
        torn = code < 0 and self._machine.chance.random() < 0.5
        self.outbox.end(torn=torn)
        self.log.end()
        self._machine.process_ended(self)


class Machine:
    """Processes, descriptors, and the modules `os` and `select` as the product's code sees them."""

    def __init__(self, loop: VirtualLoop, chance: Random, program: Callable[[VirtualProcess], int]) -> None:
        self.loop, self.chance, self.program = loop, chance, program
        self.current: VirtualProcess
        self.capacity = 1 << 30
        self.slowness = 1.0
        """Factor of all delays and of computing: above 1 the machine is short of processor time."""
        self.mean_latency = 0.0005
        self.spawn_errors = 0
        """Number of processes that cannot be started, from now on."""
        self.oom_kills = 0
        self.processes: dict[int, VirtualProcess] = {}
        self.descriptors: dict[int, str] = {}
        self.deaths: list[Death] = []
        self.on_death: Callable[[VirtualProcess, Death], None] = lambda *_: None
        self._ends: dict[int, DaemonEnd] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._pidfds: dict[int, VirtualProcess] = {}
        self._next_pid, self._next_fd = 100, 1000
        loop.watch, loop.unwatch = self._watch, self._unwatch
        loop.thread_delay = self.latency

    def latency(self) -> float:
        """Draw the delay of a message or a thread's work, in seconds: mostly short, at times long."""
        chance = self.chance
        most = self.mean_latency * (100 if chance.random() < 0.02 else 2)
        return chance.random() * most * min(self.slowness, 4.0)

    # ------------------------------------------------------------------ descriptors

    def open_descriptor(self, kind: str) -> int:
        self._next_fd += 1
        self.descriptors[self._next_fd] = kind
        return self._next_fd

    def close_descriptor(self, number: int) -> None:
        del self.descriptors[number]

    @property
    def os(self) -> Any:
        """The module `os`, as engine/ipc uses it."""
        return SimpleNamespace(
            pidfd_open=self._pidfd_open,
            close=self._close,
            fdopen=lambda number, *_, **__: self._ends.pop(number),
            killpg=self.killpg,
        )

    @property
    def select(self) -> Any:
        """The module `select`, as engine/ipc uses it."""
        return SimpleNamespace(POLLIN=READ, POLLOUT=WRITE, poll=lambda: Poll(self))

    def _close(self, number: int) -> None:
        end = self._ends.pop(number, None)
        if end is not None:
            end.close()
        else:
            self._pidfds.pop(number, None)
            self.close_descriptor(number)

    def _pidfd_open(self, pid: int) -> int:
        number = self.open_descriptor("pidfd")
        self._pidfds[number] = self.processes[pid]
        return number

    def _watch(self, number: int, call: Callable[[], None]) -> None:
        self._watched[number] = call
        if self._pidfds[number].exited is not None:
            self.loop.call_soon(self._notify, number)

    def _unwatch(self, number: int) -> None:
        self._watched.pop(number, None)

    def _notify(self, number: int) -> None:
        if (call := self._watched.get(number)) is not None:
            call()

    # ------------------------------------------------------------------ processes

    def spawn(self, _: Any) -> SpawnedProcess:
        if self.spawn_errors:
            self.spawn_errors -= 1
            self.deaths.append(Death(0, self.loop.time(), 1, "spawn"))
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self._next_pid += 1
        process = self.processes[self._next_pid] = VirtualProcess(self, self._next_pid)
        sock = DaemonEnd(self, process.outbox, process.inbox, "socket")
        log = DaemonEnd(self, process.log, None, "pipe")
        self._ends[log.number] = log
        self.loop.call_later(self.latency(), process.start)
        return SpawnedProcess(process, sock, log.number)

    def killpg(self, pid: int, number: int) -> None:
        """Deliver a signal that the daemon sent."""
        process = self.processes[pid]
        if process.returncode is not None:
            raise ProcessLookupError
        process.is_killed_by_daemon = process.exited is None
        process.die(number, "")

    def process_ended(self, process: VirtualProcess) -> None:
        assert process.exited is not None
        death = Death(
            process.pid, self.loop.time(), process.exited, process.cause, process.said, process.name
        )
        self.deaths.append(death)
        self.on_death(process, death)
        process.engine = None
        for number, each in self._pidfds.items():
            if each is process:
                self.loop.call_later(self.latency(), self._notify, number)

    def alive(self, name: str) -> VirtualProcess | None:
        """Process that serves a model, if there is one."""
        found = [p for p in self.processes.values() if p.name == name and p.exited is None]
        return found[-1] if found else None

    def read_state(self, pid: int) -> ProcessState | None:
        process = self.processes.get(pid)
        if process is None or process.exited is not None:
            return None
        return ProcessState(process.letter, int(process.seconds * 100))

    def thread_states(self, pid: int) -> list[ProcessState]:
        state = self.read_state(pid)
        return [] if state is None else [state]
