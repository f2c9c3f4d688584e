"""OpenAI's Python client as it ships: honored, or refused. New methods and fields fail here."""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from operator import attrgetter
from typing import Any, get_type_hints

import httpx
import pydantic
import pytest

from llmbox.app.http.openai.request_types import (
    ChatCompletionRequest,
    CompletionRequest,
    CustomFunction,
    EmbeddingRequest,
    Function,
)
from llmbox.app.http.openai_responses.request_types import (
    CompactRequest,
    InputTokensRequest,
    NamespaceTool,
    ResponseRequest,
    ResponsesCustomTool,
    ResponsesFunctionTool,
)
from llmbox.app.http.openai_responses.routes import ConversationCreate
from support.cli_box import PATIENCE, until
from support.deferred_module import DeferredModule
from support.fake_engine import write_model
from support.openai_server import serving
from support.tokenizers_zoo import CHATML, byte_level, write_text_files

openai = DeferredModule("openai")
resources = DeferredModule("openai._resource")

ASKED: dict[str, Any] = {"model": "plain", "messages": [{"role": "user", "content": "hello"}]}
SAID = "one two three"


class Point(pydantic.BaseModel):
    x: int


def chat(completions: Any) -> None:
    stored = completions.create(**ASKED, store=True, metadata={"a": "b"})
    assert stored.choices[0].message.content == SAID
    assert "".join(c.choices[0].delta.content or "" for c in completions.create(**ASKED, stream=True)) == SAID
    with completions.stream(**ASKED) as events:
        assert [event.type for event in events][-1] == "content.done"
        assert events.get_final_completion().choices[0].message.content == SAID
    parsed = completions.parse(**ASKED | {"model": "pointer"}, response_format=Point)
    assert parsed.choices[0].message.parsed == Point(x=7)
    assert stored.id in [each.id for each in completions.list()]
    assert completions.retrieve(stored.id).choices == stored.choices
    assert completions.update(stored.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert [each.content for each in completions.messages.list(stored.id)] == ["hello"]
    assert completions.delete(stored.id).deleted


def completion(completions: Any) -> None:
    assert completions.create(model="plain", prompt="hello").choices[0].text == SAID
    pieces = completions.create(model="plain", prompt="hello", stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == SAID


def embed(embeddings: Any) -> None:
    (one,) = embeddings.create(model="vectors", input="hello").data
    assert len(one.embedding) == 8


def models(models: Any) -> None:
    (first, *_) = models.list()
    assert models.retrieve(first.id) == first
    with pytest.raises(openai.APIStatusError) as refused:  # who may: tests of the route
        models.delete(first.id)
    assert refused.value.status_code in {401, 403}


def respond(responses: Any) -> None:
    asked = {"model": "plain", "input": "hello"}
    stored = responses.create(**asked, store=True)
    assert stored.output_text == SAID if hasattr(stored, "output_text") else stored.output
    assert [event.type for event in responses.create(**asked, stream=True)][-1] == "response.completed"
    assert responses.retrieve(stored.id).id == stored.id
    assert [each.type for each in responses.retrieve(stored.id, stream=True)][-1] == "response.completed"
    (item,) = responses.input_items.list(stored.id)
    assert item.content[0].text == "hello"
    assert responses.input_tokens.count(**asked).input_tokens == stored.usage.input_tokens
    compacted = responses.compact(**asked)
    assert [each.type for each in compacted.output] == ["message", "compaction"]
    background = responses.create(**asked, store=True, background=True)
    assert responses.cancel(background.id).status in {"cancelled", "completed"}
    responses.delete(stored.id)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(stored.id)


def parse_and_stream(responses: Any) -> None:
    parsed = responses.parse(model="pointer", input="hello", text_format=Point)
    assert parsed.output_parsed == Point(x=7)
    with responses.stream(model="plain", input="hello") as events:
        assert events.get_final_response().output_text == SAID


def converse(conversations: Any) -> None:
    made = conversations.create(items=[{"role": "user", "content": "hello"}])
    assert conversations.retrieve(made.id) == made
    assert conversations.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    (added,) = conversations.items.create(made.id, items=[{"role": "user", "content": "more"}]).data
    assert next(item.id for item in conversations.items.list(made.id)) == added.id
    assert conversations.items.retrieve(added.id, conversation_id=made.id) == added
    assert conversations.items.delete(added.id, conversation_id=made.id).id == made.id
    assert conversations.delete(made.id).deleted


def keep_files(files: Any) -> None:
    file = files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
    assert files.retrieve(file.id) == file == files.wait_for_processing(file.id)
    assert files.content(file.id).text == files.retrieve_content(file.id) == "{}\n"
    assert file.id in [each.id for each in files.list()]
    assert files.delete(file.id).deleted


def run_batches(batches: Any) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": ASKED}
    files = batches._client.files
    file = files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
    made = batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    until(lambda: batches.retrieve(made.id).status == "completed")
    done = json.loads(files.content(batches.retrieve(made.id).output_file_id).text)
    assert done["response"]["body"]["choices"][0]["message"]["content"] == SAID
    assert made.id in [each.id for each in batches.list()]
    with pytest.raises(openai.APIStatusError):  # it has ended
        batches.cancel(made.id)


FILES = ("create", "retrieve", "list", "delete", "content", "retrieve_content", "wait_for_processing")
CHAT = dict.fromkeys(
    ("create", "stream", "parse", "list", "retrieve", "update", "delete", "messages.list"), chat
)
RESPONSES = dict.fromkeys(
    ("create", "retrieve", "delete", "cancel", "compact", "input_items.list", "input_tokens.count"), respond
)
ITEMS = ("items.create", "items.list", "items.retrieve", "items.delete")
RESOURCES: dict[str, dict[str, Callable[[Any], None]]] = {
    "chat.completions": CHAT,
    "beta.chat.completions": CHAT,
    "completions": {"create": completion},
    "embeddings": {"create": embed},
    "models": dict.fromkeys(("list", "retrieve", "delete"), models),
    "responses": RESPONSES | {"parse": parse_and_stream, "stream": parse_and_stream},
    "beta.responses": RESPONSES,
    "files": dict.fromkeys(FILES, keep_files),
    "batches": dict.fromkeys(("create", "retrieve", "list", "cancel"), run_batches),
    "conversations": dict.fromkeys(("create", "retrieve", "update", "delete", *ITEMS), converse),
}
"""Resources that are honored: every method but those in SOCKETS."""
SOCKETS = ("responses.connect", "beta.responses.connect")
"""WebSockets, which no route of ours speaks."""
PLATFORM = (
    "admin", "audio", "beta.agents", "beta.assistants", "beta.chatkit", "beta.realtime", "beta.threads",
    "containers", "content_provenance_checks", "decisions", "evals", "fine_tuning", "images", "live",
    "moderations", "realtime", "safety", "skills", "uploads", "vector_stores", "videos", "webhooks",
)  # fmt: skip
"""Resources of OpenAI's platform, which is not a model: each of their methods is refused."""
IN_THE_CLIENT = (
    "webhooks.unwrap",
    "webhooks.verify_signature",
    "beta.agents.environments.files.prepare",
    "beta.agents.environments.files.prepare_directory",
    "beta.agents.environments.files.upload",
    "beta.agents.sessions.artifacts.for_result",
    "beta.agents.sessions.stream",
    "uploads.upload_file_chunked",
    "beta.threads.create_and_run_stream",
    "beta.threads.runs.create_and_stream",
    "beta.threads.runs.stream",
    "beta.threads.runs.submit_tool_outputs_stream",
)
"""They ask nothing, or by other methods, which are refused."""
ODD: dict[str, Any] = {
    "file": b"x",
    "files": [b"x"],
    "image": b"x",
    "video": b"x",
    "input_reference": b"x",
    "data": b"x",
    "audio_sample": b"x",
    "recording": b"x",
    "items": [],
    "messages": [],
    "metadata": {},
    "max_wait_seconds": 1.0,
    "bytes": 1,
    "poll_interval_ms": 1,
}
"""Values of parameters that must not be texts."""


def methods_of(resource: Any, at: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(type(resource)):
        if name.startswith(("_", "with_")):
            continue
        value = getattr(resource, name)
        if isinstance(value, resources.SyncAPIResource):
            yield from methods_of(value, f"{at}{name}.")
        elif inspect.isroutine(value):
            yield f"{at}{name}", value


def client_of(url: str) -> "openai.OpenAI":
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", admin_api_key="none", max_retries=0, timeout=PATIENCE
    )


def surface(client: "openai.OpenAI") -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for name in dir(type(client)):
        if name.startswith(("_", "with_")):
            continue
        if isinstance(value := getattr(client, name), resources.SyncAPIResource):
            found |= dict(methods_of(value, f"{name}."))
    return found


def is_in(method: str, resources: tuple[str, ...]) -> bool:
    return method.startswith(tuple(f"{name}." for name in resources))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[openai.OpenAI]":
    root = tmp_path_factory.mktemp("models")
    with serving(tmp_path_factory.mktemp("data")) as server:
        server.load_scripted(root, {"plain": SAID, "pointer": json.dumps({"x": 7})}, CHATML)
        folder = write_text_files(root / "vectors", byte_level(), CHATML)
        server.load(write_model(folder, vocab_size=500, generates=False), "vectors")
        with client_of(server.url) as client:
            yield client


def test_every_method_is_known() -> None:
    shown = surface(client_of("http://127.0.0.1:9"))
    known = {f"{at}.{name}" for at, drivers in RESOURCES.items() for name in drivers} | set(SOCKETS)
    assert {name for name in shown if not is_in(name, PLATFORM)} == known
    assert all(any(is_in(name, (at,)) for name in shown) for at in PLATFORM)


@pytest.mark.parametrize(
    ("at", "drive"),
    [(at, drive) for at, drivers in RESOURCES.items() for drive in dict.fromkeys(drivers.values())],
)
def test_what_is_honored(client: "openai.OpenAI", at: str, drive: Callable[[Any], None]) -> None:
    resource: Any = client
    for name in at.split("."):
        resource = getattr(resource, name)
    drive(resource)


def test_what_is_openais_platform_is_not_here(client: "openai.OpenAI") -> None:
    platform = {name: each for name, each in surface(client).items() if is_in(name, PLATFORM)}
    assert len(platform) > 300
    for name, method in platform.items():
        if name in IN_THE_CLIENT or name.endswith(".connect"):
            continue
        with pytest.raises(openai.APIStatusError) as refused:
            ask(method)
        uploads = refused.value.param == "purpose"  # of a file that only a refused method could use
        assert uploads or refused.value.status_code in {404, 415}, name  # 415: a form
        assert refused.value.body is not None


def test_websockets_are_refused(client: "openai.OpenAI") -> None:
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    answer = httpx.get(str(client.base_url.join("/v1/responses")), headers=headers)
    assert answer.status_code == 405
    assert answer.json()["error"]["message"]


def ask(method: Callable[..., Any]) -> None:
    """Call it with whatever it must have, and read the first of what it gives."""
    parameters = inspect.signature(method).parameters.values()
    needed = [
        each.name for each in parameters if each.default is each.empty and each.kind != each.VAR_KEYWORD
    ]
    given = {name: ODD.get(name, "x") for name in needed}
    try:
        found = method(**given)
    except TypeError as error:  # one of several groups of arguments: the first will do
        more = re.findall(r"'(\w+)'", str(error).partition(")")[0])
        found = method(**given | {name: ODD.get(name, "x") for name in more})
    if hasattr(found, "__iter__"):
        next(iter(found), None)


@pytest.mark.parametrize(
    ("sent", "taken", "left"),
    [
        ("chat.completion_create_params.CompletionCreateParamsBase", ChatCompletionRequest, set()),
        ("completion_create_params.CompletionCreateParamsBase", CompletionRequest, set()),
        ("EmbeddingCreateParams", EmbeddingRequest, set()),
        ("responses.response_create_params.ResponseCreateParamsBase", ResponseRequest, set()),
        ("responses.InputTokenCountParams", InputTokensRequest, set()),
        ("responses.ResponseCompactParams", CompactRequest, set()),
        ("conversations.ConversationCreateParams", ConversationCreate, set()),
        ("responses.FunctionToolParam", ResponsesFunctionTool, {"type", "async"}),
        ("responses.CustomToolParam", ResponsesCustomTool, {"type", "async"}),
        ("responses.NamespaceToolParam", NamespaceTool, {"type"}),
        ("shared_params.FunctionDefinition", Function, set()),
        ("chat.chat_completion_custom_tool_param.Custom", CustomFunction, set()),
    ],
)
def test_every_field_is_known_by_name(sent: str, taken: Any, left: set[str]) -> None:
    """Honored, refused, or answered by a warning: never taken for one that nobody knows.

    `left`: the type, and `async`, which is no name in Python; it is ignored with a warning.
    """
    import_module("openai.types.conversations")  # not imported by openai.types itself
    known = get_type_hints(attrgetter(sent)(openai.types))
    assert known.keys() - set(taken.__struct_fields__) == left
