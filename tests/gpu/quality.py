"""What the formats of GPUs cost in quality: perplexity of the built-in model, and its answers.

Needs of this project its tree and the model's files, and beside torch only tokenizers (and Jinja, which torch
brings along): prompts are rendered here, without the daemon's processes for that.
"""

import gc
import json
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import jinja2
import torch
from tokenizers import Tokenizer

from gpu import stand_ins
from gpu.report import Report

stand_ins.put_in_place()

from llmbox.engine.core.engine import Engine
from llmbox.engine.executor.build import load_engine
from llmbox.engine.quantize.calibration import config_for, perplexity, sequences_of
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.triton.linear.tile_config import has_fp8
from support.builtin_model import ASSETS, IN_SCOPE, ROOT, is_right, user
from support.fake_quantized import fake_quantized_ops
from support.real_engines import ask, tokens

TEXT = ROOT / "packaging/builtin_model/perplexity.txt"
Format = tuple[str, str]
"""Of weights, and of keys and values."""
FORMATS: tuple[Format, ...] = (
    ("none", "auto"),
    ("fp8", "auto"),
    ("fp8-block", "auto"),
    ("w8a8", "auto"),
    ("none", "fp8"),
    ("fp8", "fp8"),
)
ALSO_ON_CPUS: tuple[Format, ...] = (("int8", "auto"), ("int4", "auto"), ("none", "int8"))
"""Which GPUs compute in other ways."""
ANSWER_TOKENS = 100
LEAST_SECONDS = 10
"""For one more row."""
PARTS, MOST_ROUNDING = 10, 0.02
"""Sequences of the text that a CPU reads too, and how far perplexity in bfloat16 may be from it."""
MOST_LOSS = 0.1
"""Of perplexity: more than this is no rounding."""


@dataclass(frozen=True, slots=True)
class Found:
    backend: str
    perplexity: float
    answers: list[str]

    @property
    def right(self) -> int:
        pairs = zip(self.answers, IN_SCOPE, strict=True)
        return sum(is_right(text, question["must"]) for text, question in pairs)


def table(report: Report, load: Callable[[str, str], Engine], formats: Sequence[Format] = FORMATS) -> None:
    """A row each; the first is what the others are compared with."""
    sequences = sequences_of(ASSETS, TEXT.read_text(encoding="utf-8"))
    report.table("weights", "keys and values", "kernels", "perplexity", "right answers", "same answers")
    plain: Found | None = None
    for number, (quant, kv) in enumerate(formats):
        if report.left < LEAST_SECONDS:
            report.skipped([" and ".join(each) for each in formats[number:]])
            return
        try:
            found = measure(load(quant, kv), sequences)
        except Exception as error:  # noqa: BLE001 - the other formats still say something
            traceback.print_exc()
            report.failed(
                f"{quant} weights, {kv} keys and values: {type(error).__name__}: {str(error)[:300]}"
            )
            found = None
        gc.collect()  # the next engine needs this one's memory
        torch.cuda.empty_cache()
        if found is None and plain is None:
            return  # with nothing to compare with the others say nothing
        if found is None:
            continue
        plain = plain or found
        loss, of = found.perplexity / plain.perplexity - 1, f"of {len(IN_SCOPE)}"
        same = sum(map(str.__eq__, found.answers, plain.answers))
        cells = quant, kv, found.backend, f"{found.perplexity:.3f} ({loss:+.2%})"
        report.row((*cells, f"{found.right} {of}", f"{same} {of}"))
        if not loss < MOST_LOSS:
            report.failed(f"perplexity with {quant} weights, {kv} keys and values: {loss:+.2%}")


def measure(engine: Engine, sequences: Sequence[Sequence[int]]) -> Found:
    return Found(engine.info.backend, perplexity(engine, sequences), answers(engine))


def is_here() -> bool:
    return TEXT.is_file() and (ASSETS / "model.safetensors").is_file()


def of_gpu() -> list[Format]:
    """Not all have 8-bit floats."""
    floats = has_fp8(torch.device("cuda"))
    return [each for each in FORMATS + ALSO_ON_CPUS if floats or not any("fp8" in name for name in each)]


def on_gpu(quant: str, kv: str) -> Engine:
    return load_builtin(quant=quant, kv_dtype=kv)


def load_builtin(*, device: str = "cuda", threads: int | None = None, **options: Any) -> Engine:
    return load_engine(config_for(ASSETS, threads, device=device, **options), lambda _: None)


def compare_with_cpu(report: Report, load: Callable[..., Engine]) -> None:
    """Perplexity of a part of the text beside that of plain torch in float32, and the answers."""
    parts = sequences_of(ASSETS, TEXT.read_text(encoding="utf-8"))[:PARTS]
    engine = load()
    found = measure(engine, parts)
    with mock.patch.dict(os.environ, LLMBOX_KERNELS="reference"):
        exact = perplexity(load_builtin(device="cpu", dtype="float32", threads=4), parts)
    loss, of = found.perplexity / exact - 1, f"{found.right} of {len(IN_SCOPE)} answers are right"
    shown = f"perplexity {found.perplexity:.3f}, {exact:.3f} in float32 on the CPU"
    report.say(f"- built-in model, {found.backend}: {shown} ({loss:+.2%}); {of}")
    if not abs(loss) < MOST_ROUNDING:
        report.failed(f"built-in model: {shown}")
    if found.right < len(IN_SCOPE) / 2:
        report.failed(f"built-in model: only {of}")


def in_plain_torch(quant: str, kv: str) -> Engine:
    """On this CPU, by the meaning of the formats, in the model's own dtype.

    No kernels of a CPU run them: `backend`, which refuses them, is replaced. Estimates refuse E4M3 keys and
    values there: as many bytes of int8 are asked for. One thread: what they compute is too small for two.
    """
    ops = fake_quantized_ops(QUANTS.get(quant), torch.float8_e4m3fn if kv == "fp8" else None)
    asked = {"quant": quant, "kv_dtype": "int8" if kv == "fp8" else kv, "dtype": "bfloat16"}
    with mock.patch("llmbox.engine.executor.rank_engine.backend", return_value=ops):
        return load_engine(config_for(ASSETS, 1, **asked), lambda _: None)


def answers(engine: Engine) -> list[str]:
    """To the held-out questions, greedily, all at once."""
    requests = [
        ask(str(number), prompt, ANSWER_TOKENS, stop_token_ids=stop_ids())
        for number, prompt in enumerate(prompts())
    ]
    return [tokenizer().decode(ids) for ids in tokens(engine, requests).values()]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


def stop_ids() -> tuple[int, ...]:
    found = json.loads((ASSETS / "generation_config.json").read_text())["eos_token_id"]
    return tuple(found) if isinstance(found, list) else (found,)


def prompts() -> list[list[int]]:
    config = json.loads((ASSETS / "tokenizer_config.json").read_text())
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(config["chat_template"])
    chats = user(*(question["ask"] for question in IN_SCOPE))
    return [
        tokenizer().encode(template.render(messages=chat, add_generation_prompt=True)).ids for chat in chats
    ]
