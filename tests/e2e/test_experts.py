"""A mixture of experts by the command line and through the endpoint."""

from pathlib import Path

from llmbox.app.errors import Exit
from llmbox.app.text.tokenizer.tokenizer import load_model_text
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
