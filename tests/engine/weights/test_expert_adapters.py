"""Adapters of experts and routers beside PEFT on tiny models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbox.engine.checkpoint.adapter import AdapterError, read_adapter
from llmbox.engine.core.adapter_slots import AdapterSlots
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.model.registry import build_model
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.quantize.merge_adapter import ShapeSource, check_adapter
from llmbox.engine.weights.adapter_weights import AdapterReader
from llmbox.engine.weights.adapters import AdapterLayers
from llmbox.kernels.reference import REFERENCE
from support.adapters import make_adapter, plain_tensors, write_adapter
from support.lanes import nightly
from support.rank_threads import load_ranks
from support.real_engines import ask, hf_model, hf_tokens, load, runner_of, tokens
from support.tiny_models import make_tiny_model

PROMPT = [5, 9, 77, 31, 200, 4, 8, 250, 17]
NEW = 8
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "all linears": {"r": 4},
    "experts": {"r": 3, "target_modules": [], "target_parameters": FUSED},
    "one tensor": {"r": 2, "target_modules": ["q_proj"], "target_parameters": FUSED[1:]},
    "routers": {"target_modules": [], "target_parameters": ["mlp.gate.weight"]},
}


def adapted(folder: Path, request: AddRequest) -> AddRequest:
    return replace(request, adapter=str(folder))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), arch="qwen3_moe", tokenizer=False)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), arch="mixtral", tokenizer=False)


@pytest.fixture(scope="module")
def three(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of several ranks and targets."""
    home = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("all linears", "experts", "one tensor")):
        make_adapter(hf_model(qwen), home / str(number), seed=number, **KINDS[name])
    return [home / str(number) for number in range(3)]


