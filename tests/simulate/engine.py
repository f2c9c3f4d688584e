"""Simulated engine process: the real main loop and engine core, over a runner that computes a pure function.

Faults strike at numbered steps of a model, over all lives of its engine. `SimulatedEngine` checks the books
and the bounds of fairness after every step.
"""

import signal
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.kv_cache.manager import MAX_PREEMPTIONS
from llmbox.engine.core.kv_cache.tiers import KVTiers
from llmbox.engine.core.request import Request
from llmbox.engine.core.request_queue import band_of
from llmbox.engine.core.step import StepPlan, StepResult, SyncExecutor
from llmbox.engine.errors import DoesNotFit
from llmbox.engine.hardware.proc import EXIT_SECONDS
from llmbox.engine.ipc.channel import Channel, DaemonGone
from llmbox.engine.ipc.messages import ModelInfo, Progress, StepOutputs
from llmbox.engine.kv_store.folder import FORMAT, KVFolder
from llmbox.engine.kv_store.store import BlockStore
from llmbox.engine.process import engine_main
from support.fake_runner import FakeOverlappingRunner, FakeRunner, RunnerError
from support.kv_tiers import MODEL, FakeBlockMemory
from support.scheduling import INFO, make_scheduler

from .machine import Machine, VirtualProcess
from .streams import EngineSocket

MODEL_BYTES = 10_000
"""Memory that each model takes."""
POISON = 60
"""Token of prompts that bring the engine down; no model draws it."""
FOREVER = 1e9
LOAD_ALLOCATIONS = 6
"""Allocations of a load: memory may run out at each."""


class BrokenRuleError(AssertionError):
    """Pass rule that does not hold."""


@dataclass(slots=True, kw_only=True)
class ModelSetup:
    """One model: sizes of its engine, and its faults by the number of the step."""

    name: str
    sizes: dict[str, Any]
    """Arguments of `make_scheduler`, with `depth` and `stages`."""
    step_seconds: float = 0.01
    load_seconds: float = 1.0
    step_faults: dict[int, str] = field(default_factory=dict)
    load_faults: dict[int, str] = field(default_factory=dict)
    """By the number of the start."""
    load_faults_at: int = 1
    """Number of the allocation of a load at which they strike."""
    has_tiers: bool = False
    """Its KV cache has a tier on disk, which outlives its engine."""
    poison: str = "raise"
    poison_after: int = 0
    outbox_limit: int = 8 << 20
    steps: int = 0
    client_steps: int = 0
    """Steps up to the end of the faults."""
    starts: int = 0

    @property
    def most_tokens(self) -> int:
        """Tokens that one request may have."""
        return min(self.sizes["context"], self.sizes["num_blocks"] * self.sizes["block_size"])

    @property
    def info(self) -> ModelInfo:
        sizes = self.sizes
        return replace(
            INFO,
            name=self.name,
            context_window=sizes["context"],
            block_size=sizes["block_size"],
            num_blocks=sizes["num_blocks"],
            max_running=sizes["max_running"],
            weights_bytes=MODEL_BYTES,
        )


