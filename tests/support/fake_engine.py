"""An engine process without torch: the real `process.main` around an engine that hashes.

The token after a prefix is a hash of that prefix (and of the seed, unless greedy), so that any test can work
out what an undisturbed stream must be: `expected_tokens`. A hash is never a stop token, so no answer is empty
or short by chance; `script` ends one. Options are read from the JSON file that
`EngineConfig.model_path` names, or from `fake_engine.json` in that directory; see `write_model`.
"""

import hashlib
import os
import signal
import struct
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.step import ProfiledRunner
from llmbox.engine.errors import DoesNotFit, EngineError, ModelError, RankLost
from llmbox.engine.ipc.messages import (
    AddRequest,
    EngineStats,
    ModelInfo,
    Progress,
    RequestOutput,
    StepOutputs,
    StepWork,
    TokenLogprobs,
    Vocabulary,
)
from llmbox.engine.ipc.profile_messages import BlockHolder, BlockMap, BlockRun
from llmbox.engine.ipc.sequence_times import SequenceTimes
from llmbox.engine.ipc.spawn import Launch
from llmbox.engine.process.engine_main import main
from llmbox.engine.sampling_params import SamplingParams

OPTIONS_FILE = "fake_engine.json"
GO_FILE = "go"


class FakeOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    vocab_size: int = 256
    """Ids that it draws from..."""
    declared_vocab: int = 0
    """...and those that it says it knows, where these are more: its tokenizer's special tokens, say."""
    context: int = 4096
    max_running: int = 64
    num_blocks: int = 100_000
    host_bytes: int = 0
    """Main memory that it says it takes beside a GPU."""
    prefill_per_step: int = 512
    """Prompt (or resumed) tokens that one request computes in a step."""
    script: list[int] | None = None
    """Output these tokens instead of hashes, then the first stop id (or to the end of max_tokens, cyclic)."""
    replies: list[tuple[list[int], list[int]]] = []
    """(tokens, script): the first whose tokens stand in the prompt is output instead of `script`."""
    pooling: Literal["last", "mean", "cls"] = "mean"
    pooling_problem: str = ""
    generates: bool = True
    image_problem: str = "it has no vision tower"
    step_delay: float = 0.0
    step_seconds: float = 0.0
    """Time that it says a step took; 0 means that it says nothing of its steps."""
    hold_at: int | None = None
    """A request with this many output tokens gets no more until the model's folder holds the file `go`: for
    tests that look at something under way, however long they are kept from the processor."""
    load_delay: float = 0.0
    load_spin: float = 0.0
    """Processor seconds that it burns while it loads."""
    load_error: tuple[str, str] | None = None
    """(`bad_model` or `does_not_fit`, message)."""
    pair_error: tuple[str, str] | None = None
    """The same, of a pair of engines (`--disaggregate`) alone."""
    load_crash: bool = False
    die_after_steps: int | None = None
    """In every incarnation."""
    hang_after_steps: int | None = None
    fail: str = ""
    """Every request ends with this error of the engine."""
    poison: int | None = None
    """A request whose tokens hold this id brings the engine down when it is computed..."""
    poison_after: int = 0
    """...with this many output tokens."""
    poison_kind: str = "exception"
    """`exception`, `segv`, `sleep` (a dead hang) or `spin` (a hang that burns CPU)."""


