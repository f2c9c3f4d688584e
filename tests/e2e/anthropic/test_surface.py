"""Anthropic's Python client as it ships: honored, or refused. New methods and fields fail here."""

import inspect
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, get_type_hints

import httpx
import pydantic
import pytest

from llmbox.app.http.anthropic.request_types import (
    CountTokensRequest,
    MessagesRequest,
    OutputConfig,
    ToolParam,
)
from support.cli_box import PATIENCE, until
from support.deferred_module import DeferredModule
from support.openai_server import serving

anthropic = DeferredModule("anthropic")
resources = DeferredModule("anthropic._resource")

TEMPLATE = (
    "{%- if tools %}{{- tools | tojson + '<tool_call>' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
ASKED: dict[str, Any] = {"max_tokens": 90, "messages": [{"role": "user", "content": "hello"}]}
PLAIN = {"model": "plain", **ASKED}


class Point(pydantic.BaseModel):
    x: int


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name
    """
    return f"rain in {city}"


def create(messages: Any) -> None:
    assert messages.create(**PLAIN).content[0].text == "one two three"
    *_, last = messages.create(**PLAIN, stream=True)
    assert last.type == "message_stop"


def stream(messages: Any) -> None:
    with messages.stream(**PLAIN) as events:
        assert "".join(events.text_stream) == "one two three"
        assert events.get_final_message().usage.output_tokens > 0


def parse(messages: Any) -> None:
    """The schema goes into `output_config.format`; a stand-in engine follows none, so its script does."""
    told = messages.parse(model="pointer", **ASKED, output_format=Point)
    assert told.parsed_output == Point(x=7)


def count_tokens(messages: Any) -> None:
    counted = messages.count_tokens(model="plain", messages=ASKED["messages"]).input_tokens
    assert counted == messages.create(**PLAIN).usage.input_tokens


def tool_runner(messages: Any) -> None:
    runner = messages.tool_runner(
        model="caller", **ASKED, tools=[anthropic.beta_tool(weather)], max_iterations=2
    )
    first, second = list(runner)
    assert first.stop_reason == second.stop_reason == "tool_use"
    assert first.content[-1].input == {"city": "Rome"}


def batches(batches: Any) -> None:
    batch = batches.create(requests=[{"custom_id": "a", "params": PLAIN}])
    until(lambda: batches.retrieve(batch.id).processing_status == "ended")
    assert batch.id in [each.id for each in batches.list()]
    (one,) = batches.results(batch.id)
    assert one.result.message.content[0].text == "one two three"
    assert batches.cancel(batch.id).processing_status == "ended"
    assert batches.delete(batch.id).id == batch.id


def models(models: Any) -> None:
    (first, *_) = models.list()
    assert models.retrieve(first.id) == first


BATCHES = dict.fromkeys(("create", "retrieve", "list", "results", "cancel", "delete"), batches)
MESSAGES = {"create": create, "stream": stream, "parse": parse, "count_tokens": count_tokens}
RESOURCES: dict[str, dict[str, Callable[[Any], None]]] = {
    "messages": MESSAGES,
    "messages.batches": BATCHES,
    "models": {"list": models, "retrieve": models},
    "beta.messages": MESSAGES | {"tool_runner": tool_runner},
    "beta.messages.batches": BATCHES,
    "beta.models": {"list": models, "retrieve": models},
}
"""Resources that are honored: every method but those in REFUSED."""
REFUSED = {"beta.messages.thread": "thread"}
"""Methods of theirs that are not, and a word of the answer."""
PLATFORM = (
    "files", "skills", "organization", "user_profiles", "beta.agents", "beta.deployment_runs",
    "beta.deployments", "beta.dreams", "beta.environments", "beta.files", "beta.memory_stores",
    "beta.organization", "beta.sessions", "beta.skills", "beta.tunnels", "beta.user_profiles", "beta.vaults",
)  # fmt: skip
"""Resources of Anthropic's platform, which is not a model: each of their methods is refused."""
IN_THE_CLIENT = ("beta.webhooks.unwrap", "beta.webhooks.parse_unverified")
HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters that are sent as headers."""
ODD = {
    "file": b"x",
    "files": [("SKILL.md", b"x")],
    "archive": b"x",
    "events": [],
    "metadata": {},
    "amount": 1,
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


def client_of(url: str) -> "anthropic.Anthropic":
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)


def surface() -> dict[str, Callable[..., Any]]:
    client = client_of("http://127.0.0.1:9")
    own = dict(inspect.getmembers(type(client)))
    tops = [name for name in own if not name.startswith(("_", "with_"))]
    found = {}
    for name in tops:
        if isinstance(value := getattr(client, name), resources.SyncAPIResource):
            found |= dict(methods_of(value, f"{name}."))
    return found


def is_platform(method: str) -> bool:
    return method.startswith(tuple(f"{name}." for name in PLATFORM))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[anthropic.Anthropic]":
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    answers = {"plain": "one two three", "caller": call, "pointer": '{"x": 7}'}
    with serving(tmp_path_factory.mktemp("data")) as server:
        server.load_scripted(tmp_path_factory.mktemp("models"), answers, TEMPLATE)
        with client_of(server.url) as client:
            yield client


def test_every_method_is_known() -> None:
    honored = {f"{at}.{name}" for at, drivers in RESOURCES.items() for name in drivers}
    known = honored | REFUSED.keys() | set(IN_THE_CLIENT)
    assert {name for name in surface() if not is_platform(name)} == known
    assert all(any(name.startswith(f"{at}.") for name in surface()) for at in PLATFORM)


@pytest.mark.parametrize(
    ("at", "drive"),
    [(at, drive) for at, drivers in RESOURCES.items() for drive in dict.fromkeys(drivers.values())],
)
def test_what_is_honored(client: "anthropic.Anthropic", at: str, drive: Callable[[Any], None]) -> None:
    resource: Any = client
    for name in at.split("."):
        resource = getattr(resource, name)
    drive(resource)


def test_what_is_refused_says_so(client: "anthropic.Anthropic") -> None:
    thread = client.beta.messages.thread(model="plain", max_tokens=9)
    with pytest.raises(anthropic.BadRequestError, match="thread"):
        thread.send(*ASKED["messages"])


def test_a_thread_that_may_goes_on_with_whole_conversations(client: "anthropic.Anthropic") -> None:
    thread = client.beta.messages.thread(
        model="plain", max_tokens=90, unsupported_request_behavior="continue_unthreaded"
    )
    for _ in range(2):
        assert thread.send(*ASKED["messages"]).content[0].text == "one two three"


def test_what_is_anthropics_platform_is_not_here(client: "anthropic.Anthropic") -> None:
    platform = [name for name in surface() if is_platform(name)]
    assert len(platform) > 300
    live = {
        name: method
        for at in ("files", "skills", "organization", "user_profiles", "beta")
        for name, method in methods_of(getattr(client, at), f"{at}.")
    }
    for name in platform:
        with pytest.raises(anthropic.APIStatusError) as refused:
            ask(live[name])
        assert refused.value.status_code in {404, 415}, name  # 415: a form, which no route of ours takes


def ask(method: Callable[..., Any]) -> None:
    """Call it with whatever it must have, and read the first of what it gives."""
    parameters = inspect.signature(method).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty]
    found = method(**{name: ODD.get(name, "x") for name in needed})
    if hasattr(found, "__iter__"):
        next(iter(found), None)


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ("message_create_params.MessageCreateParamsBase", MessagesRequest),
        ("beta.message_create_params.MessageCreateParamsBase", MessagesRequest),
        ("MessageCountTokensParams", CountTokensRequest),
        ("beta.MessageCountTokensParams", CountTokensRequest),
        ("OutputConfigParam", OutputConfig),
        ("beta.BetaOutputConfigParam", OutputConfig),
        ("ToolParam", ToolParam),
        ("beta.BetaToolParam", ToolParam),
    ],
)
def test_every_field_is_known_by_name(sent: str, taken: Any) -> None:
    """Honored, refused, or answered by a warning: never taken for one that nobody knows."""
    known = get_type_hints(attrgetter(sent)(anthropic.types))
    assert known.keys() - HEADERS <= set(taken.__struct_fields__)


def test_it_is_anthropics_client_that_asks(client: "anthropic.Anthropic") -> None:
    """Files of other dialects stand at the same path."""
    headers = {"anthropic-version": "2023-06-01", "x-api-key": "none"}
    answer = httpx.get(str(client.base_url.join("/v1/files")), headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (404, "error")
