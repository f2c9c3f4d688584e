"""Hybrids of attention and recurrent layers: one request, one answer; known prefixes are gone on from."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.kv_cache.block_pool import BlockPool
from llmbox.engine.core.request import Request
from llmbox.engine.core.scheduler import Scheduler
from llmbox.engine.core.speculation.proposer import Proposals
from llmbox.engine.core.speculation.text_drafting import NgramProposer
from llmbox.engine.errors import ModelError, ParallelError
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.expected_tensors import check_weights
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.quant_formats import QUANTS
from support.families import make_family
from support.real_engines import ask, compare, draft_at_no_price, hf_model, load, run, tokens

HYBRIDS = [
    "lfm2",
    "lfm3",
    "qwen3_5_text",
    "granitemoehybrid",
    "falcon_h1",
    "nemotron_h",
    "kimi_linear",
    "olmo_hybrid",
    "jamba",
]
LONG = ask("long", [3 + i * 7 % 300 for i in range(101)], 24, temperature=0.8, seed=4)
OTHERS = [ask(f"other {i}", range(5 + i, 25 + 2 * i), 12, temperature=0.9, seed=i) for i in range(32)]


@pytest.fixture(scope="module", params=HYBRIDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp(request.param), request.param, max_position_embeddings=512)


@pytest.fixture(scope="module")
def alone(model: Path) -> list[int]:
    return tokens(load(model, dtype="bfloat16"), [LONG])["long"]


def named(name: str, request: AddRequest, **changes: Any) -> AddRequest:
    return replace(request, request_id=name, **changes)


@pytest.mark.parametrize("options", [{}, {"token_budget": 33}, {"prefix_cache": False}], ids=str)
def test_alone_and_in_a_batch_of_33(model: Path, alone: list[int], options: dict[str, Any]) -> None:
    engine = load(model, dtype="bfloat16", max_running=33, **options)
    assert tokens(engine, [*OTHERS[:16], LONG, *OTHERS[16:]])["long"] == alone
    assert tokens(engine, [named("again", LONG)])["again"] == alone


def test_after_preemption(model: Path, alone: list[int]) -> None:
    engine = load(model, dtype="bfloat16")
    config = replace(engine.scheduler.config, context=160, watermark=0.0, premium_share=0.0)
    engine.scheduler = Scheduler(config, BlockPool(12, 16))
    assert tokens(engine, [*OTHERS[:6], LONG])["long"] == alone
    assert engine.stats().preemptions > 0
    engine.scheduler.check()


def test_resumed_on_another_engine(model: Path, alone: list[int]) -> None:
    cut = replace(LONG, output_ids=alone[:9])
    assert tokens(load(model, dtype="bfloat16", token_budget=33), [cut])["long"] == alone[9:]


def computed(engine: Engine, request: AddRequest) -> int:
    """Prompt tokens that were computed for a request."""
    (first, *_) = run(engine, [request])[request.request_id]
    assert first.cached_tokens is not None
    return len(request.prompt_ids) - first.cached_tokens


def test_a_second_turn_goes_on_from_the_first(model: Path) -> None:
    engine = load(model, dtype="bfloat16")
    turn = named("first", LONG, params=replace(LONG.params, max_tokens=75))
    history = LONG.prompt_ids + tokens(engine, [turn])["first"] + [9, 8, 7]
    second = ask("second", history, 8)
    expected = tokens(load(model, dtype="bfloat16", prefix_cache=False), [second])
    assert computed(engine, named("probe", second)) <= 64
    assert tokens(engine, [second]) == expected


def test_an_edit_and_a_branch_are_known_the_next_time(model: Path) -> None:
    engine = load(model, dtype="bfloat16")
    run(engine, [LONG])
    edited = [*LONG.prompt_ids[:70], *[11] * 31]
    assert computed(engine, ask("edit", edited, 1)) <= 64, "no state was kept close to the edit"
    assert computed(engine, ask("other edit", [*edited[:66], *[12] * 20], 1)) <= 64
    branch = ask("branch", [*LONG.prompt_ids, 5, 6], 8)
    assert computed(engine, named("probe", branch)) <= 64
    assert tokens(engine, [branch]) == tokens(load(model, dtype="bfloat16"), [branch])


def test_answers_to_one_prompt_share_its_states(model: Path) -> None:
    engine = load(model, dtype="bfloat16")
    forks = [
        named(f"fork {i}", LONG, fork_of="long", params=replace(LONG.params, seed=i)) for i in range(1, 4)
    ]
    found = run(engine, [LONG, *forks])
    for fork in forks:
        assert found[fork.request_id][0].cached_tokens == 96
        apart = tokens(load(model, dtype="bfloat16"), [replace(fork, fork_of=None)])
        assert [t for output in found[fork.request_id] for t in output.token_ids] == apart[fork.request_id]
    engine.scheduler.check()


def test_few_slots_bound_how_many_run(model: Path, alone: list[int]) -> None:
    engine = load(model, dtype="bfloat16")
    config = replace(engine.scheduler.config, state_slots=3)
    engine.scheduler = Scheduler(config, BlockPool(400, 16))
    for request in [LONG, *OTHERS[:8]]:
        engine.add(request)
    found: list[int] = []
    while engine.has_work:
        outputs = engine.step().outputs
        found += [token for output in outputs if output.request_id == "long" for token in output.token_ids]
        assert engine.stats().running <= 3
        engine.scheduler.check()
    assert found == alone


def test_drafts_change_no_token(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of which the first two are right: the state goes back behind the others."""
    asks = [ask(f"r{n}", range(5, 9 + 7 * n), 40, temperature=0.7, seed=n) for n in range(4)]
    expected = tokens(load(model, dtype="bfloat16", speculate="off"), asks)
    answers = [[*each.prompt_ids, *expected[each.request_id]] for each in asks]

    def propose(_self: NgramProposer, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        drafts = []
        for request, most in wanted:
            ids = request.token_ids
            known = next(answer for answer in answers if answer[: len(ids)] == ids)
            drafts.append([*known[len(ids) : len(ids) + 2], 3, 4, 5][:most])
        return Proposals(drafts, matches=[16] * len(drafts))

    monkeypatch.setattr(NgramProposer, "propose", propose)
    draft_at_no_price(monkeypatch)
    engine = load(model, dtype="bfloat16", speculate="on")
    for request in asks:
        assert tokens(engine, [request]) == {request.request_id: expected[request.request_id]}
    assert tokens(engine, [named(f"again {each.request_id}", each) for each in asks]) == {
        f"again {name}": found for name, found in expected.items()
    }
    assert engine.stats().draft_tokens > engine.stats().accepted_tokens > 100
    turn = ask("turn", [*answers[3], 7, 8], 1)
    assert computed(engine, turn) <= 64
    engine.scheduler.check()


def test_where_steps_are_launched_ahead(model: Path, alone: list[int]) -> None:
    engine = load(model, dtype="bfloat16", overlap=True, max_running=33, token_budget=33)
    assert tokens(engine, [*OTHERS[:16], LONG, *OTHERS[16:]])["long"] == alone
    assert computed(engine, named("probe", LONG)) <= 64
    assert tokens(engine, [named("again", LONG)])["again"] == alone
    engine.scheduler.check()


def test_what_cannot_run_is_refused(model: Path) -> None:
    with pytest.raises(ParallelError, match=r"shared equally|norms its queries over all heads"):
        load(model, tp=3)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"layer_types": ["conv"] * 4}, "no layer has attention"),
        ({"layer_types": ["conv", "full_attention"]}, "for each of 4 layers"),
        ({"layer_types": None, "full_attn_idxs": [7]}, "full_attn_idxs must be a list of layers below 4"),
        ({"conv_L_cache": 40}, "conv_L_cache 40 is not supported, only 2 to 8"),
    ],
)
def test_bad_configs_of_short_convolutions(tmp_path: Path, overrides: dict[str, Any], problem: str) -> None:
    refuse("lfm2", tmp_path, overrides, problem)