def write_model(directory: Path, **options: Any) -> Path:
    """A model directory for the fake engine. Other files (tokenizer) may stand beside."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / OPTIONS_FILE).write_bytes(msgspec.json.encode(FakeOptions(**options)))
    return directory


def fake_launch(**env: str) -> Launch:
    """For EngineManager and Supervisor: spawn this file instead of the real engine."""
    return Launch(command=(sys.executable, "-P", __file__), env=env)


def read_options(model_path: str) -> FakeOptions:
    path = Path(model_path)
    file = path / OPTIONS_FILE if path.is_dir() else path
    if not file.exists():
        return FakeOptions(declared_vocab=4096)  # more than any tokenizer that stands beside it
    return msgspec.json.decode(file.read_bytes(), type=FakeOptions)


def _contains(tokens: Sequence[int], mark: Sequence[int]) -> bool:
    packed, wanted = (",".join(map(str, ids)) for ids in (tokens, mark))
    return f",{wanted}," in f",{packed},"


class Sequence_:  # noqa: N801 - typing's name is taken
    """One request. The hash runs along: a new token costs the same at any length."""

    def __init__(self, message: AddRequest, options: FakeOptions) -> None:
        self.message = message
        self.params = message.params
        self.options = options
        self.output = list(message.output_ids)
        self.to_compute = len(message.prompt_ids) + len(message.output_ids)
        self.scheduled_at: float | None = None
        self.told_first = False
        seed = 0 if self.params.temperature == 0 else self.params.seed
        self._script = next(
            (script for mark, script in options.replies if _contains(message.prompt_ids, mark)),
            options.script,
        )
        self._hash = zlib.crc32(str(seed).encode())
        self._extend([*message.prompt_ids, *self.output])

    @property
    def length(self) -> int:
        return len(self.message.prompt_ids) + len(self.output)

    def next_token(self) -> int:
        if self._script is not None:
            token = self._scripted(self._script)
        else:
            token = self._hash % self.options.vocab_size
            while token in self.params.stop_token_ids:
                token = (token + 1) % self.options.vocab_size
        self.output.append(token)
        self._extend([token])
        return token

    def _scripted(self, script: list[int]) -> int:
        position = len(self.output)
        if position >= len(script) and self.params.stop_token_ids:
            return self.params.stop_token_ids[0]
        return script[position % len(script)]

    def finish_reason(self) -> str | None:
        stops = self.output[-1] in self.params.stop_token_ids
        if stops and len(self.output) > self.params.min_tokens:
            return "stop"
        return "length" if len(self.output) >= self.params.max_tokens else None

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._hash = zlib.crc32(token.to_bytes(4, "little"), self._hash)


def expected_tokens(
    prompt_ids: Sequence[int], params: SamplingParams, options: FakeOptions | None = None
) -> list[int]:
    """The undisturbed output."""
    message = AddRequest(request_id="expected", prompt_ids=list(prompt_ids), params=params)
    sequence = Sequence_(message, options or FakeOptions())
    sequence.next_token()
    while sequence.finish_reason() is None:
        sequence.next_token()
    return sequence.output


def fake_vector(prompt_ids: Sequence[int]) -> bytes:
    """Of 8 numbers, which depend on all ids and their order."""
    digest = hashlib.sha256(repr(list(prompt_ids)).encode()).digest()
    return struct.pack("<8f", *(byte - 127.5 for byte in digest[:8]))


class NoParts:
    """Scheduler and executor as a profile times them: the fake engine's step is one function."""

    def schedule(self) -> None: ...

    def update(self) -> None: ...

    def launch(self) -> None: ...

    def collect(self) -> None: ...

    def forward(self) -> None: ...

    def profiled(self) -> ProfiledRunner:
        return ProfiledRunner(ops=SimpleNamespace(profiler=None), forward=self.forward)


