"""The whole engine on Triton's kernels gives the tokens that it gives on the reference."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.engine.executor import rank_engine as loader
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.cpu.isa import usable_levels
from llmbox.kernels.dispatch import QuantUnavailable, UnknownBackend, select_ops
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.triton import backend
from llmbox.kernels.triton.linear import tile_config as tiles
from llmbox.kernels.triton.linear.linear import W8A8Linear, WeightOnlyIntLinear
from support.fake_quantized import fake_quantized_ops
from support.fp8_checkpoint import compressed, round_by_output, round_to_blocks, spread
from support.lanes import nightly
from support.real_engines import ask, load, runner_of, tokens
from support.tiny_models import make_tiny_model

PROMPTS = {"a": range(3, 22), "b": [5, 9, 11]}


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("qwen3", {"dtype": "float32"}),
        ("llama", {"dtype": "float32", "deterministic": True}),
        ("qwen3_moe", {"dtype": "float32"}),
        # Kernels of those above, in another order or with multipliers.
        *(nightly(arch, {"dtype": "float32"}) for arch in ("smollm3", "olmo2", "granite")),
        ("gemma2", {"dtype": "float32"}),
        ("gemma3_text", {"dtype": "float32", "deterministic": True}),
        ("gpt_oss", {"dtype": "float32"}),
        ("qwen2_moe", {"dtype": "float32", "deterministic": True}),
        ("deepseek_v3", {"dtype": "float32", "deterministic": True}),
        ("cohere", {"dtype": "float32"}),
    ],
)
def test_tokens_are_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, options: dict[str, object]
) -> None:
    layers = {"gemma3_text": 3, "gemma2": 2, "gpt_oss": 2, "qwen2_moe": 2, "deepseek_v3": 2}.get(
        arch, 1
    )  # each kind
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False, num_hidden_layers=layers, vocab_size=99)
    requests = [ask(name, prompt, 3) for name, prompt in PROMPTS.items()]
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    expected = tokens(load(model, dtype="float32"), requests)
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    engine = load(model, **options)
    assert engine.info.backend == "triton"
    assert tokens(engine, requests) == expected


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.usefixtures("_asked_for")
def test_blocks_of_a_checkpoint_and_blocks_made_at_load_answer_alike(tmp_path: Path, stored: bool) -> None:
    """The rounded weights, made wide again, are rounded to the same."""
    sizes = {"hidden_size": 160, "intermediate_size": 192, "num_hidden_layers": 1, "vocab_size": 99}
    model = make_tiny_model(tmp_path, tokenizer=False, **sizes)
    wide = round_to_blocks(model)
    if not stored:
        weights = {
            name: wide.get(name, tensor)
            for name, tensor in load_file(model / "model.safetensors").items()
            if not name.endswith("_scale_inv")
        }
        save_file(weights, model / "model.safetensors")
        config = json.loads((model / "config.json").read_text())
        del config["quantization_config"]
        (model / "config.json").write_text(json.dumps(config))
    engine = load(model, dtype="float32", quant="auto" if stored else "fp8-block")
    assert engine.info.backend == "triton, fp8-block weights"
    down = runner_of(engine)._model.layers[0].mlp.down
    assert down.weight_OI.dtype == torch.float8_e4m3fn
    exact = wide["model.layers.0.mlp.down_proj.weight"]
    got = down.weight_OI.float() * spread(down.scales, exact.shape)
    torch.testing.assert_close(got, exact, rtol=1e-6, atol=0)
    assert len(tokens(engine, [ask("a", [5, 9, 11], 2)])["a"]) == 2


@pytest.mark.parametrize(
    ("entry", "shape", "given", "keeps"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, (), {"o_proj": 0.01}, ()),
        (compressed("channel"), (-1, 1), None, ()),
        (compressed("channel", ignore=["re:.*"]), (-1, 1), None, ("down_proj", "q_proj", "k_proj", "v_proj")),
    ],
)
@pytest.mark.usefixtures("_asked_for")
def test_tensors_of_e4m3_answer_as_plain_torch_has_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entry: dict[str, object],
    shape: tuple[int, ...],
    given: dict[str, float] | None,
    keeps: tuple[str, ...],
) -> None:
    """Some keep linears wide."""
    model = make_tiny_model(tmp_path, tokenizer=False, num_hidden_layers=1, vocab_size=99)
    round_by_output(model, entry, shape=shape, given=given, keeps=keeps)
    requests = [ask(name, prompt, 3) for name, prompt in PROMPTS.items()]
    engine = load(model, dtype="float32")
    quant = QUANTS[engine.info.quant]
    assert engine.info.backend == f"triton, {quant.name} weights"
    found = tokens(engine, requests)
    monkeypatch.setattr(loader, "select_ops", lambda *_, **__: fake_quantized_ops(quant))
    assert tokens(load(model, dtype="float32"), requests) == found


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.usefixtures("_asked_for")
def test_experts_of_e4m3_answer_as_plain_torch_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, static: bool
) -> None:
    """Blocks of 128 outputs that no expert's 48 fill, and scales of activations that all of a layer share."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, "vocab_size": 99}
    model = make_tiny_model(tmp_path, arch="qwen3_moe", tokenizer=False, **sizes)
    if static:
        round_by_output(model, {"quant_method": "fp8", "activation_scheme": "static"}, given={})
    else:
        round_to_blocks(model)
    requests = [ask(name, prompt, 3) for name, prompt in PROMPTS.items()]
    engine = load(model, dtype="float32")
    quant = QUANTS[engine.info.quant]
    found = tokens(engine, requests)
    monkeypatch.setattr(loader, "select_ops", lambda *_, **__: fake_quantized_ops(quant))
    assert tokens(load(model, dtype="float32"), requests) == found


