"""Ollama's Python client as it ships: honored, or refused in words. New methods and fields fail here."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import ollama
import pytest
from msgspec import Struct
from tokenizers import AddedToken

from llmbox.app.config.model_settings import MemorySettings
from llmbox.app.config.settings import Settings
from llmbox.app.http.ollama import request_types as fields
from llmbox.app.security.keys import KeySpec
from support.cli_box import PATIENCE
from support.fake_engine import write_model
from support.openai_server import serving
from support.tokenizers_zoo import CHATML, byte_level, drawn_ids, write_text_files

MODEL, FILLER = "talker", "filler"
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
WORDS = [{"role": "user", "content": "hello"}]
SHORT = {"num_predict": 2}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name
    """
    return city


def chat(client: ollama.Client) -> None:
    whole = client.chat(MODEL, WORDS, options=SHORT, logprobs=True, top_logprobs=1, keep_alive=60)
    assert isinstance(whole, ollama.ChatResponse)
    assert len(whole.logprobs) == whole.eval_count == 2
    *_, last = client.chat(MODEL, WORDS, options=SHORT, stream=True, think=False)
    assert last.done
    with pytest.raises(ollama.ResponseError, match="tools"):  # its template has no place for them
        client.chat(MODEL, WORDS, tools=[WEATHER, weather])


def generate(client: ollama.Client) -> None:
    for more in ({}, {"raw": True}, {"system": "be kind"}):
        told = client.generate(MODEL, "hello", options=SHORT, **more)
        assert (told.done_reason, told.eval_count) == ("length", 2)
    gap = client.generate(FILLER, "def f(", suffix="): pass", options={"num_predict": 20})
    assert gap.response == "the"
    for refused in ({"template": "x"}, {"context": [1]}, {"width": 1}, {"suffix": "x"}):
        with pytest.raises(ollama.ResponseError, match=next(iter(refused))):
            client.generate(MODEL, "hello", **refused)


def copy_and_delete(client: ollama.Client) -> None:
    assert client.copy(MODEL, "other").status == "success"
    assert "other" in [each.model for each in client.list().models]
    assert client.delete("other").status == "success"


def create_and_delete(client: ollama.Client) -> None:
    parameters = {"temperature": 0.5, "repeat_penalty": 1.1, "num_ctx": 512, "num_gpu": 1}
    lines = list(client.create("terse", from_=MODEL, system="Be terse.", parameters=parameters, stream=True))
    assert [each.status for each in lines] == ["success"]
    shown = client.show("terse")
    assert shown.parameters is not None
    assert "temperature" in shown.parameters
    assert client.create("terser", from_="terse", parameters={"temperature": 0}).status == "success"
    client.chat("terser", [{"role": "user", "content": "hello"}], options={"num_predict": 1})
    refused: dict[str, dict[str, Any]] = {
        "llmbox lora add": {"adapters": {"a": "sha256:0"}},
        "llmbox adopt": {"files": {"a": "sha256:0"}},
        "llmbox quantize": {"quantize": "q4_K_M"},
        "chat template": {"template": "{{ .Prompt }}"},
        "with each request": {"parameters": {"stop": ["x"]}},
        "does not name a model": {"from_": "nowhere"},
    }
    for words, values in refused.items():
        with pytest.raises(ollama.ResponseError, match=words):
            client.create("never", **{"from_": MODEL, **values})
    with pytest.raises(ollama.ResponseError, match="'from'"):
        client.create("never", system="Be terse.")
    names = [each.model for each in client.list().models]
    assert "terser" in names
    assert "never" not in names
    for name in ("terse", "terser"):
        client.delete(name)


def embed(client: ollama.Client) -> None:
    vectors = client.embed(
        MODEL, ["a", "b"], dimensions=4, truncate=True, options={}, keep_alive="1m"
    ).embeddings
    assert [len(each) for each in vectors] == [4, 4]


DRIVEN: dict[str, Callable[[ollama.Client], object]] = {
    "chat": chat,
    "generate": generate,
    "embed": embed,
    "embeddings": lambda client: client.embeddings(MODEL, "a").embedding[0],
    "list": lambda client: client.list().models[0].digest,
    "ps": lambda client: client.ps().models[0].expires_at,
    "show": lambda client: client.show(MODEL).modelinfo,
    "pull": lambda client: list(client.pull(MODEL, stream=True))[-1].status == "success",
    "copy": copy_and_delete,
    "create": create_and_delete,
    "delete": copy_and_delete,
}
REFUSED: dict[str, tuple[Callable[[ollama.Client], object], str]] = {
    "create_blob": (lambda client: client.create_blob(__file__), "llmbox adopt"),
    "push": (lambda client: client.push(MODEL), "Hugging Face"),
    "systemone": (lambda client: client.systemone(MODEL, "x", {}), "no such route"),
}
NOT_OURS = {"web_search": "asks ollama.com", "web_fetch": "asks ollama.com", "close": "asks nobody"}
TYPES: dict[str, type[Struct]] = {
    "chat": fields.ChatRequest,
    "generate": fields.GenerateRequest,
    "embed": fields.EmbedRequest,
    "embeddings": fields.EmbeddingsRequest,
    "show": fields.ShowRequest,
    "pull": fields.OllamaPullRequest,
    "copy": fields.CopyRequest,
    "create": fields.CreateRequest,
    "delete": fields.DeleteRequest,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ollama.Client]:
    root = tmp_path_factory.mktemp("models")
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in FIM])
    script = [*tokenizer.encode("the", add_special_tokens=False).ids, tokenizer.token_to_id(FIM[0])]
    alone = Settings(memory=MemorySettings(load_on_request=False))
    with serving(tmp_path_factory.mktemp("data"), controlled=True, settings=alone) as server:
        for name, known, options in ((MODEL, byte_level(), {}), (FILLER, tokenizer, {"script": script})):
            folder = write_text_files(root / name, known, CHATML)
            server.load(write_model(folder, **drawn_ids(known), context=1024, **options), name)
        _, secret = server.services.security.keys.add(KeySpec(name="owner", scopes=("admin",)))
        yield ollama.Client(server.url, headers={"Authorization": f"Bearer {secret}"}, timeout=PATIENCE)


def test_every_method_is_known() -> None:
    methods = {name for name, _ in inspect.getmembers(ollama.Client, inspect.isfunction) if name[0] != "_"}
    assert methods == DRIVEN.keys() | REFUSED.keys() | NOT_OURS.keys()


@pytest.mark.parametrize("name", DRIVEN)
def test_what_is_honored(client: ollama.Client, name: str) -> None:
    assert DRIVEN[name](client) is not False


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_so(client: ollama.Client, name: str) -> None:
    ask, word = REFUSED[name]
    with pytest.raises(ollama.ResponseError, match=word) as refused:
        ask(client)
    assert refused.value.status_code in {400, 404}


@pytest.mark.parametrize("name", TYPES)
def test_every_field_is_known_by_name(name: str) -> None:
    """Honored, refused, or answered by a warning: never taken for one that nobody knows."""
    sent: dict[str, Any] = dict(inspect.signature(getattr(ollama.Client, name)).parameters)
    assert sent.keys() - {"self"} <= set(TYPES[name].__struct_fields__)


def test_every_option_is_known_by_name() -> None:
    assert set(ollama.Options.model_fields) <= set(fields.OllamaOptions.__struct_fields__)
