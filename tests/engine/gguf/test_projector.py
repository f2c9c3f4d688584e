"""Projector files (mmproj): embeddings of the checkpoint they were made of, choice by name, bad files."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from llmbox.app.errors import CliError
from llmbox.app.hub.local_models import find_adoptable
from llmbox.app.hub.model_info import local_facts
from llmbox.app.models import gguf_folders
from llmbox.app.models.catalog import directory
from llmbox.app.models.gguf_folders import NO_PROJECTOR, choose_projector, folder_of, folder_with_projector
from llmbox.engine.errors import ModelError
from llmbox.engine.gguf import projector as projector_code
from llmbox.engine.gguf.folder import config_json, projector_of
from llmbox.engine.gguf.projector import check_projector
from llmbox.engine.gguf.reader import read_gguf
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.vision.families import find_vision
from llmbox.engine.vision.encoder import VisionEncoder, load_vision_encoder
from llmbox.engine.weights.packed_cache.cache import PackKey
from llmbox.kernels.reference import REFERENCE
from support.gguf_models import write_gguf
from support.gguf_projectors import (
    SEEING,
    add_image_token,
    make_seeing_model,
    write_mmproj,
    write_ollama_gemma3,
    write_seeing_gguf,
)
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model
from support.vision_models import draw_picture, prepare, read_vision

SIZES = [(50, 40), (131, 70)]


@pytest.fixture(scope="module", params=SEEING)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Return the kind of a model, its checkpoint and its GGUF file, beside its projector file."""
    kind, folder = request.param, tmp_path_factory.mktemp("seeing")
    make_seeing_model(folder / "model", kind)
    return kind, folder / "model", write_both(folder / "model", folder, kind)


def write_both(source: Path, folder: Path, kind: str) -> Path:
    write_mmproj(source, folder / "mmproj-tiny-F32.gguf", kind)
    return write_seeing_gguf(source, folder / "tiny-F32.gguf", kind)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the GGUF file of a Qwen3-VL whose checkpoint lies beside it; it has no projector file yet."""
    folder = tmp_path_factory.mktemp("qwen")
    make_seeing_model(folder / "model", "qwen3_vl")
    return write_seeing_gguf(folder / "model", folder / "tiny-F32.gguf", "qwen3_vl")


@pytest.fixture
def place(qwen: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a projector's path beside the file, which is free again afterwards."""
    file = qwen.parent / "mmproj-tiny-F16.gguf"
    yield file
    file.unlink(missing_ok=True)


def encoder_of(folder: Path) -> VisionEncoder:
    vision = read_vision(folder)
    assert vision is not None
    return load_vision_encoder(vision, folder, REFERENCE, torch.float32)


def encode(encoder: VisionEncoder, width: int, height: int) -> torch.Tensor:
    steps = encoder.encode(prepare(encoder.vision, draw_picture(width, height))[1])
    while True:
        try:
            next(steps)
        except StopIteration as end:
            rows: torch.Tensor = end.value
            return rows


def test_embeddings_and_tokens_are_those_of_the_checkpoint(
    files: tuple[str, Path, Path], tmp_path: Path
) -> None:
    _, source, file = files
    folder = folder_of(file, tmp_path)
    ours, theirs = encoder_of(folder), encoder_of(source)
    assert ours.vision.tower == theirs.vision.tower
    assert ours.vision.mrope_section == theirs.vision.mrope_section
    assert ours.vision.image_token_id == theirs.vision.image_token_id == 10
    for size in SIZES:
        torch.testing.assert_close(encode(ours, *size), encode(theirs, *size), rtol=1e-5, atol=1e-5)
    shape = parse_config(folder).shape()
    assert shape.vision is not None
    assert shape.vision.params == theirs.vision.num_params
    layout, image = prepare(ours.vision, draw_picture(50, 40))
    prompt = [20, 21, 22, 23, *([10] * layout.num_rows), *range(30, 40)]
    image = replace(image, start=4, num_rows=layout.num_rows, content_hash=b"a" * 32)
    request = replace(ask("a", prompt, 8), images=[image])
    answers = [tokens(load(each, dtype="float32", context=512), [request]) for each in (folder, source)]
    assert answers[0] == answers[1]


def test_a_file_of_ollama_has_its_tower_inside(tmp_path: Path) -> None:
    source = tmp_path / "model"
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}  # as published, but not in the file
    local = {"rope_type": "default", "rope_theta": 1e4}
    make_seeing_model(source, "gemma3", rope={"full_attention": scaled, "sliding_attention": local})
    file = write_ollama_gemma3(source, tmp_path / "sha256-12")
    folder = folder_of(file, tmp_path / "home")
    ours, theirs = encoder_of(folder), encoder_of(source)
    torch.testing.assert_close(encode(ours, 50, 40), encode(theirs, 50, 40), rtol=1e-5, atol=1e-5)
    request = ask("a", [20, 21, 22, 23, *range(30, 60)], 8)
    answers = [tokens(load(each, dtype="float32", context=512), [request]) for each in (folder, source)]
    assert answers[0] == answers[1]
    blind = folder_with_projector(file, NO_PROJECTOR, tmp_path / "home")
    assert "--mmproj none" in find_vision(blind)[1]


