"""Is the engine right on this GPU at all? Tokens of the same requests from engines that must agree.

With --deterministic tokens are equal whatever else is in a step, so every difference is a failure. Without
it, and against a CPU, sums have another order: a token may be another one of nearly the same probability, and
what follows it is not compared.
"""

import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from gpu import apart, engine_speed
from gpu.report import Report
from gpu.shapes import SHAPES
from llmbox.engine.core.engine import Engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.runner.gpu_runner import GPUModelRunner
from llmbox.engine.sampling_params import SamplingParams

SHAPE = SHAPES["0.6B"] | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
SIZES = (1, 3, 8, 17)
"""Requests at once: graphs of their own size, and filled up."""
LENGTHS, STEPS = (1, 300), 40
"""Tokens of prompts, and of an answer: block tables grow."""
CONTEXT, RUNNING, BUDGET = 352, 32, 2048
CHUNK = 48
"""Tokens of a step where prompts are cut."""
POOL = 2 * CONTEXT
"""Tokens of all requests where some are preempted."""
BYTES = 3 << 30
"""Of the GPU, for each of the processes."""
SILENCE = 90.0
"""Seconds for an engine to load, kernels compiled, and to answer."""
SHOWN = 20
"""Most likely tokens that a near tie is looked for among."""
TIE = {"float32": 1e-3, "bfloat16": 0.1}
"""Difference of log-probabilities of tokens that may take each other's place."""
Load = Callable[..., Engine]


class Answer(NamedTuple):
    """Tokens, and for each its log-probability and those of the most likely ones."""

    tokens: list[int]
    chances: list[dict[int, float]]


Answers = dict[str, Answer]


