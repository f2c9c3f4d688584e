"""Stored responses through the official client: kept on request, for their key alone, honest when cut."""

from dataclasses import replace

import pytest

from llmbox.app.store.stored_answers import StoredAnswer
from support.cli_box import until
from support.deferred_module import DeferredModule
from support.openai_server import serving
from support.stored import SECRET, Place, load_models

openai = DeferredModule("openai")

TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    "{%- if tools %}<tool_call>{%- endif %}"
)
ANSWERS = {
    "plain": "one two three",
    "caller": '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
}
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("data")) as server:
        load_models(server, tmp_path_factory.mktemp("models"), ANSWERS, TEMPLATE)
        yield server


@pytest.fixture
def place(server, monkeypatch):
    monkeypatch.setattr(server.services, "settings", server.services.settings)
    return Place(server)


@pytest.fixture
def client(place):
    return place.client


def create(client, text="hello", **fields):
    return client.responses.create(**{"model": "plain", "input": text, **fields})


def refused(call, status, code, param=None):
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert param in {None, caught.value.param}


@pytest.mark.parametrize("fields", [{}, {"store": False}, {"store": None}])
def test_without_the_word_nothing_is_stored(place, fields):
    response = create(place.client, SECRET, **fields)
    list(create(place.client, SECRET, stream=True, **fields))
    assert response.store is False
    refused(lambda: place.client.responses.retrieve(response.id), 404, "response_not_found")
    assert SECRET.encode() not in place.bytes()


def test_a_response_comes_back_as_it_was_and_goes_for_good(place, client):
    response = create(client, SECRET, store=True, metadata={"topic": "x"}, instructions="Be brief")
    assert response.store is True
    assert client.responses.retrieve(response.id) == response
    assert SECRET.encode() in place.bytes()
    client.responses.delete(response.id)
    refused(lambda: client.responses.retrieve(response.id), 404, "response_not_found")
    refused(lambda: client.responses.delete(response.id), 404, "response_not_found")
    assert SECRET.encode() not in place.bytes()


def test_a_streamed_one_is_there_once_its_end_was_told(client):
    events = create(client, store=True, stream=True)
    last = next(event for event in events if event.type == "response.completed").response
    again = client.responses.retrieve(last.id)
    assert again == last
    assert again.output_text == "one two three"


def find_nothing(stranger, id_):
    reading = stranger.responses
    for call in (
        lambda: reading.retrieve(id_),
        lambda: reading.delete(id_),
        lambda: reading.cancel(id_),
        lambda: list(reading.input_items.list(id_)),
    ):
        refused(call, 404, "response_not_found")
    going_on = lambda: create(stranger, previous_response_id=id_)  # noqa: E731
    refused(going_on, 404, "previous_response_not_found", "previous_response_id")


def test_other_keys_and_callers_without_one_find_nothing(place):
    response, keyless = create(place.client, store=True), create(place.nobody, store=True)
    _, admin = place.new_key("admin", scopes=("admin",))
    for stranger in (place.other, place.nobody, admin):
        find_nothing(stranger, response.id)
    for stranger in (place.other, admin):
        find_nothing(stranger, keyless.id)
    assert place.nobody.responses.retrieve(keyless.id) == keyless
    assert place.client.responses.retrieve(response.id) == response


def test_a_conversation_is_its_owners(place):
    made = place.client.conversations.create(items=[{"role": "user", "content": "hello"}])
    _, admin = place.new_key("admin", scopes=("admin",))
    missing = (404, "conversation_not_found")
    for other in (place.other, admin, place.nobody):
        refused(lambda other=other: other.conversations.retrieve(made.id), *missing)
        refused(lambda other=other: other.conversations.delete(made.id), *missing)
        refused(lambda other=other: other.conversations.items.list(made.id), *missing)
        refused(lambda other=other: other.conversations.items.create(made.id, items=[]), *missing)
        refused(lambda other=other: create(other, conversation=made.id), *missing)
    assert len(place.client.conversations.items.list(made.id).data) == 1
    settings = place.services.settings
    place.services.settings = replace(settings, requests=replace(settings.requests, store=False))
    refused(place.client.conversations.create, 400, "unsupported_parameter")
    refused(lambda: create(place.client, conversation=made.id), 400, "unsupported_parameter", "conversation")
    assert place.client.conversations.delete(made.id).deleted


def test_a_key_without_the_scope_reads_nothing(place):
    _, reader = place.new_key("reader", scopes=("read",))
    refused(lambda: reader.responses.retrieve("resp-1"), 403, "insufficient_scope")


