"""Virtual machine: engine processes as greenlets, their sockets and pipes, signals, and what /proc says.

A process runs the engine's own main loop. It hands over wherever a real one would sleep in the kernel or
compute, and only there can it be killed, stopped or starved. Every delay is drawn from the seed.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent, greenlet

from llmbox.engine.hardware.proc import ProcessState
from llmbox.engine.ipc.spawn import SpawnedProcess

from .streams import READ, WRITE, ChildEnd, DaemonEnd, ForkChannel, Pipe, Poll
from .threads import Strand, VirtualThread
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
    is_of_model: bool = False
    """The model was still its own: it was not unloaded, or loaded again."""


class VirtualProcess(Strand):
    """Engine process; stands for its `subprocess.Popen` too."""

    def __init__(self, machine: "Machine", pid: int) -> None:
        super().__init__(machine)
        self.pid = pid
        self.is_server = False
        """It is a fork server."""
        self.threads: list[VirtualThread] = []
        self.returncode: int | None = None
        self.name = ""
        self.weights = 0
        """Bytes of its weights, from the beginning of its load on."""
        self.memory = 0
        """Bytes of its model's share, from the end of its load on."""
        self.engine: Any = None
        self.letter = "S"
        self.exited: int | None = None
        self.cause = self.said = ""
        self.is_killed_by_daemon = False
        self._used = 0.0
        self._since: float | None = None
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

    @property
    def process(self) -> "VirtualProcess":
        return self

    @property
    def has_ended(self) -> bool:
        return self.exited is not None

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
            super().go_on()
            for thread in self.threads:
                thread.go_on()

    def die(self, number: int, cause: str, said: str = "") -> None:
        """End it by a signal, wherever it is."""
        if self.exited is not None:
            return
        self.cause, self.said = self.cause or cause, self.said or said
        if getcurrent() is self.greenlet:
            raise ProcessKilled(number)
        if self.greenlet:
            self._machine.current = self
            before, self._machine.strand = self._machine.strand, self
            try:
                self.greenlet.throw(ProcessKilled(number))
            finally:
                self._machine.strand = before
        else:  # it had not begun
            self._end(-number)

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
        self.strand: Strand | None = None
        """What runs now; None: the daemon's loop."""
        self.capacity = 1 << 30
        self.slowness = 1.0
        """Factor of all delays and of computing: above 1 the machine is short of processor time."""
        self.mean_latency = 0.0005
        self.spawn_errors = 0
        """Number of processes that cannot be started, from now on."""
        self.oom_kills = 0
        self.memory = 1 << 62
        """Bytes that engines may hold together."""
        self.available = 0
        """Further bytes that are free, for engines that begin while others end."""
        self.folder = Path()
        """Files of this run."""
        self.has_poison = False
        """Some requests kill the engine."""
        self.processes: dict[int, VirtualProcess] = {}
        self.descriptors: dict[int, str] = {}
        self.deaths: list[Death] = []
        self.on_death: Callable[[VirtualProcess, Death], None] = lambda *_: None
        self._ends: dict[int, DaemonEnd] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._pidfds: dict[int, VirtualProcess] = {}
        self._children: dict[int, tuple[Pipe, Pipe]] = {}
        """Pipes of a process that is not forked yet, by the descriptors that it is to get."""
        self.fork_errors = 0
        """Number of forks that fail, from now on."""
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
            kill=self.killpg,
            pipe=self._pipe,
            waitpid=self._waitpid,
            waitstatus_to_exitcode=int,
            strerror=os.strerror,
            WNOHANG=os.WNOHANG,
        )

    @property
    def socket(self) -> Any:
        """The module `socket`, as `ForkServer` uses it."""
        return SimpleNamespace(
            socketpair=self._socketpair,
            send_fds=lambda channel, _, files: channel.fork(files),
            AF_UNIX=1,
            SOCK_STREAM=1,
        )

    def _socketpair(self, *_: int) -> tuple[DaemonEnd, ChildEnd]:
        inbox, outbox = Pipe(self), Pipe(self, self.capacity)
        child = ChildEnd(self, (inbox, outbox))
        self._children[child.fileno()] = child.pipes
        return DaemonEnd(self, outbox, inbox, "socket"), child

    def _pipe(self) -> tuple[int, int]:
        pipe = Pipe(self)
        end = DaemonEnd(self, pipe, None, "pipe")
        self._ends[end.number] = end
        number = self.open_descriptor("end of a child")
        self._children[number] = (pipe, pipe)
        return end.number, number

    def _waitpid(self, pid: int, options: int) -> tuple[int, int]:
        process = self.processes[pid]
        if process.exited is None:
            assert options, "the daemon would block"
            return 0, 0
        process.returncode = process.exited
        return pid, process.exited

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
            self._children.pop(number, None)
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

    def spawn(self, launch: Any) -> SpawnedProcess:
        if self.spawn_errors:
            self.spawn_errors -= 1
            self.deaths.append(Death(0, self.loop.time(), 1, "spawn"))
            raise BlockingIOError(11, "Resource temporarily unavailable")
        process = self._add_process()
        log = DaemonEnd(self, process.log, None, "pipe")
        self._ends[log.number] = log
        sock: Any
        if launch.command[-1:] == ("--forks",):
            process.is_server = True
            sock = ForkChannel(self, process)
        else:
            sock = DaemonEnd(self, process.outbox, process.inbox, "socket")
        self.loop.call_later(self.latency(), process.start)
        return SpawnedProcess(process, sock, log.number)

    def fork(self, server: VirtualProcess, channel: int, log: int) -> int | None:
        """Fork from a server: return the pid, an error number below zero, or None if the server has ended."""
        if server.exited is not None:
            return None
        if self.fork_errors:
            self.fork_errors -= 1
            return -11
        process = self._add_process()
        process.inbox, process.outbox = self._children.pop(channel)
        process.log, _ = self._children.pop(log)
        self.loop.call_later(self.latency(), process.start)
        return process.pid

    def _add_process(self) -> VirtualProcess:
        self._next_pid += 1
        process = self.processes[self._next_pid] = VirtualProcess(self, self._next_pid)
        return process

    @property
    def fork_servers(self) -> list[VirtualProcess]:
        return [each for each in self.processes.values() if each.is_server and each.exited is None]

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
