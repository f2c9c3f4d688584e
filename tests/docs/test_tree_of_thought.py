"""The example of docs/examples: a tree of thoughts computes the tokens of its prompts once."""

import importlib.util
import sys
from pathlib import Path

import pytest

import llmbox
from support.tiny_models import make_tiny_model

EXAMPLE = Path(__file__).parents[2] / "docs/examples/tree_of_thought.py"
BLOCK = 16


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("tree_of_thought", EXAMPLE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_prompt_tokens_are_computed_once(example, tmp_path, monkeypatch):
    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    generate, calls = llmbox.LLM.generate, []

    def without_ends(llm, prompts, **params):
        outputs = generate(llm, prompts, ignore_eos=True, **params)
        calls.append(outputs)
        return outputs

    monkeypatch.setattr(llmbox.LLM, "generate", without_ends)
    with llmbox.LLM(str(model), threads=1, memory=0.3, ctx=1024) as llm:
        tree = example.grow(llm, example.QUESTION, depth=3, branches=3, kept=2)
        (running,) = llm._services.engines.models()
        stats = running.supervisor.stats
    prompt = len(calls[0][0].prompt_token_ids)
    sent = [output for outputs in calls for output in outputs]
    assert [len(outputs) for outputs in calls] == [1, 1, 2, 2]
    assert len(tree.best.token_ids) == prompt + 3 * example.THOUGHT_TOKENS
    assert prompt > 4 * BLOCK
    for output in sent[1:]:  # all but the last, partly filled block, and the token whose logits are wanted
        missing = output.usage["prompt_tokens"] - output.usage["prompt_tokens_details"]["cached_tokens"]
        assert missing <= 2 * BLOCK
    # Each choice beyond the first of a prompt computes its last block again.
    computed = stats.prompt_tokens - stats.prefix_hits
    assert computed <= prompt + 2 * BLOCK * sum(len(output.outputs) for output in sent[1:])
    assert tree.cached_tokens == sum(o.usage["prompt_tokens_details"]["cached_tokens"] for o in sent[1:])
    assert tree.prompt_tokens == sum(output.usage["prompt_tokens"] for output in sent[1:])
