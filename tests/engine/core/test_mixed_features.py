"""All features at once, drawn by seed: whatever runs beside a request, however it is cut, preempted, drafted,
cached, read from disk or resumed, a client sees what the request gives alone; bit by bit on C++ kernels.
"""

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.vision.test_seeing_models import picture_of
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.request import Request
from llmbox.engine.executor.multiproc import MultiprocExecutor
from llmbox.engine.ipc.messages import AddRequest, PreparedImage, RequestOutput
from llmbox.engine.kv_store import usage
from llmbox.engine.sampling import Sampler
from llmbox.engine.sampling_params import SamplingParams, ThinkingParams
from support.adapters import plain_tensors, write_adapter
from support.families import FAMILIES
from support.grammars import BREAK, CHOICE, EOS, JSON, REGEX, THINK, THOUGHT, learned
from support.lanes import NIGHTLY, first_in_the_suite
from support.mixes import drawn, rounded
from support.real_engines import draft_at_no_price, load, runner_of
from support.tiny_models import make_tiny_model
from support.vision_models import make_vision_model

CONTEXT = 160
SEEDS = int(os.environ.get("LLMBOX_TEST_MIXES", "6" if NIGHTLY else "1"))
FIRST_SEED = int(os.environ.get("LLMBOX_TEST_FIRST_SEED", random.SystemRandom().randrange(1 << 30) * NIGHTLY))
"""New examples each night; a failure names its seed."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full attention": ("qwen3", {}),
    "window of a block": ("mistral", {"sliding_window": 16}),
    "window": ("gemma3_text", {}),
    "recurrent": ("lfm2", {}),
    "recurrent, window": ("lfm3", {"sliding_window": 21}),
    "delta rule": ("qwen3_next", {}),
    "long factors": ("phi3", {"rope": "longrope"}),
    "experts": ("qwen3_moe", {}),
    "latent attention": ("deepseek_v3", {}),
    "sinks": ("gpt_oss", {}),
    "states only": ("mamba2", {}),
}
WITH_ADAPTERS = {"qwen3", "mistral"}
CORES = os.sched_getaffinity(0)
SEEING = {"pictures": "qwen3_vl", "pictures, both ways": "gemma3", "pictures, recurrent": "qwen3_5"}
Picture = tuple[list[int], PreparedImage]
"""Ids of a picture in a prompt, and the picture."""


def engine_options(rng: random.Random) -> dict[str, Any]:
    """Any engine of the model: small pools, odd budgets, with and without drafts and caches."""
    running = rng.choice([1, 2, 3, 5, 9])
    options: dict[str, Any] = {
        "context": CONTEXT,
        "max_running": running,
        "token_budget": max(running, rng.choice([5, 16, 17, 32, 50, 200])),
        "block_size": rng.choice([4, 16, 16]),
        "kv_tokens": rng.choice([CONTEXT, CONTEXT + 40, 260, 600, 3000]),
        "prefix_cache": rng.random() < 0.8,
        "speculate": rng.choice(["on", "on", "off"]),
        "premium_share": rng.choice([0.0, 0.0, 0.2]),
        "watermark": rng.choice([0.01, 0.1]),
    }
    if rng.random() < 0.1:
        options["batching"] = "static"
    elif rng.random() < 0.1:
        options["chunked_prefill"] = False
    options["overlap"] = rng.random() < 0.3
    return options


class Requests:
    """Requests with any mix of features. Prompts meet in the prefix cache."""

    def __init__(self, rng: random.Random, adapters: list[Path], pictures: list[Picture]) -> None:
        self._rng, self._adapters, self._pictures = rng, adapters, pictures
        self._prompts = [[rng.randrange(3, 300) for _ in range(size)] for size in (16, 33, 64)]
        self._number = 0

    def draw(self) -> list[AddRequest]:
        """Return the choices of one call: `n` requests, which share their prompt."""
        rng = self._rng
        first = drawn(rng, self._number)
        params = replace(first.params, **self._limits(), frequency_penalty=rng.choice([0.0, 0.0, 0.3]))
        prompt, images = self._with_pictures(self._prompt(first))
        room = CONTEXT - len(prompt)
        most = room if rng.random() < 0.1 else rng.choice([1, 2, 15, 16, 17, 33, 48])
        params = replace(params, max_tokens=min(most, room))
        if rng.random() < 0.1:
            params = SamplingParams(max_tokens=0, pooling=rng.choice(["last", "mean", "cls"]))
        adapter = str(rng.choice(self._adapters)) if self._adapters and rng.random() < 0.3 else ""
        group = []
        for choice in range(rng.choice([1, 1, 1, 2, 4])):
            name = f"r{self._number}"
            self._number += 1
            group.append(
                replace(
                    first,
                    request_id=name,
                    prompt_ids=list(prompt),
                    params=replace(params, seed=params.seed // 2 + choice),
                    fork_of=group[0].request_id if group else None,
                    priority=rng.choice([0, 0, 0, -1, 2]) if not group else group[0].priority,
                    tenant=rng.choice(["", "a", "b"]) if not group else group[0].tenant,
                    cache_namespace=rng.choice(["", "", "x"]) if not group else group[0].cache_namespace,
                    adapter=adapter,
                    images=images,
                )
            )
        return group

    def _with_pictures(self, prompt: list[int]) -> tuple[list[int], list[PreparedImage]]:
        """Put up to two pictures into a prompt."""
        images: list[PreparedImage] = []
        for _ in range(self._rng.choice([0, 1, 1, 2]) if self._pictures else 0):
            ids, image = self._rng.choice(self._pictures)
            begin = images[-1].start + images[-1].num_tokens + 3 if images else 0
            if len(prompt) + len(ids) > CONTEXT - 1 or begin > len(prompt):
                break
            place = self._rng.choice([begin, (begin + len(prompt)) // 2, len(prompt)])
            images.append(replace(image, start=place + image.start))
            prompt = [*prompt[:place], *ids, *prompt[place:]]
        return prompt, images

    def _prompt(self, first: AddRequest) -> list[int]:
        rng = self._rng
        if rng.random() < 0.3:
            return first.prompt_ids
        prompt = rng.choice(self._prompts)[: rng.choice([16, 17, 31, 32, 48, 64])]
        if rng.random() < 0.3:  # the next turn
            prompt = prompt + [rng.randrange(3, 300) for _ in range(rng.choice([1, 15, 16, 40]))]
            self._prompts.append(prompt)
        return prompt

    def _limits(self) -> dict[str, Any]:
        """Grammars, thoughts and repetition."""
        rng, chance = self._rng, self._rng.random()
        if chance < 0.2:
            few = tuple(rng.sample(range(20, 90), 3))
            return {"allowed_token_ids": few, "bad_words": ((few[0], few[1]),)}
        if chance < 0.6:
            thinking: ThinkingParams | None = None
            if rng.random() < 0.5:
                marks: dict[str, Any] = {"opener_ids": (THINK,), "closer_ids": (THOUGHT,)}
                thinking = ThinkingParams(
                    begins=rng.choice(["no", "may", "inside"]),
                    budget=rng.choice([None, 0, 3, 7]),
                    end_ids=(THOUGHT, BREAK),
                    stop_loops=rng.random() < 0.5,
                    **(marks if rng.random() < 0.5 else {}),
                )
            return {
                "grammar": rng.choice([None, JSON, REGEX, CHOICE]) if thinking else rng.choice([JSON, REGEX]),
                "thinking": thinking,
                "stop_token_ids": (EOS,),
                "allowed_token_ids": None,
                "logit_bias": rng.choice([{}, {7: 2.0, 5000: 9.0, -4: 1.0}]),
                "temperature": rng.choice([0.0, 1.0, 1e-6]),
            }
        return {}


def seen_by_client(outputs: list[RequestOutput]) -> tuple[Any, ...]:
    return (
        [token for output in outputs for token in output.token_ids],
        [entry for output in outputs for entry in output.logprobs or []],
        [entry for output in outputs for entry in output.prompt_logprobs or []],
        outputs[-1].finish_reason,
        outputs[-1].stop_token_id,
        outputs[-1].error_code,
        outputs[-1].error_message,
        outputs[-1].vector,
    )


def run_alone(engine: Engine, request: AddRequest) -> tuple[Any, ...]:
    refusal = engine.add(replace(request, fork_of=None))
    outputs = [] if refusal is None else [refusal]
    while engine.has_work:
        outputs += engine.step().outputs
    return seen_by_client(outputs)


def end_processes(engine: Engine) -> None:
    """End the other ranks, or the prefill engine. Engines of a pair run on cores of their own."""
    if isinstance(engine.executor, MultiprocExecutor):
        engine.executor.close()
    if (intake := engine.scheduler.kv_cache.intake) is not None:
        intake.link.close()
        os.sched_setaffinity(0, CORES)


class Disturber:
    """Feeds an engine with requests at any time, aborts, breaks and preempts some, and restarts it now and
    then.
    """

    def __init__(self, rng: random.Random, model: Path, options: dict[str, Any]) -> None:
        self._rng, self._model, self._options = rng, model, options
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.asked: dict[str, AddRequest] = {}
        self.aborted: set[str] = set()
        """Requests that may have ended early."""
        self.restarts = 0
        self.engine = self._load()

    def close(self) -> None:
        self.engine.close()
        end_processes(self.engine)

    def _load(self) -> Engine:
        engine = learned(load(self._model, dtype="float32", **self._options))
        if engine.scheduler.drafting._rows and not self._options["overlap"]:  # whatever this machine can
            engine.scheduler.drafting._rows = 64
        if (intake := engine.scheduler.kv_cache.intake) is not None:
            intake._least_tokens = 8  # short prompts are handed over too
        sampler = getattr(runner_of(engine), "_sampler", None)
        if isinstance(sampler, Sampler):
            sampler.sample = partial(self._sample_with_noise, sampler.sample)
        return engine

    def _sample_with_noise(
        self, sample: Callable[..., list[Any]], logits_RV: torch.Tensor, requests: Sequence[Request]
    ) -> list[Any]:
        """Break a row now and then, as damaged numbers do."""
        if self._rng.random() < 0.01:
            row = self._rng.randrange(len(requests))
            self.aborted.add(requests[row].request_id)
            logits_RV = logits_RV.clone()
            logits_RV[row, 3] = math.nan
        return sample(logits_RV, requests)

    def run(self, groups: Iterator[list[AddRequest]]) -> None:
        waiting: list[AddRequest] | None = next(groups, None)
        while waiting is not None or self.engine.has_work:
            while waiting is not None and (not self.engine.has_work or self._rng.random() < 0.3):
                for request in waiting:
                    self._add(request)
                waiting = next(groups, None)
            self._disturb()
            self._take(self.engine.step().outputs)
            self.engine.scheduler.check()
        assert self.engine.scheduler.pool.num_used == len(self.engine.scheduler.kv_cache.loading("kv"))

    def _add(self, request: AddRequest) -> None:
        self.asked[request.request_id] = request
        self.outputs[request.request_id] = []
        if (refusal := self.engine.add(request)) is not None:
            self._take([refusal])

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            own = self.outputs[output.request_id]
            assert not own or own[-1].finish_reason is None, "an output after the last"
            own.append(output)

    def _disturb(self) -> None:
        rng, scheduler = self._rng, self.engine.scheduler
        if rng.random() < 0.03 and scheduler._requests:
            name = rng.choice(list(scheduler._requests))
            self.aborted.add(name)
            answer = self.engine.abort(name)
            assert answer is not None
            self._take([answer])
        if rng.random() < 0.05 and (able := list(scheduler.active.preemptible())):
            scheduler.active.preempt(rng.choice(able))
        if rng.random() < 0.01 and self.restarts < 2:
            self._restart()

    def _restart(self) -> None:
        """Resume on a new engine, as a supervisor does after a crash."""
        self.restarts += 1
        open_ids = list(self.engine.scheduler._requests)
        if self._rng.random() < 0.5:
            self.engine.close()
        end_processes(self.engine)
        self.engine = self._load()
        for name in open_ids:
            ids = [token for output in self.outputs[name] for token in output.token_ids]
            if (answer := self.engine.add(replace(self.asked[name], output_ids=ids))) is not None:
                self._take([answer])


def check_seed(
    seed: int,
    model: Path,
    adapters: list[Path],
    alone: dict[int, Engine],
    pictures: list[Picture],
    fixed: dict[str, Any],
) -> None:
    rng = random.Random(seed)
    options = engine_options(rng) | fixed
    if pictures:
        options |= {"batching": "continuous", "chunked_prefill": True}
    # Beside a device's runner, adapters need its kernels.
    requests = Requests(rng, [] if options["overlap"] else adapters, pictures)
    subject = Disturber(rng, model, options)
    try:
        subject.run(iter([requests.draw() for _ in range(12)]))
    finally:
        subject.close()
    for name, request in subject.asked.items():
        outputs, why = subject.outputs[name], f"{name} of seed {seed}, {options}, {request}"
        seen, expected = seen_by_client(outputs), run_alone(alone[options["block_size"]], request)
        if name in subject.aborted and outputs[-1].finish_reason in {"abort", "error"}:
            assert seen[0] == expected[0][: len(seen[0])], why
            continue
        if options["overlap"]:  # log-probabilities are of other kernels
            seen, expected = ((*each[:1], *map(rounded, each[1:3]), *each[3:]) for each in (seen, expected))
        assert seen == expected, why


@pytest.fixture
def _exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    for name, value in usage.cache_variables(tmp_path / "kv", 1 << 30, 1.0).items():
        monkeypatch.setenv(name, value)
    draft_at_no_price(monkeypatch)


def compare(
    model: Path,
    adapters: list[Path] | None = None,
    pictures: list[Picture] | None = None,
    ranks: dict[str, Any] | None = None,
    pair: dict[str, Any] | None = None,
) -> None:
    """`ranks`: options of all engines. `pair`: those of the engine that is not alone."""
    ranks = ranks or {}
    plain = {"dtype": "float32", "speculate": "off", "prefix_cache": False, "context": CONTEXT, **ranks}
    alone = {size: learned(load(model, block_size=size, **plain)) for size in (4, 16)}
    try:
        for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
            check_seed(seed, model, adapters or [], alone, pictures or [], ranks | (pair or {}))
    finally:
        for engine in alone.values():
            end_processes(engine)


def write_adapters(folder: Path) -> list[Path]:
    torch.manual_seed(1)
    return [write_adapter(folder / f"{rank}", plain_tensors(rank=rank), r=rank) for rank in (2, 4)]


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("kind", first_in_the_suite(list(MODELS)))
def test_a_request_is_answered_as_if_alone(kind, tmp_path):
    arch, config = MODELS[kind]
    if arch in FAMILIES:
        config = {"max_position_embeddings": 256, **config}
    model = make_tiny_model(tmp_path / "model", arch=arch, tokenizer=False, **config)
    compare(model, write_adapters(tmp_path) if arch in WITH_ADAPTERS else [])


@pytest.mark.usefixtures("_exact")
@pytest.mark.nightly
@pytest.mark.parametrize("kind", SEEING)
def test_a_request_with_pictures_is_answered_as_if_alone(kind, tmp_path):
    make_vision_model(tmp_path, SEEING[kind])
    compare(tmp_path, pictures=[picture_of(tmp_path, *size) for size in ((50, 40), (70, 30), (30, 66))])


@pytest.mark.usefixtures("_exact")
@pytest.mark.nightly
@pytest.mark.parametrize("cut", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("kind", ["window of a block", "recurrent, window"])
def test_a_request_is_answered_by_ranks_as_if_alone(kind, cut, tmp_path):
    arch, config = MODELS[kind]
    model = make_tiny_model(tmp_path / "model", arch=arch, tokenizer=False, **config)
    compare(model, write_adapters(tmp_path) if arch in WITH_ADAPTERS else [], ranks={"overlap": False, **cut})


@pytest.mark.usefixtures("_exact")
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["window of a block", "recurrent, window"])
def test_a_request_is_answered_by_a_pair_as_if_alone(kind, tmp_path):
    arch, config = MODELS[kind]
    model = make_tiny_model(tmp_path / "model", arch=arch, tokenizer=False, **config)
    pair = {"disaggregate": (1, 1), "threads": None, "overlap": False, "prefix_cache": True}
    pair |= {"batching": "continuous", "chunked_prefill": True}
    compare(model, write_adapters(tmp_path) if arch in WITH_ADAPTERS else [], pair=pair)
