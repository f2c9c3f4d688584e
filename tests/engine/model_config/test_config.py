import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmbox.engine.errors import ModelError, UnsupportedArchitecture
from llmbox.engine.model_config.config import ModelConfig, parse_config
from llmbox.engine.model_config.fields import Fields, text_fields
from support.lanes import examples
from support.tiny_models import ARCHITECTURES, HEAD_DIM, ROPE_VARIANTS, ROPES, tensor_shapes, tiny_config


def write(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(("arch", "rope"), [(arch, rope) for arch in ARCHITECTURES for rope in ROPES[arch]])
def test_both_ways_of_writing_rope_mean_the_same(tmp_path: Path, arch: str, rope: str) -> None:
    old = tiny_config(arch, rope, max_position_embeddings=128)
    new = {key: value for key, value in old.items() if key not in {"rope_scaling", "rope_theta"}}
    plain = {"rope_type": "default", "rope_theta": old["rope_theta"]}
    new["rope_parameters"] = plain | (old["rope_scaling"] or {})
    if arch == "olmo3":
        by_type = {"full_attention": new["rope_parameters"], "sliding_attention": plain}
        new["rope_parameters"] = by_type
    new["dtype"] = new.pop("torch_dtype")
    assert parse_config(write(tmp_path, old)) == parse_config(write(tmp_path, new))


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_reads_what_transformers_writes(tmp_path: Path, arch: str) -> None:
    from transformers import AutoConfig

    expected = parse_config(write(tmp_path, tiny_config(arch, ROPES[arch][-1])))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert parse_config(tmp_path) == expected


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
@pytest.mark.parametrize("tied", [False, True])
def test_counts_parameters(tmp_path: Path, arch: str, tied: bool) -> None:
    config = tiny_config(
        arch, tie_word_embeddings=tied, attention_bias=True, mlp_bias=arch in {"llama", "smollm3", "granite"}
    )
    if arch in {"mistral", "mixtral", "phi3"}:
        config["attention_bias"] = False  # it has none, whatever config.json says
    total = 0
    for shape in tensor_shapes(config).values():
        size = 1
        for side in shape:
            size *= side
        total += size
    assert parse_config(write(tmp_path, config)).num_parameters == total


def test_head_dim_defaults(tmp_path: Path) -> None:
    for arch in ARCHITECTURES:
        config = tiny_config(arch)
        del config["head_dim"]
        assert parse_config(write(tmp_path, config)).head_dim == (128 if arch == "qwen3" else HEAD_DIM)


def test_windows(tmp_path: Path) -> None:
    def windows(arch: str, **changes: Any) -> tuple[int | None, ...]:
        config = {**tiny_config(arch), "num_hidden_layers": 3, **changes}
        return parse_config(write(tmp_path, config)).windows

    assert windows("llama", sliding_window=8) == (None,) * 3
    assert windows("mistral", sliding_window=None) == (None,) * 3
    assert windows("mistral", sliding_window=8) == (8,) * 3
    assert windows("qwen2", sliding_window=8, use_sliding_window=False) == (None,) * 3
    assert windows("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=2) == (None, None, 8)
    assert windows("phi3", sliding_window=8) == (8,) * 3
    assert windows("olmo3", sliding_window=8, num_hidden_layers=5, layer_types=None) == (8, 8, 8, None, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows("qwen3", sliding_window=8, use_sliding_window=True, layer_types=types) == (8, None, 8)


def test_context_limits(tmp_path: Path) -> None:
    def limits(rope: str) -> tuple[int, int]:
        config = parse_config(write(tmp_path, {**tiny_config("llama", rope), "max_position_embeddings": 64}))
        return config.default_context, config.context_limit

    assert limits("default") == limits("llama3") == limits("longrope") == (64, 64)
    assert limits("linear") == (128, 128)
    assert limits("dynamic") == (64, 128)
    assert limits("yarn") == (128, 128)


BAD = {
    "vocab_size": (0, "'x'", True, None),
    "num_attention_heads": (-1, 2.5),
    "num_key_value_heads": (3,),
    "head_dim": (15,),
    "rms_norm_eps": ("small",),
    "tie_word_embeddings": ("yes",),
    "hidden_act": ("gelu",),
    "num_hidden_layers": (10**12,),
    "rope_theta": (-1.0, 0),
    "torch_dtype": ("float8_e4m3fn", "int8"),
    "quantization_config": ({"quant_method": "gptq"},),
    "rope_scaling": (
        {"rope_type": "mrope"},
        {"rope_type": "linear", "factor": 0.5},
        [1],
        {"rope_type": "linear", "factor": "2"},
    ),
    "partial_rotary_factor": (0.5, "half"),
    "rope_parameters": ({"full_attention": {"rope_type": "default"}}, {"rope_type": "longrope"}),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_bad_value_names_file_and_problem(tmp_path: Path, key: str, value: Any) -> None:
    write(tmp_path, {**tiny_config("llama"), key: value})
    with pytest.raises(ModelError, match=r"config\.json.*: .+") as caught:
        parse_config(tmp_path)
    assert "None" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"layer_types": ["full_attention"]}, {"layer_types": ["x", "y"]}])
def test_layer_types_must_fit(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path, {**tiny_config("qwen3"), "use_sliding_window": True, "sliding_window": 8, **changes})
    with pytest.raises(ModelError, match="layer_types"):
        parse_config(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom"},
        {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"},
        {"architectures": [], "model_type": "ctrl"},
        {"architectures": None, "model_type": None},
        {"architectures": [{}]},
        {"architectures": ["LlamaForTokenClassification"]},
    ],
)
def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path, {**tiny_config("llama"), **changes})
    with pytest.raises(UnsupportedArchitecture) as caught:
        parse_config(tmp_path)
    assert all(name in str(caught.value) for name in ARCHITECTURES.values())


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("HYV4ForCausalLM", "needs attention to the tokens"),
        ("ZambaForCausalLM", "needs attention that several layers share"),
    ],
)
def test_a_known_architecture_is_refused_with_what_is_missing(
    tmp_path: Path, name: str, missing: str
) -> None:
    write(tmp_path, {**tiny_config("llama"), "architectures": [name]})
    with pytest.raises(UnsupportedArchitecture, match=f"{name} is not supported: it {missing}"):
        parse_config(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"architectures": ["A" * 100_000]}, {"rope_scaling": {"rope_type": "R" * 100_000}}]
)
def test_a_long_name_is_not_repeated_in_full(tmp_path: Path, changes: dict[str, object]) -> None:
    write(tmp_path, {**tiny_config("llama"), **changes})
    with pytest.raises(ModelError, match="is not supported") as refused:
        parse_config(tmp_path)
    assert len(str(refused.value)) < 10_000


