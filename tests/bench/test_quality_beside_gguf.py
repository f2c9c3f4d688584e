"""The arithmetic of the comparison with llama.cpp, and which types it takes; most of it needs no libggml."""

import math
import os
from pathlib import Path

import pytest
import torch

from bench.ggml import Ggml, Wide, type_in
from bench.product_error import activations, errors
from bench.quality_beside_gguf import Predictions, bits, calibrated, difference, ours, predictions
from llmbox.engine.quantize.calibration import perplexity
from llmbox.kernels.dispatch import native_ready
from support.real_engines import load
from support.tiny_models import make_tiny_model

NATIVE = pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
PART = "model.layers.{}.{}.weight"


def test_the_types_are_those_that_llama_quantize_took_for_28_layers():
    more = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27}
    for layer in range(28):
        expected = "Q6_K" if layer in more else "Q4_K"
        for part in ("self_attn.v_proj", "mlp.down_proj"):
            assert type_in("Q4_K_M", PART.format(layer, part), 28, 1024) == expected
        assert type_in("Q4_K_M", PART.format(layer, "self_attn.k_proj"), 28, 1024) == "Q4_K"
    assert type_in("Q4_K_M", "model.embed_tokens.weight", 28, 1024) == "Q6_K"
    assert type_in("Q4_0", "model.embed_tokens.weight", 28, 1024) == "Q6_K"


def test_rows_that_no_super_block_divides_take_what_llama_quantize_takes():
    down = [type_in("Q4_K_M", PART.format(layer, "mlp.down_proj"), 4, 640) for layer in range(4)]
    assert down == ["Q5_0", "Q5_0", "Q8_0", "Q8_0"]
    assert type_in("Q4_K_M", PART.format(3, "mlp.down_proj"), 4) == "Q6_K"
    assert type_in("Q4_0", PART.format(3, "mlp.down_proj"), 4, 640) == "Q4_0"
    assert type_in("Q8_0", "model.embed_tokens.weight", 4, 640) == "Q8_0"


def test_a_difference_of_predictions():
    plain = Predictions(
        torch.tensor([0.5, 0.25], dtype=torch.float64).log(), torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    )
    other = Predictions(
        torch.tensor([0.25, 0.25], dtype=torch.float64).log(),
        torch.tensor([[0.75, 0.25], [0.25, 0.75]]).log(),
    )
    told = difference(plain, other)
    assert told.perplexity == pytest.approx(2**0.5 - 1)
    assert told.error == pytest.approx(math.log(2) / 2)
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    second = 0.75 * math.log(3) - 0.25 * math.log(3)
    assert told.divergence == pytest.approx((first + second) / 2)
    assert told.kept == 0.5


def test_an_error_of_products_is_relative_and_counts_inputs_as_often_as_they_come():
    weight, rounded = torch.tensor([[1.0, 2.0]]), Wide(torch.tensor([[1.0, 1.0]]), 0)
    assert errors({"a": (weight, rounded, None)}) == pytest.approx((1 / 5) ** 0.5)
    moment = torch.tensor([[4.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert errors({"a": (weight, rounded, moment)}) == pytest.approx((1 / 8) ** 0.5)
    exact = Wide(weight, 0)
    assert errors({"a": (weight, rounded, None), "b": (weight, exact, None)}) == pytest.approx(0.1**0.5)


@NATIVE
def test_bits_count_scales_and_the_wider_head():
    linear, table = PART.format(0, "mlp.up_proj"), "model.embed_tokens.weight"
    way = ours("int4")
    rounded = {name: way(name, torch.randn(3, 128)) for name in (linear, table)}
    assert [bits({name: each}) for name, each in rounded.items()] == [4.625, 8.125]
    assert bits(rounded) == 6.375


@NATIVE
@pytest.mark.nightly
def test_a_mixed_format_and_a_calibrated_one_take_the_same_bits(tmp_path: Path):
    from safetensors.torch import load_file

    model = make_tiny_model(tmp_path / "model", num_hidden_layers=3, max_position_embeddings=32)
    weights = load_file(model / "model.safetensors")
    ways = ours("int4-mix", 3), calibrated(model, "int4-mix", tmp_path)
    # One group of 96 inputs, and 8 steps.
    for layer, expected, off in ((0, 8 + 16 / 96, 0.01), (1, 4 + (16 + 64) / 96, 0.2)):
        name = PART.format(layer, "mlp.down_proj")
        plain, other = (way(name, weights[name]) for way in ways)
        assert bits({name: plain}) == bits({name: other}) == pytest.approx(expected)
        assert (weights[name] - other.weight_OI).norm() < off * weights[name].norm()


@NATIVE
def test_predictions_are_those_that_perplexity_is_made_of(tmp_path: Path):
    engine = load(make_tiny_model(tmp_path / "model"), context=64)
    sequences = [list(range(3, 20)), [7, 5, 9]]
    found = predictions(engine, sequences)
    assert math.exp(-found.logprobs_T.mean()) == pytest.approx(perplexity(engine, sequences))
    assert found.all_TV.shape[0] == len(found.logprobs_T) + len(sequences)
    assert torch.allclose(found.all_TV.exp().sum(-1), torch.ones(len(found.all_TV)))


def test_activations_are_what_the_first_linear_sees(tmp_path: Path):
    from safetensors.torch import load_file

    model, ids = make_tiny_model(tmp_path / "model"), [3, 4, 5]
    weights = load_file(model / "model.safetensors")
    x = weights["model.embed_tokens.weight"][ids].double()
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    x = x * weights["model.layers.0.input_layernorm.weight"]
    name = PART.format(0, "self_attn.q_proj")
    torch.testing.assert_close(activations(model, [ids], [name])[name], x.T @ x, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif("LLAMA_CPP_BIN" not in os.environ, reason="LLAMA_CPP_BIN names no llama.cpp libraries")
def test_llama_cpp_rounds_a_block_as_its_format_says():
    ggml = Ggml(Path(os.environ["LLAMA_CPP_BIN"]))
    block = torch.linspace(-8, 7.5, 32)[None]
    wide = ggml.rounded(block, "Q4_0")
    assert wide.bits == 32 * 4.5
    assert torch.equal(wide.weight_OI, torch.clamp((block + 8.5).floor(), max=15) - 8)
    padded = ggml.padded(torch.randn(2, 640), "Q4_K")
    assert padded.weight_OI.shape == (2, 640)
    assert padded.bits == 2 * 640 * 4.5
