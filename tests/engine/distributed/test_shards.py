"""Models cut in every way give the tokens of the whole model, and each rank reads its own bytes only."""

import math

import pytest

from support.rank_threads import load_threads
from support.real_engines import ask, load, run, tokens
from support.tiny_models import make_tiny_model, tensor_shapes, tiny_config

MODELS = {
    "llama, biases": dict(arch="llama", attention_bias=True, mlp_bias=True),
    "mistral, window, odd vocabulary": dict(arch="mistral", sliding_window=24, vocab_size=323),
    "qwen2, tied": dict(arch="qwen2", tie_word_embeddings=True, vocab_size=321),
    "qwen3, one kv head": dict(arch="qwen3", num_key_value_heads=1),
}
CUTS = {"tp 2": (2, 1), "tp 4, copied kv heads": (4, 1), "pp 3": (1, 3), "tp 2, pp 2": (2, 2)}


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")


def asks():
    prompts = [[5, 6, 7], list(range(3, 60)), [9] * 20, [9] * 20 + [4]]
    greedy = [ask(f"g{i}", prompt, 12) for i, prompt in enumerate(prompts)]
    knobs = [
        {"top_k": 5},
        {"top_p": 0.9, "logprobs": 3},
        {"repetition_penalty": 1.3, "logit_bias": {7: 2.5, 300: -1.0}},
        {"min_p": 0.05, "bad_words": ((8,), (9, 4)), "allowed_token_ids": tuple(range(3, 319))},
    ]
    drawn = [
        ask(f"s{i}", prompt, 12, temperature=0.9, seed=i, **more)
        for i, (prompt, more) in enumerate(zip(prompts, knobs, strict=True))
    ]
    return [*greedy, *drawn, ask("prompt", range(3, 40), 2, prompt_logprobs=2)]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return make_tiny_model(directory, tokenizer=False, num_hidden_layers=3, shards=2, **MODELS[request.param])


@pytest.mark.parametrize("cut", CUTS)
def test_tokens_are_those_of_the_whole_model(model, cut):
    tp, pp = CUTS[cut]
    whole = load(model)
    parts = load_threads(model, tp=tp, pp=pp, token_budget=32, max_running=9)
    assert (parts.info.tp, parts.info.pp) == (tp, pp)
    assert tokens(parts, asks()) == tokens(whole, asks())


def test_logprobs_are_those_of_the_whole_model(model):
    def entries(engine):
        outputs = run(engine, asks())
        found = [entry for o in outputs["s1"] for entry in o.logprobs]
        return found + next(o.prompt_logprobs for o in outputs["prompt"] if o.prompt_logprobs)[1:]

    whole, parts = entries(load(model)), entries(load_threads(model, tp=2))
    assert len(whole) == len(parts) == 12 + 36
    for one, other in zip(whole, parts, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert [i for i, _ in one.top] == [i for i, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_each_rank_reads_its_own_bytes_only(tmp_path, tp, pp):
    config = tiny_config("qwen3", num_hidden_layers=4)
    make_tiny_model(tmp_path, tokenizer=False, num_hidden_layers=4)
    read: dict[int, tuple[int, int]] = {}
    load_threads(tmp_path, lambda rank, done, total: read.update({rank: (done, total)}), tp=tp, pp=pp)
    assert all(done == total for done, total in read.values()), "progress ends at all that there is to read"
    shapes = tensor_shapes(config)
    norms = sum(4 * shape[0] for shape in shapes.values() if len(shape) == 1)
    everything = sum(4 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
    final = 4 * config["hidden_size"]
    # Norms of a layer are on every rank of its stage, all else on one rank.
    assert sum(done for done, _ in read.values()) == everything + (tp - 1) * norms
    assert max(done for done, _ in read.values()) < everything / (tp * pp) * 1.05 + norms + final


@pytest.mark.parametrize("shards", [1, 2])
def test_each_rank_reads_its_own_experts_only(tmp_path, shards):
    config = tiny_config("mixtral")
    make_tiny_model(tmp_path, arch="mixtral", tokenizer=False, shards=shards)
    read: dict[int, tuple[int, int]] = {}
    load_threads(
        tmp_path, lambda rank, done, total: read.update({rank: (done, total)}), tp=2, expert_parallel=True
    )
    assert all(done == total for done, total in read.values())
    sizes = {name: 4 * math.prod(shape) for name, shape in tensor_shapes(config).items()}
    doubled = sum(size for name, size in sizes.items() if "norm" in name or name.endswith("moe.gate.weight"))
    assert sum(done for done, _ in read.values()) == sum(sizes.values()) + doubled


def test_a_damaged_part_is_told_by_the_rank_that_reads_it(tmp_path):
    from llmbox.engine.errors import ModelError

    make_tiny_model(tmp_path, tokenizer=False)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ModelError, match=r"beyond the end|cut short"):
        load_threads(tmp_path, tp=2)