@pytest.mark.parametrize("width", ["F16", "Q8_0"])
def test_projectors_of_fewer_bits_are_dequantized(
    qwen: Path, place: Path, tmp_path: Path, width: str
) -> None:
    write_mmproj(qwen.parent / "model", place, "qwen3_vl", width)
    found, expected = (
        encode(encoder_of(each), 131, 70) for each in (folder_of(qwen, tmp_path), qwen.parent / "model")
    )
    difference = (found - expected).abs().mean() / expected.abs().mean()
    assert 0 < difference < (0.002 if width == "F16" else 0.05)


def test_experts_answer_as_without_pictures(qwen: Path, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", arch="qwen3_moe")
    add_image_token(source, "qwen3_vl")
    file = write_gguf(source, tmp_path / "tiny.gguf", arch="qwen3vlmoe")
    projector = write_mmproj(qwen.parent / "model", tmp_path / "mmproj.gguf", "qwen3_vl")
    seeing = folder_with_projector(file, projector, tmp_path / "home")
    assert read_vision(seeing) is not None
    plain = folder_with_projector(file, NO_PROJECTOR, tmp_path / "home")
    answers = [
        tokens(load(each, dtype="float32"), [ask("a", list(range(20, 40)), 8)]) for each in (seeing, plain)
    ]
    assert answers[0] == answers[1]


def test_names_say_which_projector_is_whose() -> None:
    def chosen(model: str, *names: str) -> str | None:
        return choose_projector(model, names)[0]

    assert chosen("a-Q4_K_M.gguf") is None
    assert (
        chosen("a-Q4_K_M.gguf", "mmproj-a-Q8_0.gguf", "mmproj-a-BF16.gguf", "mmproj-a-f16.gguf")
        == "mmproj-a-f16.gguf"
    )
    assert chosen("b-Q4_K_M.gguf", "mmproj-a-F16.gguf", "mmproj-b-Q8_0.gguf") == "mmproj-b-Q8_0.gguf"
    assert chosen("b-4b-it-Q4_K_M-00001-of-00002.gguf", "mmproj-model-f16.gguf") == "mmproj-model-f16.gguf"
    assert chosen("c-Q4_0.gguf", "other.mmproj-F32.gguf") == "other.mmproj-F32.gguf"
    assert chosen("sha256-12", "sha256-34") == "sha256-34"
    name, why = choose_projector("c-Q4_0.gguf", ["x/mmproj-a-F16.gguf", "x/mmproj-b-F16.gguf"])
    assert name is None
    assert "mmproj-a-F16.gguf, mmproj-b-F16.gguf" in why
    assert "--mmproj" in why


def test_a_file_that_does_not_fit_leaves_the_text_and_is_refused_by_name(
    qwen: Path, place: Path, tmp_path: Path
) -> None:
    source = qwen.parent / "model"
    whole = write_mmproj(source, place, "qwen3_vl").read_bytes()
    write_mmproj(source, place, "qwen3_vl", change=lambda n, a: None if n == "mm.2.bias" else a)
    missing = place.read_bytes()
    write_mmproj(source, place, "qwen3_vl", change=lambda n, a: np.zeros(7) if n == "v.blk.1.ln1.bias" else a)
    shape = place.read_bytes()
    cases = {
        "ends beyond the file": whole[:-100],
        "its header is cut short": whole[:200],
        "is not a GGUF file": b"GIF89a",
        "mm.2.bias' is missing": missing,
        "v.blk.1.ln1.bias' has shape [7]": shape,
        "projector 'qwen9vl_merger' is not supported": whole.replace(b"qwen3vl_merger", b"qwen9vl_merger"),
    }
    for words, damaged in cases.items():
        place.write_bytes(damaged)
        folder = folder_of(qwen, tmp_path)
        vision, problem = find_vision(folder)
        assert vision is None
        assert problem == parse_config(folder).image_problem
        assert words in problem
        assert local_facts(directory(folder)).config.vision is None
        with pytest.raises(CliError) as refused:
            folder_with_projector(qwen, place, tmp_path)
        assert words in refused.value.why
    place.write_bytes(whole)
    assert projector_of(folder_with_projector(qwen, place, tmp_path)) == place
    assert "--mmproj none" in find_vision(folder_with_projector(qwen, NO_PROJECTOR, tmp_path))[1]
    with pytest.raises(CliError, match="goes with a GGUF file"):
        folder_with_projector(source, place, tmp_path)
    with pytest.raises(CliError) as refused:
        folder_of(place, tmp_path)
    assert "name the file of the language model" in refused.value.why


def test_a_projector_that_a_newer_version_reads_is_used(
    qwen: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mmproj(qwen.parent / "model", place, "qwen3_vl")

    def refuse(_: object) -> None:
        raise ModelError("projector is not supported")

    for is_asked in (True, False):
        home = tmp_path / str(is_asked)
        with monkeypatch.context() as older:
            older.setattr(projector_code, "family_of", refuse)
            old = folder_of(qwen, home)
            assert "is not supported" in find_vision(old)[1]
            with pytest.raises(CliError):
                folder_with_projector(qwen, place, home)
        written = (old / "config.json").stat().st_mtime_ns
        if is_asked:
            assert projector_of(folder_with_projector(qwen, place, home)) == place
            continue
        assert projector_of(folder_of(qwen, home)) is None, "the version is the same"
        assert (old / "config.json").stat().st_mtime_ns == written
        monkeypatch.setattr(gguf_folders, "__version__", "999")
        new = folder_of(qwen, home)
        assert (new, projector_of(new)) == (old, place)
        assert {path.name for path in home.iterdir()} == {old.parent.name}


@pytest.mark.parametrize(
    ("kind", "metadata", "words"),
    [
        ("qwen3_vl", {"clip.projector_type": ["qwen3vl_merger"]}, "is not supported; supported"),
        ("qwen3_vl", {"clip.vision.is_deepstack_layers": True}, "must be a list, not True"),
        (
            "qwen2_5_vl",
            {"clip.vision.block_count": 2**31 - 1, "clip.vision.n_wa_pattern": 1 << 20},
            "block_count 2147483647 is beyond anything known",
        ),
    ],
)
def test_values_of_another_kind_are_refused(
    tmp_path: Path, kind: str, metadata: dict[str, object], words: str
) -> None:
    make_seeing_model(tmp_path / "model", kind)
    file = write_both(tmp_path / "model", tmp_path, kind)
    projector = read_gguf(tmp_path / "mmproj-tiny-F32.gguf")
    projector = replace(projector, metadata={**projector.metadata, **metadata})
    with pytest.raises(ModelError, match=words):
        config_json(read_gguf(file), None, check_projector(projector))


def test_a_projector_of_another_model_is_refused(qwen: Path, place: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    make_seeing_model(source, "gemma3")
    write_mmproj(source, place, "gemma3")
    assert "is for gemma3, and tiny-F32.gguf is qwen3vl" in find_vision(folder_of(qwen, tmp_path / "home"))[1]
    config = json.loads((qwen.parent / "model" / "config.json").read_text())
    config["text_config"]["hidden_size"] = 96
    for name in ("model.safetensors", "preprocessor_config.json"):
        (source / name).write_bytes((qwen.parent / "model" / name).read_bytes())
    (source / "config.json").write_text(json.dumps(config))
    write_mmproj(source, place, "qwen3_vl")
    assert (
        "has embeddings of 96 numbers, tiny-F32.gguf has 64"
        in find_vision(folder_of(qwen, tmp_path / "home"))[1]
    )


def test_a_file_that_changes_or_goes_makes_another_folder_and_key(
    qwen: Path, place: Path, tmp_path: Path
) -> None:
    without = folder_of(qwen, tmp_path)
    assert "no projector file" in find_vision(without)[1]
    write_mmproj(qwen.parent / "model", place, "qwen3_vl")
    first = folder_of(qwen, tmp_path)
    assert projector_of(first) == place
    assert without.exists()
    vision = read_vision(first)
    assert vision is not None
    keys = {key_of(first), key_of(without)}
    place.write_bytes(place.read_bytes() + b"\0" * 32)
    second = folder_of(qwen, tmp_path)
    assert len(keys | {key_of(second)}) == 3
    assert not first.exists()
    place.write_bytes(place.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="ends beyond the file"):
        load_vision_encoder(vision, second, REFERENCE, torch.float32)
    place.unlink()
    with pytest.raises(ModelError, match="is missing"):
        load_vision_encoder(vision, second, REFERENCE, torch.float32)
    assert folder_of(qwen, tmp_path) == without


def key_of(folder: Path) -> str:
    return PackKey(directory=folder, dtype="float32", quant="none", layout="").digest()


def test_stores_of_ollama_and_lm_studio_have_projectors(qwen: Path, place: Path, tmp_path: Path) -> None:
    write_mmproj(qwen.parent / "model", place, "qwen3_vl")
    folder = tmp_path / "lm" / "org" / "tiny"
    folder.mkdir(parents=True)
    for file in (qwen, place):
        (folder / file.name).write_bytes(file.read_bytes())
    (made,) = find_adoptable(tmp_path / "lm", tmp_path / "home")
    assert (made.name, projector_of(made.path)) == ("tiny-F32", folder / place.name)
    store = tmp_path / "ollama"
    manifest = store / "manifests" / "registry" / "library" / "tiny" / "1b"
    manifest.parent.mkdir(parents=True)
    (store / "blobs").mkdir()
    layers = []
    for digest, file, kind in (("sha256:12", qwen, "model"), ("sha256:34", place, "projector")):
        (store / "blobs" / digest.replace(":", "-")).write_bytes(file.read_bytes())
        layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest})
    manifest.write_text(json.dumps({"layers": layers}))
    (made,) = find_adoptable(store, tmp_path / "home")
    assert made.name == "tiny-1b"
    assert read_vision(made.path) is not None
