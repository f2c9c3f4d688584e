"""Simulated engine process: the real main loop and engine core, over a runner that computes a pure function.

Faults strike at numbered steps of a model, over all lives of its engine. `SimulatedEngine` checks the books
and the bounds of fairness after every step.
"""

import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.kv_cache.tiers import KVTiers
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
from .step_rules import BrokenRuleError, StepRules
from .streams import EngineSocket

MODEL_BYTES = 10_000
"""Memory that each model takes."""
WEIGHTS = 3
"""Quarters of it that the weights take, before the KV cache."""
POISON = 60
"""Token of prompts that bring the engine down; no model draws it."""
FOREVER = 1e9
LOAD_ALLOCATIONS = 6
"""Allocations of a load: memory may run out at each."""


@dataclass(slots=True, kw_only=True)
class ModelSetup:
    """One model: sizes of its engine, and its faults by the number of the step."""

    name: str
    sizes: dict[str, Any]
    """Arguments of `make_scheduler`, with `depth` and `stages`."""
    step_seconds: float = 0.01
    load_seconds: float = 1.0
    exit_seconds: float = 0.0
    """Time that its process takes to end when it is asked to, with all of its memory."""
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
        self.rules = StepRules(self, setup.sizes, depth)

    def step(self) -> StepOutputs:
        self.rules.begin()
        outputs = super().step()
        self.rules.end()
        return outputs


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
        code = engine_main._run(
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
    if process.engine is not None and (seconds := setups[process.name].exit_seconds):
        process.suspend(seconds, alone=True)
    return code


def _load(
    config: EngineConfig, send: Any, process: VirtualProcess, machine: Machine, setups: dict[str, ModelSetup]
) -> SimulatedEngine:
    setup = setups[config.name]
    process.name = setup.name
    setup.starts += 1
    share = config.memory_bytes or 0
    process.weights = WEIGHTS * share // 4
    _check_memory(machine)
    send(Progress(phase="weights", done=0, total=100))
    fault = setup.load_faults.get(setup.starts, "")
    for number in range(1, LOAD_ALLOCATIONS + 1):
        process.compute(setup.load_seconds / LOAD_ALLOCATIONS * machine.slowness)
        if number == setup.load_faults_at:
            _fail_load(process, fault)
    send(Progress(phase="weights", done=100, total=100))
    until = machine.loop.time() + EXIT_SECONDS
    leaving = [machine.processes[pid] for pid in config.memory_after]
    while machine.loop.time() < until and any(each.exited is None for each in leaving):
        process.suspend(0.01, alone=True)
    process.memory = share
    _check_memory(machine)
    process.engine = SimulatedEngine(setup, config, process, machine)
    return process.engine


def _check_memory(machine: Machine) -> None:
    """Whole engines fit into the memory for models; with those that load, into what is free beside it too."""
    living = [each for each in machine.processes.values() if each.exited is None]
    held = {each.pid: (each.weights, each.memory) for each in living}
    whole = sum(memory for _, memory in held.values())
    if whole > machine.memory or sum(map(max, held.values())) > machine.memory + machine.available:
        raise BrokenRuleError(f"engines hold {held} of {machine.memory} bytes, {machine.available} are free")


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
