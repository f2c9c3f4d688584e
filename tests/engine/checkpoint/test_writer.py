"""Checkpoints are written by `tensor_io.py`: as safetensors, and without numpy."""

import contextvars
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from llmbox.engine.checkpoint.safetensors import read_header
from llmbox.engine.checkpoint.tensor_io import ShardWriter, write_file
from llmbox.engine.ipc.spawn import ReportProgress, run_job
from llmbox.kernels.cpu.build import compile_progress
from llmbox.kernels.dispatch import native_ready
from support.gguf_models import write_gguf
from support.tiny_models import make_tiny_model

WITHOUT = """
import runpy, sys
sys.modules |= dict.fromkeys(("numpy", "safetensors", "gguf", "transformers"))  # None: importing them fails
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "b.weight": torch.randn(3, 5),
        "a.weight": torch.randn(7, 2).to(torch.bfloat16),
        "half": torch.randn(4).to(torch.float16),
        "codes": torch.randint(-128, 128, (5, 3), dtype=torch.int8),
        "packed": torch.randint(0, 256, (3,), dtype=torch.uint8),
        "eight": torch.randn(2, 3).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
        "one": torch.tensor(2.5),
    }


def test_a_file_is_read_by_the_package_as_it_was_written(tmp_path: Path) -> None:
    write_file(some_tensors(), tmp_path / "file")
    got = load_file(tmp_path / "file")
    assert set(got) == set(some_tensors())
    for name, tensor in some_tensors().items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(got[name].float(), tensor.float())
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_begin_at_multiples_of_their_elements(tmp_path: Path) -> None:
    write_file(some_tensors(), tmp_path / "file")
    raw = (tmp_path / "file").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in some_tensors().items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


def test_parts_of_other_tensors_are_written_alone(tmp_path: Path) -> None:
    table = torch.arange(12.0).view(3, 4)
    writer = ShardWriter(tmp_path)
    writer.add({"columns": table[:, 1:3], "row": table[2], "turned": table.T})
    writer.finish()
    got = load_file(tmp_path / "model.safetensors")
    assert torch.equal(got["columns"], table[:, 1:3])
    assert torch.equal(got["row"], table[2])
    assert torch.equal(got["turned"], table.T)
    assert set(read_header(tmp_path / "model.safetensors")) == {"columns", "row", "turned"}


def run_without(*arguments: object) -> dict:
    """The report of a process in which nothing but runtime dependencies can be imported."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    last = json.loads((done.stdout.splitlines() or ["{}"])[-1])
    assert "report" in last, done.stdout + done.stderr
    return last["report"]


def test_a_job_tells_how_far_a_compile_is(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass
    class Nothing:
        bytes_after: int = 0

    def work(_tell: ReportProgress) -> Nothing:
        compile_progress.get()(1, 3)
        return Nothing()

    assert contextvars.copy_context().run(run_job, work) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"compiling": [1, 3]}, {"report": {"bytes_after": 0}}]


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
def test_quantizing_needs_no_numpy(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model")
    run_without("llmbox.engine.quantize.quantize", source, tmp_path / "out", "int8", "--threads", 1)
    assert read_header(tmp_path / "out/model.safetensors")


def test_importing_needs_no_numpy(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(make_tiny_model(tmp_path / "model"), file)
    run_without("llmbox.engine.quantize.convert_gguf", file, tmp_path / "out", "none", "--threads", 1)
    assert read_header(tmp_path / "out/model.safetensors")
