"""Packed and rounded weights by the command line: quantize, df, rm."""

import json
import os
from pathlib import Path

import pytest

from llmbox.app.errors import Exit
from llmbox.engine.weights.packed_cache.cache import PackedWeightCache, PackKey
from llmbox.engine.weights.packed_cache.file import PackedContent
from llmbox.kernels.dispatch import native_ready
from support.cli_box import Box, box
from support.hub_models import model_files
from support.tiny_models import make_tiny_model

__all__ = ["box"]


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
def test_quantize_reports_and_refuses(box: Box) -> None:
    source = make_tiny_model(box.folder / "tiny")
    text = box.folder / "text"
    text.write_text("some text to predict\n\nand some more of it")
    out = box.folder / "made"
    done = box.run("quantize", source, "--to", "int8", "--out", out, "--eval", text, "--threads", 1, "--json")
    assert done.code == 0, done.err
    report = done.json
    assert report["bytes_after"] < report["bytes_before"] / 2
    assert 0 < report["worst"][0]["relative"] < 0.02
    assert report["perplexity_after"] == pytest.approx(report["perplexity_before"], rel=0.02)
    assert box.run("fit", out, "--json").json["plan"]["quant"] == "int8"

    again = box.run("quantize", out, "--to", "int4", "--out", box.folder / "twice")
    assert again.code == Exit.FAILED
    assert "holds int8 weights already" in again.err
    assert not (box.folder / "twice").exists()
    assert box.run("quantize", source, "--to", "int3").code == Exit.USAGE


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
def test_quantize_calibrates_a_mixed_format(box: Box) -> None:
    changes = {"num_hidden_layers": 3, "max_position_embeddings": 32}
    source, out = make_tiny_model(box.folder / "tiny", **changes), box.folder / "made"
    done = box.run("quantize", source, "--to", "int4-mix", "--calibrate", "--out", out, "--threads", 1)
    assert done.code == 0, done.err
    assert "tokens of the model's own text" in done.out
    told = box.run("fit", out, "--json").json["plan"]
    assert told["quant"] == "int4-mix"
    asked = box.run("fit", source, "--quant", "int4-mix", "--json").json["plan"]
    four = box.run("fit", source, "--quant", "int4", "--json").json["plan"]
    assert told["weights_bytes"] == asked["weights_bytes"] > four["weights_bytes"]


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
def test_quantize_writes_what_other_tools_read(box: Box) -> None:
    source, out = make_tiny_model(box.folder / "tiny", hidden_size=128, head_dim=32), box.folder / "made"
    done = box.run("quantize", source, "--to", "w8a8", "--out", out, "--threads", 1, "--json")
    assert done.code == 0, done.err
    assert done.json["format"] == "w8a8"
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "int-quantized")
    told = box.run("fit", out, "--json").json
    assert told["plan"]["quant"] == "w8a16-g128"
    assert any("stay in their own numbers" in note for note in told["notes"])
    refused = box.run("quantize", source, "--to", "fp8", "--calibrate", "--out", box.folder / "twice")
    assert refused.code == Exit.FAILED
    assert "leave out --calibrate" in refused.err


def pack(box: Box, directory: Path, dtype: str = "torch.bfloat16") -> PackKey:
    key = PackKey(directory=directory, dtype=dtype, quant="none", layout="avx2 1")
    assert PackedWeightCache(box.paths.repacked, 10**9).store(
        key, [PackedContent("a", (9,), "x", memoryview(bytes(9)))]
    )
    return key


def test_packed_weights_are_shown_and_deleted(box: Box) -> None:
    kept, gone = make_tiny_model(box.folder / "kept"), make_tiny_model(box.folder / "gone")
    pack(box, kept)
    pack(box, gone)
    os.utime(gone / "model.safetensors", (0, 0))
    told = box.run("df", "--json").json
    assert {row["model"]: row["useless"] for row in told["repacked"]} == {str(kept): False, str(gone): True}
    assert told["repacked"][0]["format"] == "torch.bfloat16, avx2"
    shown = box.run("df", "--prune")
    assert "of packed weights and KV cache deleted" in shown.out
    assert str(kept) in shown.out
    assert str(gone) not in shown.out
    assert box.run("df", "--prune-all", "--json").json["repacked"] == []


@pytest.mark.parametrize("daemon", [False, True])
def test_they_go_with_their_model(box: Box, daemon: bool) -> None:
    snapshot = box.folder / "hf/hub/models--org--little/snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    for name, data in model_files().items():
        (snapshot / name).write_bytes(data)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("1" * 40)
    pack(box, snapshot)
    if daemon:
        assert box.run("up", box.model()).code == 0
    assert len(box.run("df", "--json").json["repacked"]) == 1
    removed = box.run("rm", "org/little", "--yes")
    assert removed.code == 0, removed.err
    assert box.run("df", "--json").json["repacked"] == []