class FakeEngine:
    def __init__(self, config: EngineConfig, options: FakeOptions) -> None:
        self._options = options
        self._go = Path(config.model_path) / GO_FILE
        self._block_size = config.block_size
        self._max_running = config.max_running or options.max_running
        self._waiting: dict[str, Sequence_] = {}
        self._running: dict[str, Sequence_] = {}
        self._steps = self._prompt_tokens = self._output_tokens = 0
        self._work = StepWork()
        self.info = _info(config, options, self._max_running)
        self.scheduler = self.executor = NoParts()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def add(self, message: AddRequest) -> RequestOutput | None:
        if self._options.fail:
            return RequestOutput(
                request_id=message.request_id,
                finish_reason="error",
                error_code="engine_error",
                error_message=self._options.fail,
            )
        needed = len(message.prompt_ids) + message.params.max_tokens
        if needed > self.info.context_window:
            return RequestOutput(
                request_id=message.request_id,
                finish_reason="error",
                error_code="does_not_fit",
                error_message=f"{needed} tokens do not fit a context of {self.info.context_window}",
            )
        self._waiting[message.request_id] = Sequence_(message, self._options)
        return None

    def abort(self, request_id: str) -> RequestOutput | None:
        found = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        return found and RequestOutput(request_id=request_id, finish_reason="abort")

    def step(self) -> StepOutputs:
        while self._waiting and len(self._running) < self._max_running:
            request_id = next(iter(self._waiting))
            self._running[request_id] = self._waiting.pop(request_id)
        self._misbehave()
        time.sleep(self._options.step_delay)
        self._steps += 1
        held = self._held()
        if held == self._running.keys():
            time.sleep(0.02)
        free = [s for name, s in self._running.items() if name not in held]
        before = self._prompt_tokens
        rows = sum(not s.to_compute for s in free)
        outputs = [output for s in free if (output := self._advance(s))]
        if free and self._options.step_seconds:
            self._count(rows, self._prompt_tokens - before)
        return StepOutputs(outputs=outputs, stats=self.stats())

    def _count(self, rows: int, prompts: int) -> None:
        """As if each step took `step_seconds`."""
        work, seconds = self._work, self._options.step_seconds
        self._work = StepWork(
            steps=work.steps + 1,
            seconds=work.seconds + seconds,
            decode_rows=work.decode_rows + rows,
            prefill_steps=work.prefill_steps + bool(prompts),
            prefill_seconds=work.prefill_seconds + seconds * bool(prompts),
            prefill_tokens=work.prefill_tokens + prompts,
        )

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        return

    def _held(self) -> set[str]:
        limit = self._options.hold_at
        held = {name for name, s in self._running.items() if limit is not None and len(s.output) >= limit}
        return set() if held and self._go.exists() else held

    def take_times(self) -> dict[str, SequenceTimes]:
        return {}

    def stats(self) -> EngineStats:
        used = sum(-(-s.length // self._block_size) for s in self._running.values())
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            blocks_total=self._options.num_blocks,
            blocks_used=used,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            slots_used=sum(s.length for s in self._running.values()),
            work=self._work,
        )

    def blocks(self) -> BlockMap:
        """The running ones from the first block on, everything else free."""
        used = [-(-s.length // self._block_size) for s in self._running.values()]
        runs = [BlockRun(count=n, state="live", owner=i, holders=1) for i, n in enumerate(used)]
        rest = self._options.num_blocks - sum(used)
        return BlockMap(
            block_size=self._block_size,
            num_blocks=self._options.num_blocks,
            runs=[*runs, BlockRun(count=rest, state="free", owner=-1, holders=0)],
            owners=list(self._running),
            holders=[
                BlockHolder(request_id=name, blocks=n, shared=0)
                for name, n in zip(self._running, used, strict=True)
            ],
            prefixes=[],
            evictions=0,
        )

    def _advance(self, sequence: Sequence_) -> RequestOutput | None:
        if sequence.scheduled_at is None:
            sequence.scheduled_at = time.monotonic()
        computed = min(sequence.to_compute, self._options.prefill_per_step)
        sequence.to_compute -= computed
        self._prompt_tokens += computed
        if sequence.to_compute:
            return None
        if sequence.params.pooling is not None:
            del self._running[sequence.message.request_id]
            vector = fake_vector(sequence.message.prompt_ids)
            output = RequestOutput(
                request_id=sequence.message.request_id, finish_reason="stop", vector=vector
            )
            return self._first(sequence, output)
        token = sequence.next_token()
        self._output_tokens += 1
        reason = sequence.finish_reason()
        output = RequestOutput(
            request_id=sequence.message.request_id,
            token_ids=[token],
            logprobs=_logprobs(token, sequence.params.logprobs, self._options.vocab_size),
            finish_reason=reason,
            stop_token_id=token if reason == "stop" else None,
        )
        if not sequence.told_first:
            sequence.told_first = True
            output = self._first(sequence, output)
        if reason is not None:
            del self._running[sequence.message.request_id]
        return output

    def _first(self, sequence: Sequence_, output: RequestOutput) -> RequestOutput:
        wanted = sequence.params.prompt_logprobs
        prompt: list[TokenLogprobs | None] | None = None
        if wanted is not None:
            rest = sequence.message.prompt_ids[1:]
            prompt = [None, *((_logprobs(t, wanted, self._options.vocab_size) or [None])[0] for t in rest)]
        return replace(output, cached_tokens=0, scheduled_at=sequence.scheduled_at, prompt_logprobs=prompt)

    def _misbehave(self) -> None:
        options = self._options
        if options.die_after_steps is not None and self._steps >= options.die_after_steps:
            raise RuntimeError(f"told to die after {options.die_after_steps} steps")
        if options.hang_after_steps is not None and self._steps >= options.hang_after_steps:
            time.sleep(3600)
        if options.poison is None:
            return
        for s in self._running.values():
            if options.poison in s.message.prompt_ids and len(s.output) >= options.poison_after:
                _collapse(options.poison_kind)


def _collapse(kind: str) -> None:
    match kind:
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "sleep":
            time.sleep(3600)
        case "spin":
            while True:
                pass
        case _:
            raise RuntimeError("poisoned")


def _logprobs(token: int, alternatives: int | None, vocab_size: int) -> list[TokenLogprobs] | None:
    if alternatives is None:
        return None
    top = [((token + i) % vocab_size, -0.5 - i) for i in range(alternatives)]
    return [TokenLogprobs(token_id=token, logprob=-0.5, rank=1, top=top)]


def _info(config: EngineConfig, options: FakeOptions, max_running: int) -> ModelInfo:
    context = min(config.context or options.context, options.context)
    return ModelInfo(
        name=config.name,
        architecture="fake",
        device="cpu" if config.gpus is None else "cuda",
        gpus=config.gpus or (),
        dtype="float32",
        kv_dtype="float32",
        backend="fake",
        context_window=context,
        vocab_size=max(options.vocab_size, options.declared_vocab),
        block_size=config.block_size,
        num_blocks=config.shrink_pool(options.num_blocks, -(-context // config.block_size)),
        weights_bytes=1000,
        kv_bytes=options.num_blocks * config.block_size,
        kv_bytes_per_token=1,
        workspace_bytes=0,
        host_bytes=options.host_bytes,
        max_running=max_running,
        max_concurrency=options.num_blocks * config.block_size / context,
        load_seconds=options.load_delay,
        tp=config.tp or 1,
        pp=config.pp or 1,
        expert_parallel=config.expert_parallel,
        redundant_experts=config.redundant_experts,
        disaggregate=config.disaggregate,
        hidden_size=8,
        pooling=options.pooling,
        pooling_problem=options.pooling_problem,
        generates=options.generates,
        image_problem=options.image_problem,
        notes=("every layer shared, as asked",) if config.tp else (),
    )


def load_fake(config: EngineConfig, progress: Callable[[Progress], None]) -> FakeEngine:
    options = read_options(config.model_path)
    for done in (0, 500, 1000):
        progress(Progress(phase="weights", done=done, total=1000))
        time.sleep(options.load_delay / 3)
        end = time.process_time() + options.load_spin / 3
        while time.process_time() < end:
            pass
    if options.load_crash:
        raise RuntimeError("told to crash while loading")
    error = options.load_error or (options.pair_error if config.disaggregate else None)
    if error is not None:
        raise _load_error(*error)
    return FakeEngine(config, options)


def _load_error(code: str, message: str) -> EngineError:
    kinds: tuple[type[EngineError], ...] = (ModelError, DoesNotFit, RankLost)
    return next(kind for kind in kinds if kind.code == code)(message)


if __name__ == "__main__":
    sys.exit(main(load=load_fake))