def test_bad_configs_of_memories(tmp_path: Path) -> None:
    refuse(
        "qwen3_5_text", tmp_path, {"linear_num_value_heads": 3}, "is not a multiple of linear_num_key_heads"
    )
    refuse("granitemoehybrid", tmp_path, {"num_local_experts": 1}, "num_experts_per_tok 2 is more than")
    refuse("granitemoehybrid", tmp_path, {"mamba_n_heads": 7}, "mamba_n_heads 7 must divide")
    refuse("granitemoehybrid", tmp_path, {"mamba_d_head": 5}, "mamba_d_head 5 is not 16")
    for limits in ([2.0, 1.0], [0.0, "x"], [0.0, {"__float__": "NaN"}], 3):
        refuse("granitemoehybrid", tmp_path, {"time_step_limit": limits}, "time_step_limit .* two ascending")


@pytest.mark.parametrize(
    ("arch", "overrides", "problem"),
    [
        (
            "nemotron_h",
            {"layers_block_type": ["full_attention", "rnn"]},
            "layers_block_type must name the kind",
        ),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M-X"},
            "override_pattern must",
        ),
        ("nemotron_h", {"layers_block_type": ["mlp", "linear_attention"]}, "no layer has attention"),
        ("nemotron_h", {"layers_block_type": None}, "hybrid_override_pattern is missing"),
        ("nemotron_h", {"mamba_num_heads": 5}, "must .* be a multiple of mamba_n_groups"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "hidden_act 'silu' is not supported, only 'relu2'"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu'"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias is not supported with experts"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers must have 5 numbers, not 2"),
        ("falcon_h1", {"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers 0.0 must be between"),
        ("falcon_h1", {"mamba_d_ssm": 97}, "mamba_n_heads 8 must divide mamba_d_ssm 97"),
        ("falcon_h1", {"attention_bias": True}, "attention_in_multiplier with attention_bias"),
        ("bamba", {"attn_layer_indices": [3]}, "attn_layer_indices must be a list of layers below 3"),
        ("bamba", {"attn_layer_indices": None}, "attn_layer_indices names no layer"),
        ("zamba2", {"layers_block_type": ["hybrid"]}, "layers_block_type must name mamba or hybrid for each"),
        ("zamba2", {"layers_block_type": ["mamba"] * 4}, "no layer has attention"),
        ("zamba2", {"layers_block_type": [["mamba"]] * 4}, "layers_block_type must name mamba or hybrid"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings False is not supported"),
        ("zamba2", {"num_attention_heads": 3}, "num_attention_heads 3 must divide twice hidden_size 64"),
        ("zamba2", {"num_key_value_heads": 2}, "use_shared_attention_adapter with fewer KV heads than heads"),
        ("zamba2", {"n_mamba_heads": 7}, "mamba_n_heads 7 must divide mamba_expand"),
        ("zamba2", {"adapter_rank": 0}, "adapter_rank must be a positive whole number"),
        ("zamba2", {"time_step_min": -1}, "time_step_min -1.0 must be from 0 on"),
        ("zamba2", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported, only 'gelu'"),
        ("zamba2", {"num_mem_blocks": "x"}, "num_mem_blocks must be a positive whole number"),
        ("olmo_hybrid", {"layer_types": ["full_attention"] * 4}, "names no linear_attention"),
        ("olmo_hybrid", {"linear_num_value_heads": 6}, "linear_num_value_heads 6 is not a multiple"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope False is not supported of"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        (
            "kimi_linear",
            {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3]}},
            "must name each of 4 layers once",
        ),
        (
            "kimi_linear",
            {"layer_types": None, "linear_attn_config": {"kda_layers": [0]}},
            "kda_layers must be a list of layers from 1 to 4",
        ),
    ],
    ids=str,
)
def test_bad_configs_of_families(tmp_path: Path, arch: str, overrides: dict[str, Any], problem: str) -> None:
    refuse(arch, tmp_path, overrides, problem)


def test_tensors_under_both_names_are_refused(tmp_path: Path) -> None:
    model = make_family(tmp_path, "nemotron_h")
    weights = load_file(model / "model.safetensors")
    weights["model.norm_f.weight"] = weights["backbone.norm_f.weight"].clone()
    save_file(weights, model / "model.safetensors")
    with pytest.raises(ModelError, match="are the same tensor"):
        load(model)


def refuse(arch: str, directory: Path, overrides: dict[str, Any], problem: str) -> None:
    model = make_family(directory, arch)
    write_config(model, overrides)
    with pytest.raises(ModelError, match=problem):
        parse_config(model)


def write_config(model: Path, changes: dict[str, Any]) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lfm2", "qwen3_5_text", "granitemoehybrid"], indirect=True)
@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 4}], ids=str)
def test_ranks_give_the_tokens_of_one(model: Path, options: dict[str, Any]) -> None:
    """In float32, where sums over ranks are as good as those of one."""
    alone, engine = tokens(load(model), [LONG])["long"], load(model, **options)
    assert tokens(engine, [LONG, *OTHERS[:3]])["long"] == alone
    assert tokens(engine, [named("again", LONG)])["again"] == alone


