"""A mixture of experts by the command line and through the endpoint."""

import re
from pathlib import Path

import httpx

from llmbox.app.errors import Exit
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.engine.ipc.spawn import Launch
from support.cli_box import Box, box
from support.openai_server import serving
from support.real_engines import hf_model, hf_tokens
from support.tiny_models import make_tiny_model

__all__ = ["box"]
PROMPT = "the quick brown fox jumps"


def test_fit_tells_of_experts_and_refuses_other_routers(box: Box) -> None:
    model = make_tiny_model(box.folder / "tiny", arch="qwen3_moe")
    told = box.run("fit", model)
    assert told.code == 0, told.err
    assert "3 of 8 experts in a layer work for a token" in told.err
    whole = box.run("fit", model, "--tp", "2", "--expert-parallel")
    assert whole.code == 0, whole.err
    assert "on each of 2 ranks (tp 2, pp 1, experts whole)" in whole.out + whole.err
    copied = box.run("fit", model, "--tp", "2", "--expert-parallel", "--redundant-experts", "3")
    assert copied.code == 0, copied.err
    assert "on each of 2 ranks (tp 2, pp 1, experts whole + 3 copies)" in copied.out + copied.err
    lonely = box.run("fit", model, "--tp", "2", "--redundant-experts", "3")
    assert lonely.code != Exit.OK
    assert "ask for --expert-parallel and --tp 2 too" in lonely.out + lonely.err
    alone = box.run("load", model, "--expert-parallel", "--estimate-only")
    assert alone.code != Exit.OK
    assert "--expert-parallel divides experts among the ranks of --tp" in alone.out
    other = make_tiny_model(box.folder / "other", arch="qwen3_moe", n_group=4)
    refused = box.run("load", other, "--estimate-only")
    assert refused.code != Exit.OK
    assert "another router" in refused.err


def test_a_folder_is_loaded_and_answers_as_transformers_do(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", arch="qwen3_moe", shards=3)
    options = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    with serving(tmp_path / "data", Launch()) as server:
        server.load(model, "tiny", device="cpu", threads=1, memory_bytes=256 << 20)
        with server.client() as client:
            answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, **options)
    ids = load_model_text(model).encode(PROMPT)
    assert answer.choices[0].token_ids == hf_tokens(hf_model(model), ids, 24)


def test_ranks_with_whole_experts_answer_and_tell_of_their_balance(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", arch="qwen3_moe")
    options = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    cut = {"tp": 2, "expert_parallel": True, "redundant_experts": 2, "threads": 2}
    with serving(tmp_path / "data", Launch()) as server:
        server.load(model, "tiny", device="cpu", memory_bytes=256 << 20, **cut)
        with server.client() as client:
            answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, **options)
        metrics = httpx.get(f"{server.url}/metrics").text
    ids = load_model_text(model).encode(PROMPT)
    assert answer.choices[0].token_ids == hf_tokens(hf_model(model), ids, 24)
    told = re.findall(r'^llmbox_expert_(\w+)\{model_name="tiny"\} ([0-9.]+)$', metrics, re.MULTILINE)
    balance = {name: float(value) for name, value in told}
    assert balance["rows_total"] > 0
    assert 1 <= balance["rank_imbalance"] <= 2
    assert 1 <= balance["rank_imbalance_without_copies"] <= 2
    assert 1 <= balance["imbalance"] <= 8
