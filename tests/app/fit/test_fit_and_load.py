"""`fit` and `load` give the same answer for every kind of checkpoint and every setting."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbox.app.fit.fit import plan_alone
from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import directory
from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import EngineError
from llmbox.engine.executor.build import load_engine
from llmbox.engine.hardware.machine import read_machine
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.quant_formats import QUANTS
from support.fp8_checkpoint import compressed, round_by_output, round_to_blocks
from support.tiny_models import make_tiny_model

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
}


def plain(folder: Path, **config: Any) -> Path:
    return make_tiny_model(folder, tokenizer=False, **{**SIZES, **config})


def quantized(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        out = folder / "out"
        quantize(plain(folder / "model"), out, QUANTS[name], 1, lambda _done, _total: None)
        return out

    return make


def fp8_blocks(folder: Path) -> Path:
    round_to_blocks(plain(folder))
    return folder


def fp8_by_output(rows: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        given = {"": 0.05} if rows == "static" else None
        round_by_output(plain(folder), compressed(rows=rows), given=given)
        return folder

    return make


def fp8_unsaid(folder: Path) -> Path:
    """Quantized weights that config.json says nothing of."""
    round_to_blocks(plain(folder))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def said(**entry: Any) -> Callable[[Path], Path]:
    return lambda folder: plain(folder, quantization_config=entry)


def without_weights(folder: Path) -> Path:
    (plain(folder) / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    **{dtype: lambda folder, d=dtype: plain(folder, torch_dtype=d) for dtype in ("bfloat16", "float16")},
    "float32": plain,
    "gemma": lambda folder: plain(folder, arch="gemma3_text", torch_dtype="bfloat16"),
    "experts": lambda folder: plain(folder, arch="qwen3_moe"),
    "int8": quantized("int8"),
    "int4": quantized("int4"),
    "fp8 in blocks": fp8_blocks,
    "fp8, dynamic rows": fp8_by_output("token"),
    "fp8, static rows": fp8_by_output("static"),
    "fp8 that nobody says": fp8_unsaid,
    "AWQ": said(quant_method="awq", bits=4),
    "GPTQ": said(quant_method="gptq", bits=4),
    "another architecture": lambda folder: plain(folder, architectures=["Qwen9ForCausalLM"]),
    "code of its own": lambda folder: plain(folder, auto_map={"AutoModelForCausalLM": "x.Y"}),
    "pickles": without_weights,
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    *(
        {"quant": quant}
        for quant in ("auto", "int8", "int8-g32", "int4", "int4-mix", "w8a8", "fp8", "fp8-block")
    ),
    *({"dtype": dtype} for dtype in ("bfloat16", "float16", "float32")),
    *({"kv_dtype": dtype} for dtype in ("bfloat16", "float16", "int8", "fp8")),
    {"quant": "int8", "dtype": "float16"},
    {"quant": "int8", "dtype": "bfloat16", "kv_dtype": "float16"},
    {"deterministic": True},
    {"deterministic": True, "dtype": "float16"},
    {"deterministic": True, "dtype": "bfloat16", "kv_dtype": "float16"},
    {"speculate": "on"},
    {"speculate": "on", "dtype": "float16"},
    {"speculate": "on", "overlap": True},
    {"context": 64},
    {"context": 4096},
    {"device": "cuda"},
)
KERNELS = (None, "reference", "onednn", "cpu", "triton", "cpu sparc")


def answers(model: Path, **options: Any) -> tuple[str, str]:
    """Why each refuses; empty for yes."""
    config = EngineConfig(
        **{"model_path": str(model), "name": "m", "threads": 1, "memory_bytes": 256 << 20, **options}
    )
    try:
        fit = plan_alone(local_facts(directory(model)).config, read_machine(), config, None)[1]
    except EngineError as error:
        fit = str(error)
    try:
        load_engine(config, lambda _: None)
        load = ""
    except EngineError as error:
        load = str(error) or "no"
    return fit, load


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_every_checkpoint_with_every_setting(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLMBOX_KERNELS", raising=False)
    model = CHECKPOINTS[kind](tmp_path)
    told = {str(options): answers(model, **options) for options in SETTINGS}
    for kernels in KERNELS[1:] if kind in {"bfloat16", "int8", "fp8 in blocks"} else ():
        monkeypatch.setenv("LLMBOX_KERNELS", kernels)
        for options in ({}, {"quant": "int8"}, {"kv_dtype": "fp8"}, {"deterministic": True}):
            told[f"{kernels} {options}"] = answers(model, **options)
    differ = {name: both for name, both in told.items() if bool(both[0]) != bool(both[1])}
    assert differ == {}
    if kind not in {"pickles", "fp8 that nobody says"}:  # what is wrong with files and with settings at once
        del told["{'device': 'cuda'}"]
        assert {name: both for name, both in told.items() if both[0] != both[1]} == {}, "the same reason too"


def test_the_zoo_has_both_answers(tmp_path: Path) -> None:
    assert answers(plain(tmp_path / "a")) == ("", "")
    assert answers(fp8_blocks(tmp_path / "b")) == ("", ""), "dequantized"
    fit, load = answers(plain(tmp_path / "c"), quant="fp8-block")
    assert "fp8-block weights run on NVIDIA GPUs" in fit
    assert load == fit