def report_smoke(report: Report) -> None:
    report.section("Tokens of engines that must agree (random Qwen3 of 2 layers, and the built-in model)")
    make = apart.Make(pieces, (time.monotonic() + report.left,))
    apart.tell_lines(report, make, limit=SILENCE, processes=max(1, min(5, (os.cpu_count() or 1) // 2)))


def pieces(end: float) -> list[apart.Piece]:
    """Those that share no kernels, in processes of their own: most of the time is compiling."""
    both = ("bfloat16", "float32")
    found = [apart.Piece(f"deterministic {dtype}", partial(fixed, random_model, dtype)) for dtype in both]
    found += [apart.Piece(f"plain {dtype}", partial(plain, random_model, dtype)) for dtype in both]
    return [*found, apart.Piece("built-in model", partial(builtin, end))]


def random_model(**options: Any) -> Engine:
    """The same weights on every device."""
    spread = SHAPE["hidden_size"] ** -0.5
    weights = partial(engine_speed.random_weights, spread=spread, on_host=True)
    return engine_speed.engine(SHAPE, weights, **sizes(options))


def sizes(options: dict[str, Any]) -> dict[str, Any]:
    given = {"context": CONTEXT, "max_running": RUNNING, "token_budget": BUDGET}
    return given | {"memory_bytes": BYTES, "speculate": "off"} | options


def fixed(load: Load, dtype: str, say: apart.Say) -> None:
    """Bits do not depend on what else is computed: whatever differs is wrong."""
    load = partial(load, dtype=dtype, deterministic=True)
    batches = requests(None)
    engine = ready(load())
    expected = served(engine, batches)
    judge = partial(compare, say, f"deterministic {dtype}", expected)
    judge("alone", served(engine, [[one] for batch in batches for one in batch]))
    del engine
    without(judge, load, batches)
    judge("chunked", answers_of(partial(load, token_budget=CHUNK), batches))
    engine = ready(load(kv_tokens=POOL))
    judge("preempted", served(engine, batches))
    if not engine.stats().preemptions:
        Report(SILENCE, listener=say).failed(f"deterministic {dtype}: nothing was preempted")


def plain(load: Load, dtype: str, say: apart.Say) -> None:
    """The kernels that are used by default; in float32 also against a CPU's."""
    load = partial(load, dtype=dtype)
    batches = requests(SHOWN)
    expected = answers_of(load, batches)
    judge = partial(compare, say, f"plain {dtype}", expected, tie=TIE[dtype])
    without(judge, load, batches)
    if dtype == "float32":
        with mock.patch.dict(os.environ, LLMBOX_KERNELS="reference"):
            judge("on the CPU", served(load(device="cpu", threads=4), batches))


def without(judge: Callable[[str, Answers], None], load: Load, batches: list[list[AddRequest]]) -> None:
    judge("without graphs", answers_of(partial(load, cuda_graphs=False), batches))
    judge("without overlap", answers_of(partial(load, overlap=False, cuda_graphs=True), batches))


def answers_of(load: Load, batches: list[list[AddRequest]]) -> Answers:
    found = served(ready(load()), batches)
    gc.collect()  # the next engine needs its memory
    torch.cuda.empty_cache()
    return found


def ready(engine: Engine) -> Engine:
    """With all graphs that it may have."""
    while engine.prepare():
        pass
    return engine


def requests(logprobs: int | None, vocab: int | None = None) -> list[list[AddRequest]]:
    """Batches of them; every second one is drawn with a seed."""
    numbers, vocab = random.Random(7), vocab or SHAPE["vocab_size"]
    batches = []
    for size in SIZES:
        batch = []
        for place in range(size):
            ids = [numbers.randrange(3, vocab) for _ in range(numbers.randint(*LENGTHS))]
            drawn = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": numbers.randrange(1 << 30)}
            params = SamplingParams(
                max_tokens=STEPS, logprobs=logprobs, **(drawn if place % 2 else {"temperature": 0.0})
            )
            name = f"{place + 1} of {size}, {'drawn' if place % 2 else 'greedy'}"
            batch.append(AddRequest(request_id=name, prompt_ids=ids, params=params))
        batches.append(batch)
    return batches


def served(engine: Engine, batches: Sequence[Sequence[AddRequest]]) -> Answers:
    """A batch after the other. No launch may wait for the GPU."""
    found: Answers = {}
    with no_synchronization():
        for batch in batches:
            for request in batch:
                found[request.request_id] = Answer([], [])
                refused = engine.add(request)
                assert refused is None, refused
            while engine.has_work:
                for output in engine.step().outputs:
                    assert output.finish_reason in {None, "length"}, output
                    answer = found[output.request_id]
                    answer.tokens.extend(output.token_ids)
                    answer.chances.extend(
                        dict(each.top) | {each.token_id: each.logprob} for each in output.logprobs or ()
                    )
    return found


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Launches in which PyTorch refuses to wait for the GPU."""
    launch = GPUModelRunner.launch_sized

    def launch_sized(self: GPUModelRunner, *args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with mock.patch.object(GPUModelRunner, "launch_sized", launch_sized):
        yield


def compare(
    say: apart.Say, piece: str, expected: Answers, variant: str, found: Answers, *, tie: float = 0.0
) -> None:
    """Tell how many are equal; each that differs in more than a near tie is a failure."""
    report, equal, ties = Report(SILENCE, listener=say), 0, 0
    for name, answer in expected.items():
        place = first_difference(answer.tokens, found[name].tokens)
        if place is None:
            equal += 1
        elif is_near_tie(answer, found[name], place, tie):
            ties += 1
        else:
            got, want = (each.tokens[place : place + 1] for each in (found[name], answer))
            report.failed(f"{piece}, {variant}: request {name}, token {place}: {got}, not {want}")
    after = f", {ties} more up to a near tie" if ties else ""
    report.say(f"- {piece}, {variant}: tokens of {equal} of {len(expected)} requests are equal{after}")


def first_difference(one: list[int], other: list[int]) -> int | None:
    """None: they are equal."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def is_near_tie(expected: Answer, found: Answer, place: int, tie: float) -> bool:
    if not tie or place >= min(len(found.tokens), len(expected.chances)):
        return False
    chances = expected.chances[place]
    other = chances.get(found.tokens[place])
    return other is not None and abs(other - chances[expected.tokens[place]]) < tie


def builtin(end: float, say: apart.Say) -> None:
    """Real weights: tokens with --deterministic, perplexity as on a CPU, and answers that are right."""
    report = Report(end - time.monotonic(), listener=say)
    try:
        from gpu import quality
    except (ImportError, OSError) as error:
        report.say(f"- built-in model: left out: {error}")
        return
    if not quality.is_here():
        report.say("- built-in model: left out: its files are not there")
        return
    load = partial(quality.load_builtin, memory_bytes=BYTES, speculate="off")
    batches = requests(None, quality.tokenizer().get_vocab_size())
    expected = answers_of(partial(load, deterministic=True), batches)
    judge = partial(compare, say, "built-in model", expected)
    without(judge, partial(load, deterministic=True), batches)
    quality.compare_with_cpu(report, load)