class StepFaults:
    """Mixin of a runner: takes time, and misbehaves as the seed says."""

    setup: ModelSetup
    process: VirtualProcess
    machine: Machine

    def execute(self, plan: StepPlan) -> StepResult:
        setup, process, machine = self.setup, self.process, self.machine
        setup.steps += 1
        process.engine.rules.check_plan(plan)
        fault = setup.step_faults.get(setup.steps, "")
        if machine.has_poison and any(
            POISON in r.request.prompt_ids and r.request.num_output >= setup.poison_after for r in plan.rows
        ):
            fault = f"poison {setup.poison}"
        seconds = setup.step_seconds * (1 + 0.05 * plan.num_tokens) * (0.5 + machine.chance.random())
        process.compute(seconds * machine.slowness)
        self._misbehave(fault.removeprefix("poison "), fault, plan)
        result = super().execute(plan)  # type: ignore[misc]
        self.poisoned: set[str] = set()
        self.plans.clear()  # type: ignore[attr-defined]
        return result

    def _misbehave(self, kind: str, fault: str, plan: StepPlan) -> None:
        process = self.process
        if kind in {"raise", "memory", "inside", "after", "collect"}:
            process.cause, process.said = fault, "exited with code 70"
        if kind == "raise":
            raise RunnerError("told to fail")
        if kind == "memory":
            raise MemoryError("an allocation failed")
        if kind == "inside":
            self._compute_part(plan, self.machine.chance.randrange(plan.num_tokens))
            raise MemoryError("an allocation inside a layer failed")
        if kind == "after":
            self.crash_next = True
        if kind == "collect":
            self.crash_next_collect = True
        if kind == "segv":
            process.die(signal.SIGSEGV, fault, "killed by SIGSEGV")
        if kind == "oom":
            self.machine.oom_kills += 1
            process.die(signal.SIGKILL, fault, "out of memory")
        if kind == "kill":
            process.die(signal.SIGKILL, fault, "killed by SIGKILL")
        if kind in {"hang", "spin"}:
            process.cause, process.said = fault, "no answer for"
            process.compute(FOREVER, "S" if kind == "hang" else "R")
        if kind == "slow":
            process.compute(20.0 + 40 * self.machine.chance.random())
        if kind == "garble":
            process.cause = process.cause or fault
            process.outbox.garbles_next = True
        if kind == "nan":
            self.poisoned = {row.request.request_id for row in plan.rows[:1]}

    def _compute_part(self, plan: StepPlan, tokens: int) -> None:
        """Write the KV of so many tokens, as a step does that fails between two writes."""
        self._copy(plan.copies)  # type: ignore[attr-defined]
        for row in plan.rows:
            count = min(tokens, row.num_tokens)
            for position in range(row.start, row.start + count):
                self.slots[self._slot(row.request, position)] = -position  # type: ignore[attr-defined]
            tokens -= count


class SimulatedRunner(StepFaults, FakeRunner):
    """Runner of one step at a time."""


class SimulatedOverlappingRunner(StepFaults, FakeOverlappingRunner):
    """Runner with steps in flight."""


