"""One request, one answer: its tokens are the same alone, in any company, in any chunks, cached or preempted.

Through the real engine on tiny models, in every dtype and on every instruction set.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from llmbox.engine.core.engine import Engine
from llmbox.engine.ipc.messages import AddRequest
from support.kernel_backends import backends
from support.lanes import NIGHTLY, nightly
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

PROMPTS, FEWER = 33, 17
"""Most requests at a time: all with the best instruction set, and with the slower others at night alone."""
LONGEST = 150
NEW = 12
STEPS_OF_A_LIFE = 7
LEVELS = [name for name in backends() if name.startswith("cpu ")]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An odd group of heads, sizes beyond one tile; mistral's window is shorter than the prompts."""
    shapes: dict[str, Any] = {"hidden_size": 200, "intermediate_size": 330, "num_attention_heads": 6}
    if request.param == "mistral":
        shapes["sliding_window"] = 40
    folder = tmp_path_factory.mktemp(request.param)
    return make_tiny_model(folder, arch=request.param, tokenizer=False, **shapes)


def requests(count: int) -> list[AddRequest]:
    """Greedy and sampled by turns; some share a beginning."""
    rng = random.Random(7)
    common = [rng.randrange(3, 320) for _ in range(64)]
    made = []
    for n in range(count):
        own = [rng.randrange(3, 320) for _ in range(rng.randrange(1, LONGEST - 64))]
        prompt = common + own if n % 3 == 0 else own
        params = {"temperature": 0.8, "seed": n} if n % 2 else {}
        made.append(ask(f"r{n}", prompt, NEW, **params))
    return made


VARIANTS: dict[str, dict[str, Any]] = {
    "chunks of 16": {"token_budget": 16, "max_running": 8},
    "chunks of 33": {"token_budget": 33, "max_running": 33},
    "chunks of 512": {"token_budget": 512, "max_running": 33},
    "no prefix cache": {"prefix_cache": False, "max_running": 33},
    "preempted": {"kv_tokens": 512, "max_running": 33},
    "blocks of 64": {"block_size": 64, "max_running": 33},
    "two threads": {"threads": 2, "max_running": 33},
}


def of_level(level: str, *more: str | dict[str, str]) -> Any:
    """Parameters of a test; those between the best instruction set and plain C++ run each night."""
    return (nightly if level in LEVELS[1:-1] else pytest.param)(level, *more)


QUANTS = {
    "none": ("auto", "int8"),
    "int8": ("auto",),
    "int4": ("int8",),
    "int8-g32": ("auto",),
    "int4-g128": ("int8",),
}
"""Formats of weights; of the KV cache beside each in the suite, since products know nothing of the cache."""
# The best instruction set in every format; the others differ only in how a product is spelt.
FORMATS = [
    of_level(LEVELS[0], "float32", "none", "auto"),
    *(
        (pytest.param if kv in QUANTS[quant] else nightly)(LEVELS[0], "bfloat16", quant, kv)
        for quant, kv in product(QUANTS, ("auto", "int8"))
    ),
    *(
        of_level(level, "bfloat16", *kinds)
        for level in LEVELS[1:]
        for kinds in (("none", "auto"), ("int4", "int8"))
    ),
]


# In the suite each with one of the two models, which take turns at formats of weights.
CASES = [
    nightly(arch, *case.values) if case.marks or (number + number // 2) % 2 != turn else (arch, *case.values)
    for number, case in enumerate(FORMATS)
    for turn, arch in enumerate(("qwen3", "mistral"))
]


@pytest.mark.parametrize(("model", "level", "dtype", "quant", "kv_dtype"), CASES, indirect=["model"])
def test_tokens_are_those_of_the_request_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch, level: str, dtype: str, quant: str, kv_dtype: str
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", level)
    check(model, level, {"dtype": dtype, "quant": quant, "kv_dtype": kv_dtype})


@pytest.mark.parametrize(
    ("level", "dtype", "quant"),
    [
        (LEVELS[0], "float32", "none"),
        *((LEVELS[0], "bfloat16", quant) for quant in ("int8", "int4", "int4-mix")),
        *(of_level(level, "bfloat16", "none") for level in LEVELS),
    ],
)
def test_tokens_of_experts_are_those_of_the_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, dtype: str, quant: str
) -> None:
    """Whoever else goes through the same experts."""
    sizes = {"hidden_size": 200, "moe_intermediate_size": 70, "num_attention_heads": 6}
    model = make_tiny_model(tmp_path, arch="qwen3_moe", tokenizer=False, **sizes)
    monkeypatch.setenv("LLMBOX_KERNELS", level)
    check(model, level, {"dtype": dtype, "quant": quant})


@pytest.mark.parametrize(
    ("level", "arch", "options"),
    [
        (LEVELS[0], "gemma2", {"dtype": "float32"}),
        (LEVELS[0], "gemma3_text", {"dtype": "bfloat16", "quant": "int8", "kv_dtype": "int8"}),
        *(of_level(level, "gemma2", {"dtype": "bfloat16"}) for level in LEVELS),
    ],
)
def test_tokens_of_a_gemma_are_those_of_the_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, level: str, options: dict[str, str]
) -> None:
    """Capped scores, two tables of angles, windows beside layers without."""
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False, hidden_size=200, head_dim=34)
    monkeypatch.setenv("LLMBOX_KERNELS", level)
    check(model, level, options)


def check(model: Path, level: str, weights: dict[str, str]) -> None:
    asked = requests(PROMPTS if NIGHTLY or level == LEVELS[0] else FEWER)
    engine = load(model, max_running=1, prefix_cache=False, **weights)
    assert engine.info.backend.startswith(level)
    alone = {}
    for request in asked:
        alone |= tokens(engine, [request])
    assert len({tuple(answer) for answer in alone.values()}) > len(asked) // 2
    for name, options in VARIANTS.items():
        again = load(model, **weights, **options)
        assert tokens(again, asked) == alone, name
        if name == "preempted":
            assert again.stats().preemptions > 0
        if options.get("prefix_cache", True):  # now most of a prompt is found in the cache
            hits = again.stats().prefix_hits
            assert tokens(again, asked) == alone, f"{name}, asked twice"
            assert again.stats().prefix_hits > hits
    assert moved(lambda: load(model, max_running=33, **weights), asked) == alone


def moved(load_one: Callable[[], Engine], left: list[AddRequest]) -> dict[str, list[int]]:
    """Killed after every few steps, as the daemon moves requests: the next engine gets the tokens so far."""
    answers: dict[str, list[int]] = {request.request_id: [] for request in left}
    while left:
        engine = load_one()
        for request in left:
            engine.add(replace(request, output_ids=list(answers[request.request_id])))
        for _ in range(STEPS_OF_A_LIFE):
            for output in engine.step().outputs:
                answers[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    left = [request for request in left if request.request_id != output.request_id]
    return answers