def test_a_conversation_goes_on_from_its_id(client):
    first = create(client, "hello", store=True, instructions="Be brief")
    second = create(client, "and then", store=True, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = create(client, "again", previous_response_id=second.id, instructions="Be long")
    said = {"role": "assistant", "content": "one two three"}
    asked = [{"role": "user", "content": text} for text in ("hello", "and then", "again")]
    chat = [{"role": "system", "content": "Be long"}, asked[0], said, asked[1], said, asked[2]]
    whole = client.chat.completions.create(model="plain", messages=chat)
    assert third.usage.input_tokens == whole.usage.prompt_tokens
    (item,) = client.responses.input_items.list(second.id)
    assert (item.role, item.content[0].text) == ("user", "and then")


def test_calls_of_tools_go_on_with_their_outputs_alone(client):
    first = create(client, model="caller", tools=TOOLS, store=True)
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = create(client, [output], model="caller", tools=TOOLS, previous_response_id=first.id, store=True)
    items = [{"role": "user", "content": "hello"}, call.model_dump(exclude_none=True), output]
    whole = create(client, items, model="caller", tools=TOOLS)
    assert second.usage.input_tokens == whole.usage.input_tokens
    (kept,) = client.responses.input_items.list(second.id)
    assert (kept.type, kept.output) == ("function_call_output", "rain")


def test_a_conversation_with_a_gap_does_not_go_on(client):
    first = create(client, store=True)
    second = create(client, store=True, previous_response_id=first.id)
    client.responses.delete(first.id)
    assert client.responses.retrieve(second.id).previous_response_id == first.id
    with pytest.raises(openai.NotFoundError, match=first.id) as caught:
        create(client, previous_response_id=second.id)
    assert caught.value.code == "previous_response_not_found"
    refused(lambda: create(client, previous_response_id="resp-0"), 404, "previous_response_not_found")


def test_input_items_are_paged_in_both_orders(client):
    items = [{"role": "user", "content": f"m{number}"} for number in range(7)]
    items[3] = {
        "type": "message",
        "id": "mine",
        "role": "user",
        "content": [{"type": "input_text", "text": "m3"}],
    }
    items[4] = {"role": "assistant", "content": "m4"}
    response = create(client, items, store=True)

    def texts(**options):
        return [item.content[0].text for item in client.responses.input_items.list(response.id, **options)]

    assert texts(order="asc", limit=3) == [f"m{number}" for number in range(7)]
    assert texts(limit=2) == [f"m{number}" for number in reversed(range(7))]
    assert texts(order="asc", after="mine") == ["m4", "m5", "m6"]
    page = client.responses.input_items.list(response.id, limit=2)
    assert page.has_more
    assert len(page.data) == 2
    refused(lambda: texts(after="nothing"), 404, "item_not_found", "after")
    for bad in ({"limit": 0}, {"limit": 101}, {"order": "sideways"}):
        refused(lambda bad=bad: texts(**bad), 400, "invalid_value")


def test_what_cannot_be_done_is_refused(place, client):
    refused(lambda: create(client, background=True), 400, "unsupported_parameter", "background")
    refused(lambda: create(client, store="yes"), 400, "invalid_type", "store")
    many = {f"k{number}": "v" for number in range(17)}
    for metadata in (many, {"k" * 65: "v"}, {"k": "v" * 513}):
        refused(lambda it=metadata: create(client, store=True, metadata=it), 400, "invalid_value", "metadata")
    response = create(client, store=True)
    refused(lambda: client.responses.cancel(response.id), 400, "response_not_in_background")


def test_switched_off_it_is_refused_and_what_there_is_stays(place, client):
    kept = create(client, store=True)
    settings = place.services.settings
    place.services.settings = replace(settings, requests=replace(settings.requests, store=False))
    refused(lambda: create(client, store=True), 400, "unsupported_parameter", "store")
    assert create(client, store=False).store is False
    assert client.responses.retrieve(kept.id).id == kept.id
    client.responses.delete(kept.id)


def test_a_client_that_leaves_leaves_a_cancelled_response(place, client):
    id_, events = begun(client)
    events.close()
    until(lambda: not place.services.gateway.in_flight())
    response = client.responses.retrieve(id_)
    assert response.status == "cancelled"
    assert response.output[0].status == "incomplete"
    assert response.output_text
    assert response.usage.output_tokens > 0


def test_one_that_an_operator_ends_is_cancelled(place, client):
    id_, events = begun(client)
    place.server.call(cancel(place, id_))
    assert list(events)[-1].type == "error"
    assert client.responses.retrieve(id_).status == "cancelled"


def test_one_that_ends_with_an_error_has_failed(place, client):
    id_, events = begun(client)
    _, secret = place.services.security.keys.rotate("mine")
    assert list(events)[-1].type == "error"
    response = client.with_options(api_key=secret).responses.retrieve(id_)
    assert (response.status, response.error.code) == ("failed", "server_error")
    assert response.output_text


def begun(client):
    """(id, stream) of a response of which some is there."""
    events = create(client, model="slow", store=True, stream=True, max_output_tokens=900)
    id_ = next(events).response.id
    while next(events).type != "response.output_text.delta":
        pass
    return id_, events


async def cancel(place, id_):
    assert place.services.gateway.cancel(id_)


def test_in_the_background_it_is_made_while_nobody_waits(place, client):
    response = create(client, store=True, background=True)
    assert (response.status, response.background, response.output) == ("in_progress", True, [])
    until(lambda: client.responses.retrieve(response.id).status == "completed")
    made = client.responses.retrieve(response.id)
    assert made.output_text == "one two three"
    assert client.responses.cancel(response.id) == made, "one that has ended is told as it is"
    assert create(client, previous_response_id=response.id).status == "completed"


def test_in_the_background_it_is_cancelled_by_its_key_alone(place, client):
    response = create(client, model="slow", store=True, background=True, max_output_tokens=900)
    refused(lambda: place.other.responses.cancel(response.id), 404, "response_not_found")
    goes_on = lambda: create(client, previous_response_id=response.id)  # noqa: E731
    refused(goes_on, 400, "response_in_progress", "previous_response_id")
    until(lambda: any(live.output_tokens for live in place.services.gateway.in_flight()))
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text
    assert client.responses.retrieve(response.id) == cancelled
    assert not place.services.gateway.in_flight()


def test_deleting_one_in_the_making_ends_it(place, client):
    response = create(client, model="slow", store=True, background=True, max_output_tokens=900)
    client.responses.delete(response.id)
    assert not place.services.gateway.in_flight()
    refused(lambda: client.responses.retrieve(response.id), 404, "response_not_found")
    assert place.count() == 0


def test_a_daemon_that_died_in_the_middle_leaves_no_lie(place, client):
    """What a crash leaves on disk is the row of the beginning, and nothing that runs."""
    finished = create(client, store=True, background=True)
    until(lambda: client.responses.retrieve(finished.id).status == "completed")

    async def as_a_crash_leaves_it():
        found = await place.services.stored.get("response", place.key.id, finished.id)
        begun = {**found.answer, "status": "in_progress", "output": [], "usage": None}
        left = StoredAnswer(
            kind="response", owner=found.owner, id=found.id, created=found.created, model=found.model,
            input=found.input, answer=begun,
        )  # fmt: skip
        assert place.services.stored.put(left, 1)

    place.server.call(as_a_crash_leaves_it())
    told = client.responses.retrieve(finished.id)
    assert (told.status, told.error.code) == ("failed", "server_error")
    assert client.responses.cancel(finished.id).status == "failed"


def test_shutting_down_ends_what_is_in_the_background_and_says_so(place, client):
    response = create(client, model="slow", store=True, background=True, max_output_tokens=900)
    place.server.call(place.services.background.close())
    assert client.responses.retrieve(response.id).status == "cancelled"


def test_a_full_queue_is_told_and_stores_nothing(place, client, monkeypatch):
    monkeypatch.setattr(place.services.request_log._room, "_left", 0)
    response = create(client, store=True)
    assert (response.status, response.store, len(response.warnings)) == ("completed", False, 1)
    streamed = list(create(client, store=True, stream=True))[-1].response
    assert streamed.store is False
    refused(lambda: create(client, store=True, background=True), 503, "request_log_unavailable")
    assert not place.services.gateway.in_flight()
    refused(lambda: client.responses.retrieve(response.id), 404, "response_not_found")


def test_what_a_key_stored_goes_with_it_and_a_new_one_of_its_name_has_nothing(place, client):
    response = create(client, SECRET, store=True)
    kept = create(place.other, store=True)
    assert SECRET.encode() in place.bytes()

    async def revoke():
        from llmbox.app.http.admin.keys import revoke

        await revoke(place.services, "mine")

    place.server.call(revoke())
    assert SECRET.encode() not in place.bytes()
    _, again = place.new_key("mine")
    refused(lambda: again.responses.retrieve(response.id), 404, "response_not_found")
    assert place.other.responses.retrieve(kept.id).id == kept.id


def test_a_rotated_key_keeps_what_it_stored(place, client):
    response = create(client, store=True)
    _, secret = place.services.security.keys.rotate("mine")
    fresh = client.with_options(api_key=secret)
    assert fresh.responses.retrieve(response.id).id == response.id