@pytest.mark.usefixtures("_asked_for")
def test_a_checkpoint_of_integers_runs_on_these_kernels(tmp_path: Path) -> None:
    """With the integers that `llmbox quantize` wrote; int8 ones also with rows of 8 bits."""
    if not usable_levels():
        pytest.skip("needs the C++ kernels to make it")
    model = make_tiny_model(tmp_path / "model", tokenizer=False, num_hidden_layers=1, vocab_size=99)
    with pytest.MonkeyPatch.context() as cpu:
        cpu.delenv("LLMBOX_KERNELS")
        quantize(model, tmp_path / "out", QUANTS["int8"], 1, lambda _done, _total: None)
    codes = load_file(tmp_path / "out/model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    for quant, kind in (("auto", WeightOnlyIntLinear), ("w8a8", W8A8Linear)):
        engine = load(tmp_path / "out", dtype="float32", quant=quant)
        down = runner_of(engine)._model.layers[0].mlp.down
        assert type(down) is kind
        assert torch.equal(down.weight.weight.transpose(0, 1).flatten(1)[:, :96], codes)
        assert len(tokens(engine, [ask("a", [5, 9, 11], 2)])["a"]) == 2


@pytest.fixture
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")


@pytest.mark.usefixtures("_asked_for")
def test_a_machine_where_no_kernel_runs_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: torch.Tensor, _activation: str) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr(backend.elementwise, "gate_mul", broken)
    with pytest.raises(UnknownBackend, match=r"failed: RuntimeError: Failed to find C compiler$"):
        select_ops(torch.device("cpu"), torch.float32)


@pytest.mark.usefixtures("_asked_for")
def test_on_a_cpu_only_the_interpreter_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_ops(torch.device("cpu"), torch.float32).name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UnknownBackend, match="TRITON_INTERPRET=1 only"):
        select_ops(torch.device("cpu"), torch.float32)


@pytest.mark.usefixtures("_asked_for")
def test_fp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "has_fp8", lambda _: False)
    with pytest.raises(QuantUnavailable, match="compute capability"):
        select_ops(torch.device("cpu"), torch.float32, quant=QUANTS["fp8"])
