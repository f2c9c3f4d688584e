"""A broken model directory ends as one error that names the file, and nothing stays loaded."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.engine.checkpoint.index import INDEX
from llmbox.engine.errors import ModelError
from support.odd_files import KINDS, make_odd, no_hanging
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

FILE = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "m", tokenizer=False)


def refused(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(directory)
    return str(caught.value)


def edit_weights(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(directory / FILE)
    edit(weights)
    save_file(weights, directory / FILE)


def write_raw(file: Path, header: bytes, data: bytes = b"") -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def edit_header(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    raw = (directory / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    write_raw(directory / FILE, json.dumps(header).encode(), raw[8 + length :])


def test_the_directory_itself_is_missing(tmp_path: Path) -> None:
    assert "config.json is missing" in refused(tmp_path / "nowhere")


def test_no_weights(model: Path) -> None:
    (model / FILE).unlink()
    assert "model.safetensors" in refused(model)


def test_a_link_to_a_missing_file_is_named(model: Path) -> None:
    """As in a cache of the hub whose blob was deleted."""
    (model / FILE).unlink()
    (model / FILE).symlink_to("/nowhere/blob")
    assert "is a link to '/nowhere/blob', which is missing" in refused(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.ckpt"])
def test_pickles_are_never_opened(model: Path, name: str) -> None:
    (model / FILE).unlink()
    (model / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    message = refused(model)
    assert name in message
    assert "not opened" in message


@pytest.mark.parametrize("keep", [0, 4, 8, 200, -1, -70_000])
def test_a_truncated_file(model: Path, keep: int) -> None:
    raw = (model / FILE).read_bytes()
    (model / FILE).write_bytes(raw[:keep])
    message = refused(model)
    assert FILE in message
    assert "download it again" in message


def test_a_missing_tensor(model: Path) -> None:
    edit_weights(model, lambda weights: weights.pop(Q))
    assert f"'{Q}' is missing" in refused(model)


def test_a_tensor_too_many(model: Path) -> None:
    edit_weights(model, lambda weights: weights.update({"model.layers.9.x.weight": torch.zeros(1)}))
    message = refused(model)
    assert "'model.layers.9.x.weight'" in message
    assert FILE in message


def test_a_wrong_shape(model: Path) -> None:
    edit_weights(model, lambda weights: weights.update({Q: torch.zeros(64, 63)}))
    message = refused(model)
    assert Q in message
    assert "[64, 63]" in message
    assert "[64, 64]" in message


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [Q, "model.norm.weight", "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers(model: Path, bad: float, name: str) -> None:
    edit_weights(model, lambda weights: weights[name].view(-1)[-1:].fill_(bad))
    message = refused(model)
    assert name in message
    assert FILE in message


def test_weights_too_large_for_float16(model: Path) -> None:
    edit_weights(model, lambda weights: weights[Q].fill_(1e6))
    with pytest.raises(ModelError, match="float16"):
        load(model, dtype="float16")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I64", "F17", None, 3])
def test_a_dtype_that_cannot_be_served(model: Path, dtype: Any) -> None:
    edit_header(model, lambda header: header[Q].update(dtype=dtype))
    message = refused(model)
    assert Q in message
    assert "dtype" in message


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 10**12]},
        {"data_offsets": [-4, 16380]},
        {"data_offsets": [0]},
        {"data_offsets": "all"},
        {"data_offsets": [10**12, 10**12 + 16384]},
        {"data_offsets": [0, 16384]},
        {"shape": [64, -64]},
        {"shape": [64, 64.0]},
        {"shape": [2**40, 2**40]},
        {"shape": None},
    ],
)
def test_offsets_and_shapes_that_lie(model: Path, change: dict[str, Any]) -> None:
    edit_header(model, lambda header: header[Q].update(change))
    assert FILE in refused(model)


@pytest.mark.parametrize(
    "name", ["../evil", "a/b", "a\\b", "", "x" * 600, "a b", "\u202egnp", "..", "a..b", "a\n"]
)
def test_odd_names(model: Path, name: str) -> None:
    edit_header(model, lambda header: header.update({name: header.pop(Q)}))
    message = refused(model)
    assert "not a tensor name" in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(model))


@pytest.mark.parametrize(
    "header", [b"{}", b'{"__metadata__":{}}', b"[]", b"{", b"\xff\xff", b'{"a":1}', b"[" * 50_000]
)
def test_headers_that_are_no_header(model: Path, header: bytes) -> None:
    write_raw(model / FILE, header, bytes(64))
    assert FILE in refused(model)


def test_a_duplicate_tensor_in_one_file(model: Path) -> None:
    raw = (model / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip()
    entry = json.dumps(json.loads(header)[Q])
    doubled = header[:-1] + f',"{Q}":{entry}}}'.encode()
    write_raw(model / FILE, doubled, raw[8 + length :])
    assert f"'{Q}' appears twice" in refused(model)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "s", shards=3, tokenizer=False)


SHARD = "model-00002-of-00003.safetensors"


def test_shards_load_like_one_file(model: Path, sharded: Path) -> None:
    request = [ask("a", [5, 6, 7], 8)]
    assert tokens(load(sharded), request) == tokens(load(model), request)


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / SHARD).unlink()
    assert f"{SHARD} is missing" in refused(sharded)


def test_a_truncated_shard(sharded: Path) -> None:
    raw = (sharded / SHARD).read_bytes()
    (sharded / SHARD).write_bytes(raw[:-100])
    assert SHARD in refused(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    other = load_file(sharded / "model-00001-of-00003.safetensors")
    name = next(iter(other))
    save_file({**load_file(sharded / SHARD), name: other[name]}, sharded / SHARD)
    message = refused(sharded)
    assert name in message
    assert SHARD in message


def edit_index(directory: Path, edit: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((directory / INDEX).read_text())
    edit(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_an_index_that_promises_what_is_not_there(sharded: Path) -> None:
    edit_index(sharded, lambda weight_map: weight_map.update({"model.ghost": SHARD}))
    assert "'model.ghost'" in refused(sharded)


@pytest.mark.parametrize("file", ["../m/model.safetensors", "/etc/passwd", "weights.bin", 7, ""])
def test_an_index_that_points_elsewhere(sharded: Path, file: Any) -> None:
    edit_index(sharded, lambda weight_map: weight_map.update({Q: file}))
    assert INDEX in refused(sharded)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": {"a":"b","a":"c"}}']
)
def test_an_index_that_is_no_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    assert INDEX in refused(sharded)


def test_a_file_that_shrinks_after_loading_does_no_harm(model: Path) -> None:
    engine = load(model)
    (model / FILE).write_bytes(b"")
    assert len(tokens(engine, [ask("a", [5, 6, 7], 4)])["a"]) == 4


def test_what_older_checkpoints_store_beside_is_ignored(model: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    edit_weights(model, lambda weights: weights.update(extra))
    assert load(model)


def test_a_tied_checkpoint_may_store_its_head(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "t", tokenizer=False, tie_word_embeddings=True)
    edit_weights(directory, lambda weights: weights.update({"lm_head.weight": torch.zeros(320, 64)}))
    assert load(directory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", FILE, INDEX, "model-00001-of-00002.safetensors"])
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    shards = 1 if name == FILE else 2
    model = make_tiny_model(tmp_path / "m", tokenizer=False, shards=shards)
    make_odd(model / name, kind)
    with no_hanging():
        message = refused(model)
    assert f"{name} cannot be read: it is {kind}" in message


def test_a_deep_header_and_a_deep_index(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", tokenizer=False, shards=2)
    deep = b"[" * 900 + b"]" * 900
    (model / INDEX).write_bytes(b'{"weight_map": ' + deep + b"}")
    assert f"{INDEX} is not valid JSON" in refused(model)
    (model / INDEX).unlink()
    write_raw(model / FILE, b'{"a": {"shape": ' + deep + b"}}")
    assert f"{FILE}: the header is not valid JSON" in refused(model)