class SimulatedEngine(Engine):
    """Engine that checks itself after every step."""

    def __init__(
        self, setup: ModelSetup, config: EngineConfig, process: VirtualProcess, machine: Machine
    ) -> None:
        sizes = dict(setup.sizes)
        context = -(-sizes["context"] // sizes["block_size"])
        sizes["num_blocks"] = config.shrink_pool(sizes["num_blocks"], context)
        depth, stages = sizes.pop("depth", 0), sizes.pop("stages", 1)
        kinds = sizes.get("state_slots", 0), sizes.get("window", 0), sizes.get("window_blocks", 0)
        place = sizes["num_blocks"], sizes["block_size"]
        clock = machine.loop.time
        scheduler = make_scheduler(clock=clock, **sizes)
        runner: Any
        if depth:
            runner = driven = SimulatedOverlappingRunner(*place, depth, stages, *kinds)
        else:
            runner = SimulatedRunner(*place, *kinds)
            driven = SyncExecutor(runner)
        runner.setup, runner.process, runner.machine = setup, process, machine
        if setup.has_tiers:
            store = BlockStore(
                open_kv_folder(machine.folder / setup.name), MODEL, {"origins": []}, clock=clock
            )
            memory = FakeBlockMemory(runner)
            scheduler.kv_cache.tiers = KVTiers(store, memory, scheduler.kv_cache, clock)
        super().__init__(scheduler, driven, setup.info, clock)
        self.rules = StepRules(self, setup, depth)

    def step(self) -> StepOutputs:
        self.rules.begin()
        outputs = super().step()
        self.rules.end()
        return outputs


class StepRules:
    """Rules of one engine that hold after every step.

    Books: every block is in one state, every request in one queue. Bounds: rows, tokens and requests of a
    step; in a calling order within a flow; a stream waits for one express step at most; a request is
    preempted four times at most for lack of blocks; two callers of a band who both wait get the same number
    of tokens, but for the requests that run at once; and all requests end within a number of steps.
    """

    def __init__(self, engine: SimulatedEngine, setup: ModelSetup, depth: int) -> None:
        self._engine, self._sizes = engine, setup.sizes
        self._is_plain = not depth and setup.sizes.get("batching", "continuous") == "continuous"
        self._streams: dict[str, tuple[int, int]] = {}
        """Output tokens and admissions of each stream before the step."""
        self._missed: Counter[str] = Counter()
        self._waited: dict[str, Request] = {}
        self._computed: dict[str, int] = {}
        self._service: Counter[tuple[int, str]] = Counter()
        self._backlog: dict[tuple[int, str], dict[tuple[int, str], int]] = {}
        self._owed = 0
        self._steps = 0
        self._seen: set[str] = set()
        self._longest = 0

    def begin(self) -> None:
        scheduler = self._engine.scheduler
        self._streams = {
            r.request_id: (r.num_output, r.admissions)
            for r in scheduler.running
            if r.num_remaining == 1 and not r.num_pending
        }
        self._waited = {name: r for name, r in scheduler._waiting._present.items() if r.scheduled_at is None}
        for name, request in scheduler._requests.items():
            if name not in self._seen:
                self._seen.add(name)
                size = request.num_tokens + request.params.max_tokens
                self._longest = max(self._longest, size)
                self._owed += 12 * size + 20

    def end(self) -> None:
        scheduler, sizes = self._engine.scheduler, self._sizes
        self._steps += 1
        if self._steps > self._owed + 100:
            raise BrokenRuleError(f"{self._steps} steps for work of {self._owed}: requests do not end")
        if self._steps % 4 == 0 or not scheduler.has_work:
            scheduler.check()
        if scheduler.num_running > sizes["max_running"]:
            raise BrokenRuleError(f"{scheduler.num_running} run, allowed are {sizes['max_running']}")
        for request in scheduler._requests.values():
            if request.preemptions > MAX_PREEMPTIONS:
                raise BrokenRuleError(f"{request.request_id} was preempted {request.preemptions} times")
        self._check_order()
        if self._is_plain:
            self._check_streams()
            self._check_shares()
        if not scheduler.has_work and not self._engine._launched and scheduler.pool.num_used:
            raise BrokenRuleError(f"{scheduler.pool.num_used} blocks are leaked")

    def check_plan(self, plan: StepPlan) -> None:
        """A step computes no more tokens than its budget; admission leaves blocks free for those that run."""
        sizes, scheduler = self._sizes, self._engine.scheduler
        self._count_service(plan)
        if sizes.get("batching", "continuous") == "static":
            return
        tokens = sum(row.num_tokens - len(row.drafts) for row in plan.rows)
        budget = -(-sizes["token_budget"] // sizes.get("stages", 1))
        if tokens > budget and sizes.get("chunked_prefill", True):
            raise BrokenRuleError(f"{tokens} tokens in a step, allowed are {budget}")
        admitted = [r for r in self._waited.values() if r.request_id in scheduler._running]
        pool = scheduler.pool
        free = int(sizes.get("watermark", 0.0) * pool.num_blocks)
        for row in plan.rows:  # drafts come after the admissions, and may take what these left
            free -= pool.blocks_for(row.end) - pool.blocks_for(row.end - len(row.drafts))
        if len(scheduler._running) > len(admitted) > 0 and pool.num_available < free:
            raise BrokenRuleError(f"admission left {pool.num_available} blocks, the watermark is {free}")

    def _count_service(self, plan: StepPlan) -> None:
        """Count the tokens of each flow, once: not those that are computed again after a preemption."""
        for row in plan.rows:
            request, end = row.request, row.end - len(row.drafts)
            done = self._computed.get(request.request_id, row.start)
            self._service[band_of(request), request.tenant] += max(0, end - done)
            self._computed[request.request_id] = max(done, end)

    def _check_order(self) -> None:
        """First admissions of a flow are in the order of arrival."""
        scheduler = self._engine.scheduler
        admitted = [r for r in self._waited.values() if r.scheduled_at is not None]
        for request in admitted:
            for other in self._waited.values():
                same = (other.tenant, band_of(other)) == (request.tenant, band_of(request))
                if (
                    same
                    and other.arrived_at < request.arrived_at
                    and other.scheduled_at is None
                    and other.request_id in scheduler._requests
                    and other.request_id not in scheduler._waiting._standing_aside
                    and other.fork_of is None
                ):
                    raise BrokenRuleError(f"{request.request_id} was admitted before {other.request_id}")

    def _check_streams(self) -> None:
        """A stream that runs gets a token in every step, or in the one after it, unless it was preempted: it
        may be admitted again in the same step, with a part of its history to compute.
        """
        running = {r.request_id: r for r in self._engine.scheduler.running}
        for name, (output, admissions) in self._streams.items():
            request = running.get(name)
            if request is None or request.num_output > output or request.admissions > admissions:
                self._missed.pop(name, None)
                continue
            self._missed[name] += 1
            if self._missed[name] > 1:
                raise BrokenRuleError(f"the stream {name} got no token in {self._missed[name]} steps")

    def _check_shares(self) -> None:
        """Tokens of two flows of a band, since both wait."""
        scheduler = self._engine.scheduler
        waiting = {
            (flow.band, flow.tenant) for _, flows in scheduler._flows.bands for flow in flows if flow.queued
        }
        for flow in [flow for flow in self._backlog if flow not in waiting]:
            del self._backlog[flow]
        # Both may run their longest requests at once, and one step is shared as it comes.
        bound = 2 * (self._sizes["max_running"] * self._longest + self._sizes["token_budget"])
        for flow in sorted(waiting):
            since = self._backlog.setdefault(flow, {})
            for other in sorted(waiting):
                if other[0] != flow[0] or other == flow:
                    continue
                lead = self._service[flow] - self._service[other]
                if lead - since.setdefault(other, lead) > bound:
                    raise BrokenRuleError(f"{flow} is ahead of {other} by more than {bound} tokens")
            for gone in [other for other in since if other not in waiting]:
                del since[gone]


def open_kv_folder(root: Path) -> KVFolder:
    """Open the folder of a model's blocks. Its secret is no random one, so that a seed repeats a run."""
    root.mkdir(mode=0o700, exist_ok=True)
    if not (root / "secret").exists():
        (root / "format").write_text(f"{FORMAT}\n")
        (root / "secret").write_bytes(bytes(64))
    folder = KVFolder(root, 1 << 30)
    folder.open()
    return folder


def run_engine(process: VirtualProcess, machine: Machine, setups: dict[str, ModelSetup]) -> int:
    """Run the engine's main loop in a virtual process; return its exit code."""
    limit = min((each.outbox_limit for each in setups.values()), default=8 << 20)
    sock: Any = EngineSocket(process.inbox, process.outbox)
    try:
        return engine_main._run(
            Channel(sock, limit), lambda config, send: _load(config, send, process, machine, setups)
        )
    except DaemonGone:
        return engine_main.EXIT_OK
    except BrokenRuleError:
        raise
    except AssertionError as error:
        raise BrokenRuleError(f"the engine's own checks: {error!r}") from error
    except Exception as error:
        if not process.cause:
            raise BrokenRuleError(f"the engine raised without a fault: {error!r}") from error
        process.print(f"{type(error).__name__}: {error}")
        return engine_main.EXIT_CRASHED


def _load(
    config: EngineConfig, send: Any, process: VirtualProcess, machine: Machine, setups: dict[str, ModelSetup]
) -> SimulatedEngine:
    setup = setups[config.name]
    process.name = setup.name
    setup.starts += 1
    _take_memory(config, process, machine)
    send(Progress(phase="weights", done=0, total=100))
    fault = setup.load_faults.get(setup.starts, "")
    for number in range(1, LOAD_ALLOCATIONS + 1):
        process.compute(setup.load_seconds / LOAD_ALLOCATIONS * machine.slowness)
        if number == setup.load_faults_at:
            _fail_load(process, fault)
    send(Progress(phase="weights", done=100, total=100))
    process.engine = SimulatedEngine(setup, config, process, machine)
    return process.engine


def _take_memory(config: EngineConfig, process: VirtualProcess, machine: Machine) -> None:
    """Take the model's share, after the processes that hold it have ended; all shares fit into the budget."""
    until = machine.loop.time() + EXIT_SECONDS
    leaving = [machine.processes[pid] for pid in config.memory_after]
    while machine.loop.time() < until and any(each.exited is None for each in leaving):
        process.suspend(0.01, alone=True)
    process.memory = config.memory_bytes or 0
    held = {each.name: each.memory for each in machine.processes.values() if each.exited is None}
    if sum(held.values()) > machine.memory:
        raise BrokenRuleError(f"engines hold {held} of {machine.memory} bytes")


def _fail_load(process: VirtualProcess, fault: str) -> None:
    match fault:
        case "fit":
            process.cause = "load fit"
            raise DoesNotFit("the weights do not fit any more")
        case "raise":
            process.cause, process.said = "load raise", "exited with code 70"
            raise RunnerError("told to fail while loading")
        case "memory":
            process.cause, process.said = "load memory", "exited with code 70"
            raise MemoryError("an allocation of the load failed")
        case "kill":
            process.die(signal.SIGKILL, "load kill", "killed by SIGKILL")
        case "hang":
            process.cause, process.said = "load hang", "no progress for"
            process.compute(FOREVER, "S")