def test_quantized_offline_and_at_load(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "int8", QUANTS["int8"], 1, lambda _done, _total: None)
    at_load = tokens(load(model, quant="int8"), [LONG, *OTHERS[:3]])
    written = load_file(tmp_path / "int8" / "model.safetensors")
    norms = {name for name in load_file(model / "model.safetensors") if "norm" in name}
    if parse_config(model).model_type != "olmo_hybrid":  # transformers reads both of its spellings
        assert norms <= written.keys()
    stored = load(tmp_path / "int8", dtype="float32")
    assert stored.info.quant == "int8"
    assert tokens(stored, [LONG, *OTHERS[:3]]) == at_load
    with pytest.raises(ModelError, match="cannot be calibrated"):
        quantize(model, tmp_path / "x", QUANTS["int8"], 1, lambda *_: None, lambda *_: None)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_shared_attention_adapter": False, "num_key_value_heads": 2},
        {"use_mem_rope": False, "num_mem_blocks": 1, "add_bias_linear": True},
        {"use_long_context": True, "num_mem_blocks": 5},
    ],
    ids=str,
)
def test_blocks_that_layers_share(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Of Zamba2: adapters of MLPs alone, no RoPE, and more blocks than layers that have one."""
    kinds = ["linear_attention", "hybrid", "hybrid"]
    model = make_family(tmp_path, "zamba2", num_hidden_layers=3, layers_block_type=kinds, **fields)
    config = parse_config(model)
    assert config.num_parameters == sum(prod(entry.shape) for entry in list_tensors(model).values())
    check_weights(str(model), config, list_tensors(model))
    compare(model, hf_model(model))


def test_a_copy_of_a_block_that_layers_share_is_refused(tmp_path: Path) -> None:
    """It may have other numbers. `fit` says the same as the load."""
    model = make_family(tmp_path, "zamba2")
    weights = load_file(model / "model.safetensors")
    name = "model.layers.{}.shared_transformer.input_layernorm.weight"
    save_file(weights | {name.format(3): weights[name.format(1)].clone()}, model / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.3\.shared_transformer") as at_fit:
        check_weights(str(model), parse_config(model), list_tensors(model))
    with pytest.raises(ModelError) as at_load:
        load(model)
    assert str(at_fit.value) == str(at_load.value)