@pytest.mark.parametrize("arch", ["qwen", "mixtral"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_peft(
    request: pytest.FixtureRequest, tmp_path: Path, arch: str, kind: str
) -> None:
    model = request.getfixturevalue(arch)
    peft = make_adapter(hf_model(model), tmp_path / "a", **KINDS[kind])
    asked = [adapted(tmp_path / "a", ask("with", PROMPT, NEW)), ask("without", PROMPT, NEW)]
    found = tokens(load(model, dtype="float32"), asked)
    assert found["with"] == hf_tokens(peft, PROMPT, NEW)
    assert found["without"] == hf_tokens(hf_model(model), PROMPT, NEW)
    assert found["with"] != found["without"]


def requests(three: list[Path]) -> list[AddRequest]:
    made = []
    for n in range(13):
        request = ask(f"r{n}", [(n * 37 + k * k * 11) % 300 + 3 for k in range(1 + n * 2 % 29)], 5)
        made.append(request if n % 4 == 3 else adapted(three[n % 4], request))
    return made


@pytest.mark.parametrize(
    "weights",
    [
        {"dtype": "bfloat16", "quant": "int8"},
        nightly({"dtype": "float32"}),
        nightly({"dtype": "bfloat16", "quant": "int4"}),
        nightly({"dtype": "bfloat16"}),
    ],
)
def test_tokens_are_those_of_the_request_alone(
    qwen: Path, three: list[Path], weights: dict[str, str]
) -> None:
    alone: dict[str, list[int]] = {}
    engine = load(qwen, max_running=1, prefix_cache=False, **weights)
    for request in requests(three):
        alone |= tokens(engine, [request])
    ways: list[dict[str, Any]] = [
        {"max_running": 13, "token_budget": 512, "threads": 2},
        {"max_running": 5, "token_budget": 16},
    ]
    for way in ways:
        assert tokens(load(qwen, **weights, **way), requests(three)) == alone, way


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}, {"tp": 2, "expert_parallel": True}])
def test_ranks_have_their_slices(
    qwen: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    some = requests(three)[:5]
    engine = load_ranks(qwen, monkeypatch, dtype="float32", **options)
    engine.scheduler.kv_cache.adapters = AdapterSlots(4, 1 << 30)
    assert tokens(engine, some) == tokens(load(qwen, dtype="float32"), some)


def layers_of(model: Path) -> AdapterLayers:
    layers = runner_of(load(model, dtype="float32"))._model.adapters
    assert isinstance(layers, AdapterLayers)
    return layers


def sizes(model: Path) -> tuple[int, int, int]:
    """Experts, hidden and inner."""
    found = next(iter(layers_of(model)._experts.values()))
    hidden, inner = found.downs.shape
    return len(found.downs.linears), hidden, inner


def test_single_experts_are_those_of_all_in_one_tensor(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PEFT wrote them before experts were one tensor. Ranks with some experts whole take theirs."""
    count, hidden, inner = sizes(qwen)
    torch.manual_seed(1)
    single: dict[str, torch.Tensor] = {}
    many_a, many_b = [], []
    for expert in range(count):
        at = f"base_model.model.model.layers.0.mlp.experts.{expert}.down_proj"
        single[f"{at}.lora_A.weight"] = a = torch.randn(4, inner) * 0.4
        single[f"{at}.lora_B.weight"] = b = torch.randn(hidden, 4) * 0.4
        many_a.append(a)
        many_b.append(b)
    at = "base_model.model.model.layers.0.mlp.experts"
    fused = {
        f"{at}.lora_A.weight": torch.cat(many_a),
        f"{at}.lora_B.weight": torch.stack(many_b, 2).reshape(hidden, -1).contiguous(),
    }
    write_adapter(tmp_path / "single", single)
    write_adapter(tmp_path / "fused", fused, target_parameters=FUSED[1:])
    asked = [adapted(tmp_path / name, ask(name, PROMPT, NEW)) for name in ("single", "fused")]
    found = tokens(load(qwen, dtype="float32"), [*asked, ask("base", PROMPT, NEW)])
    assert found["single"] == found["fused"] != found["base"]
    engine = load_ranks(qwen, monkeypatch, dtype="float32", tp=2, expert_parallel=True)
    engine.scheduler.kv_cache.adapters = AdapterSlots(4, 1 << 30)
    assert tokens(engine, asked) == {name: found[name] for name in ("single", "fused")}


def test_an_adapter_of_another_number_of_experts(qwen: Path, tmp_path: Path) -> None:
    count, hidden, inner = sizes(qwen)
    layers = layers_of(qwen)
    name = "model.layers.0.mlp.experts"
    tensors = plain_tensors(inner, hidden, 4 * (count + 1), name)
    folder = write_adapter(tmp_path / "more", tensors, target_parameters=FUSED)
    with pytest.raises(AdapterError, match=r"ranks of all experts, and .* the adapter is of another base"):
        layers.match(read_adapter(folder))
    tensors = plain_tensors(inner + 1, hidden, 4 * count, name)
    folder = write_adapter(tmp_path / "wide", tensors, target_parameters=FUSED)
    with pytest.raises(AdapterError, match="the adapter is of another base"):
        layers.match(read_adapter(folder))
    tensors = plain_tensors(inner, hidden, 4 * count, name)
    tensors |= plain_tensors(inner, hidden, 4 * count, f"{name}.base_layer")
    folder = write_adapter(tmp_path / "twice", tensors, target_parameters=FUSED)
    with pytest.raises(AdapterError, match="another tensor adapts the same experts"):
        layers.match(read_adapter(folder))
    tensors = plain_tensors(inner, hidden, 4 * count, name)
    tensors |= plain_tensors(inner, hidden, 4, f"{name}.1.down_proj")
    folder = write_adapter(tmp_path / "both", tensors, target_parameters=FUSED)
    with pytest.raises(AdapterError, match="another tensor adapts all experts"):
        layers.match(read_adapter(folder))


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_experts_in_one_linear_are_those_apart(tmp_path: Path, arch: str) -> None:
    """Kernels of GPUs have one linear for all experts of a layer; also with gates and ups that alternate, and
    without gates.
    """
    config = parse_config(make_tiny_model(tmp_path, arch=arch, tokenizer=False))
    found = []
    for pack_experts in (None, lambda *_: None):
        source: Any = ShapeSource()
        source.ops = replace(REFERENCE, pack_experts=pack_experts)
        layers: Any = build_model(config, source)
        found.append(layers.adapters._experts)
    apart, together = found
    assert apart
    assert apart.keys() == together.keys()
    for name, experts in apart.items():
        for one, other in (
            (experts.gate_ups, together[name].gate_ups),
            (experts.downs, together[name].downs),
        ):
            assert [each.asked.outputs for each in one.linears] == [e.asked.outputs for e in other.linears]
            assert [each.asked.order for each in one.linears] == [e.asked.order for e in other.linears]
        assert len(together[name].mixture.gate_ups) == 1


def test_adapters_of_all_experts_are_checked_before_a_request(qwen: Path, three: list[Path]) -> None:
    assert check_adapter(qwen, three[1]).rank == 3


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize("arch", ["gpt_oss", "llama4_text", *map(nightly, ("qwen2_moe", "deepseek_v3"))])
def test_experts_of_other_architectures(tmp_path: Path, arch: str) -> None:
    """Gates and ups that alternate; inputs that are scaled, with inputs and outputs of an adapter in each
    other's place, also of square ones; corrected choices.
    """
    model = make_tiny_model(tmp_path / "base", arch=arch, tokenizer=False)
    peft = make_adapter(
        hf_model(model), tmp_path / "a", r=4, target_modules=["q_proj"], target_parameters=EXPERTS
    )
    asked = [adapted(tmp_path / "a", ask("with", PROMPT, NEW)), ask("without", PROMPT, NEW)]
    found = tokens(load(model, dtype="float32"), asked)
    assert found["with"] == hf_tokens(peft, PROMPT, NEW) != found["without"]


@pytest.mark.parametrize("turned", [False, True])
def test_shapes_tell_which_way_round_an_adapter_of_llama4_is(tmp_path: Path, turned: bool) -> None:
    """Versions of PEFT differ, and squares are as the newest has them. Other bases take one way alone."""
    for arch, is_taken in (("llama4_text", True), ("qwen3_moe", not turned)):
        model = make_tiny_model(tmp_path / arch, arch=arch, tokenizer=False)
        layers = layers_of(model)
        name = next(iter(layers._experts))
        stack = layers._experts[name].downs
        count, (hidden, inner) = len(stack.linears), stack.shape
        sizes = (hidden, inner) if turned else (inner, hidden)
        tensors = plain_tensors(*sizes, 4 * count, name)
        config = {"target_parameters": ["experts.down_proj"]}
        adapter = read_adapter(write_adapter(tmp_path / "a", tensors, **config))
        if not is_taken:
            with pytest.raises(AdapterError, match="the adapter is of another base"):
                layers.match(adapter)
            continue
        found = stack.read_all(adapter.targets[name], AdapterReader(torch.float32))
        assert (found.weights.a_RI.shape, found.weights.pieces[0].b_Or.shape) == (
            (count, 4, inner),
            (count, hidden, 4),
        )
        delta = found.weights.pieces[0].b_Or @ found.weights.a_RI
        a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        wanted = torch.einsum("ore,eri->eoi", b.view(-1, 4, count), a.view(count, 4, -1))
        torch.testing.assert_close(delta, wanted.transpose(1, 2) if turned else wanted)