def test_code_of_the_model_is_never_run(tmp_path: Path) -> None:
    write(tmp_path, {**tiny_config("llama"), "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}})
    with pytest.raises(ModelError, match=r"auto_map.*never run"):
        parse_config(tmp_path)


@pytest.mark.parametrize("prefix", ["", "microsoft/Phi-4-mini-instruct--"])
def test_code_that_is_known_needs_no_running(tmp_path: Path, prefix: str) -> None:
    code = {"AutoConfig": f"{prefix}configuration_phi3.Phi3Config", "AutoTokenizer": "Xenova/gpt-4o"}
    code["AutoModelForCausalLM"] = f"{prefix}modeling_phi3.Phi3ForCausalLM"
    assert parse_config(write(tmp_path, {**tiny_config("phi3"), "auto_map": code})).model_type == "phi3"
    del code["AutoModelForCausalLM"]
    with pytest.raises(ModelError, match=r"auto_map.*never run"):
        parse_config(write(tmp_path, {**tiny_config("phi3"), "auto_map": code}))


@pytest.mark.parametrize(
    ("arch", "changes", "problem"),
    [
        ("phi3", {"lm_head_bias": True}, "lm_head_bias"),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "only longrope"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, "full_attention"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("granite", {"residual_multiplier": 0.0}, "between 1e-6 and 1e6"),
        ("granite", {"residual_multiplier": 1e-300}, "between 1e-6 and 1e6"),
        ("phi3", {"partial_rotary_factor": 0.2}, "no even part"),
        ("phi3", {"partial_rotary_factor": 1.5}, "no even part"),
        ("olmo2", {"partial_rotary_factor": 0.5}, "only 1.0"),
        ("smollm3", {"no_rope_layers": [1]}, "0 or a 1 for each of 2 layers"),
        ("smollm3", {"no_rope_layers": [1, "no"]}, "0 or a 1"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}, "layer_types"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, arch: str, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        parse_config(write(tmp_path, {**tiny_config(arch), **changes}))


def test_names_that_longrope_had(tmp_path: Path) -> None:
    def parsed(name: str) -> ModelConfig:
        config = tiny_config("phi3", "longrope")
        scaling = {key: value for key, value in config["rope_scaling"].items() if key != "rope_type"}
        return parse_config(write(tmp_path, {**config, "rope_scaling": {**scaling, "type": name}}))

    assert parsed("su") == parsed("yarn") == parsed("longrope")
    assert parsed("su").rope.rope_type == "longrope"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    config = tiny_config(data.draw(st.sampled_from(list(ARCHITECTURES))), "yarn", layer_types=None)
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        config[key] = data.draw(JSON)
    longrope = ROPE_VARIANTS["longrope"] or {}
    for key in data.draw(st.lists(st.sampled_from(sorted(longrope)), max_size=2)):
        config["rope_scaling"] = {**longrope, key: data.draw(JSON)}
    write(tmp_path, config)
    with suppress(ModelError):
        assert parse_config(tmp_path).shape().params > 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_file_that_is_no_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        parse_config(tmp_path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        parse_config(tmp_path)


ABSURD = {
    "max_position_embeddings": [4.6e18, 4_600_000_000_000_000_000, 2**31, 10**400, -1, 0, True, 1.5],
    "vocab_size": [10**9, 2**63],
    "num_hidden_layers": [10**9, 2000],
    "num_attention_heads": [10**9],
    "num_key_value_heads": [10**9],
    "hidden_size": [10**9],
    "head_dim": [10**9],
    "intermediate_size": [10**12],
    "sliding_window": [10**12],
    "rope_theta": [1e300, 10**400, 0, -5.0],
    "rms_norm_eps": [-1.0, 1e300],
    "rope_scaling": [
        {"rope_type": "linear", "factor": 1e300},
        {"rope_type": "yarn", "factor": 60000.0, "original_max_position_embeddings": 2**20},
        {"rope_type": "dynamic", "factor": 65536.0, "original_max_position_embeddings": 2**20},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e300},
    ],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in ABSURD.items() for value in values]
)
def test_absurd_numbers_are_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    config = tiny_config("mistral" if key == "sliding_window" else "llama", **{key: value})
    if isinstance(value, dict) and value["rope_type"] == "dynamic":
        config["max_position_embeddings"] = 2**20
    with pytest.raises(ModelError) as caught:
        parse_config(write(tmp_path, config))
    message = str(caught.value)
    names = [key, *(value if isinstance(value, dict) else ()), "a context of"]
    assert any(name in message for name in names)
    assert len(message) < 600


ODD = [0, 1, 3, 7, 2**27, 2**31 - 1, 10**400, 1e300, [], {}, [1], [1e300] * 8]
WILD = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(-(10**20), 10**20),
    st.text(max_size=3),
    st.sampled_from([*ODD, {"rope_type": "yarn", "factor": 1e9}]),
)


@given(
    st.sampled_from(sorted(ARCHITECTURES)), st.dictionaries(st.integers(0, 60), WILD, min_size=1, max_size=3)
)
@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_of_any_key_is_taken_or_refused(tmp_path: Path, arch: str, changes: dict[int, Any]) -> None:
    """And what is taken can be reckoned with."""
    config = tiny_config(arch, ROPES[arch][-1])
    extra = ("sliding_window", "layer_types", "num_experts", "no_rope_layers", "partial_rotary_factor")
    keys = sorted({*config, *extra})
    config |= {keys[place % len(keys)]: value for place, value in changes.items()}
    with suppress(ModelError):
        found = parse_config(write(tmp_path, config))
        assert found.shape().context_limit <= found.shape(100).context_limit <= 2**27


@pytest.mark.parametrize(
    ("whole", "text", "tied"), [(False, True, False), (True, False, True), (None, True, True)]
)
def test_ties_of_the_whole_model_count_more_than_those_of_its_text_part(
    whole: bool | None, text: bool, tied: bool
) -> None:
    raw = {"text_config": {"tie_word_embeddings": text}, "tie_word_embeddings": whole}
    assert text_fields(Fields(raw, "config.json")).raw["tie_word_embeddings"] is tied
