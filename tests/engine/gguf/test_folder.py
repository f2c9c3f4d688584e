"""GGUF files as they are: tokens as after an import, own integers where a kernel has them, bad files."""

from pathlib import Path

import pytest

from llmbox.app.errors import CliError
from llmbox.app.models.catalog import describe, directory
from llmbox.app.models.gguf_folders import folder_of
from llmbox.engine.gguf.folder import gguf_of
from llmbox.engine.gguf.reader import read_gguf
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.quantize.convert_gguf import convert
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.quant_formats import QUANTS
from support.gguf_models import ARCHITECTURES, write_gguf
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

PROMPT = list(range(5, 25))
SAID_BY_NOBODY = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 5},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
}
needs_kernels = pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")


def answer(model: Path, **options) -> list[int]:
    return tokens(load(model, **options), [ask("a", PROMPT, 12)])["a"]


def imported(file: Path, out: Path, to: str | None = None) -> Path:
    convert(read_gguf(file), out, None if to is None else QUANTS[to], None, 1, lambda _done, _total: None)
    return out


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_floats_answer_as_the_source(tmp_path: Path, arch: str) -> None:
    source = make_tiny_model(tmp_path / "model", arch=arch, **SAID_BY_NOBODY.get(arch, {}))
    folder = folder_of(write_gguf(source, tmp_path / "tiny.gguf"), tmp_path / "home")
    assert folder.name == "tiny"
    assert {file.suffix for file in folder.iterdir()} == {".json", ".gguf"}
    assert answer(folder) == answer(source)


@needs_kernels
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_blocks_are_rounded_to_the_model_s_dtype_once(tmp_path: Path, kind: str) -> None:
    source = make_tiny_model(tmp_path / "model", arch="qwen2", intermediate_size=128)
    file = write_gguf(source, tmp_path / "tiny.gguf", kind)
    folder = folder_of(file, tmp_path / "home")
    config = parse_config(folder)
    assert (config.dtype, config.quant) == ("bfloat16", None)
    wide = imported(file, tmp_path / "wide")
    assert answer(folder) == answer(wide)
    assert answer(folder, quant="int8") == answer(wide, quant="int8")


@needs_kernels
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_q8_0_is_computed_in_its_own_integers(tmp_path: Path, arch: str) -> None:
    source = make_tiny_model(tmp_path / "model", arch=arch)
    file = write_gguf(source, tmp_path / "tiny.gguf", "Q8_0")
    folder = folder_of(file, tmp_path / "home")
    config = parse_config(folder)
    if arch == "llama":
        assert config.quant == "int8-g32"
        assert answer(folder) == answer(imported(file, tmp_path / "out", "int8-g32"))
    assert len(answer(folder)) == 12


@needs_kernels
def test_ranks_read_their_shards(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", arch="llama", num_key_value_heads=2)
    folder = folder_of(write_gguf(source, tmp_path / "tiny.gguf"), tmp_path / "home")
    assert answer(folder, tp=2, threads=2) == answer(source, tp=2, threads=2)


def test_a_folder_is_made_once_and_anew_when_the_file_changes(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model")
    file, home = write_gguf(source, tmp_path / "tiny.gguf", parts=2), tmp_path / "home"
    folder = folder_of(file, home)
    assert folder_of(file, home) == folder
    assert gguf_of(folder) == file
    file.write_bytes(file.read_bytes() + b"\0" * 32)
    assert folder_of(file, home) != folder
    assert not folder.exists()


def test_bad_files_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    source, home = make_tiny_model(tmp_path / "model", arch="llama"), tmp_path / "home"
    file = write_gguf(source, tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    cases = {
        "cut short": whole[:1000],
        "gpt-9": whole.replace(b"gpt-2", b"gpt-9"),
        "llamb": whole.replace(b"llama", b"llamb"),
    }
    for words, damaged in cases.items():
        file.write_bytes(damaged)
        with pytest.raises(CliError) as refused:
            folder_of(file, home)
        assert words in refused.value.why
        assert not home.exists() or list(home.iterdir()) == []


def test_a_repository_s_own_gguf_file_does_not_hide_its_safetensors(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    (tmp_path / "blob").write_bytes(b"GGUF")
    (model / "model.gguf").symlink_to(tmp_path / "blob")
    assert gguf_of(model) is None
    assert describe(directory(model)).servable
    (model / "model.safetensors").unlink()
    assert not describe(directory(model)).servable
