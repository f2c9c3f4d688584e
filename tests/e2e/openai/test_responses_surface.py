"""The rest of OpenAI's Responses API through the official client: conversations, streams to be had again,
log-probabilities, truncation, counting and compaction.
"""

import itertools

import pytest

from support.deferred_module import DeferredModule
from support.fake_engine import GO_FILE, write_model
from support.openai_server import serving
from support.tokenizers_zoo import byte_level, write_text_files

openai = DeferredModule("openai")

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<tool_call><|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    "{#- </think> -#}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWERS = {"plain": "one two three", "caller": f"<think>\nhm\n</think>\n\nLet me look.\n{CALL}"}
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(tmp_path_factory, root):
    with serving(tmp_path_factory.mktemp("data")) as server:
        server.load_scripted(root, ANSWERS, TEMPLATE)
        slow = write_text_files(root / "slow", byte_level())
        write_model(slow, vocab_size=500, context=1024, script=[72, 73] * 500, hold_at=20)
        server.load(slow, "slow")
        yield server


def plain_events(events):
    return [event.model_dump(exclude={"response"}) for event in events]


def test_log_probabilities_of_what_is_said(client):
    fields = {"model": "caller", "input": "hello", "tools": TOOLS}
    answer = client.responses.create(**fields, include=["message.output_text.logprobs"], top_logprobs=2)
    message = next(item for item in answer.output if item.type == "message")
    logprobs = message.content[0].logprobs
    assert "".join(entry.token for entry in logprobs).strip() == "Let me look."
    assert [len(entry.top_logprobs) for entry in logprobs] == [2] * len(logprobs)
    assert answer.top_logprobs == 2
    events = list(client.responses.create(**fields, top_logprobs=1, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    entries = list(itertools.chain.from_iterable(event.logprobs for event in deltas))
    assert [entry.token for entry in entries] == [entry.token for entry in logprobs]
    assert client.responses.create(**fields).output[1].content[0].logprobs == []


def test_a_stored_answer_is_streamed_as_it_came(client):
    stream = client.responses.create(model="caller", input="hello", tools=TOOLS, store=True, stream=True)
    events = list(stream)
    id_ = events[-1].response.id
    again = list(client.responses.retrieve(id_, stream=True))
    assert plain_events(again) == plain_events(events)
    assert again[-1].response.output == events[-1].response.output
    rest = list(client.responses.retrieve(id_, stream=True, starting_after=4))
    assert [event.sequence_number for event in rest] == list(range(5, len(events)))
    assert "_cuts" not in client.responses.retrieve(id_).model_dump()


def test_one_in_the_background_is_streamed_and_joined_on_the_way(client, root):
    (root / "slow" / GO_FILE).unlink(missing_ok=True)
    fields = {"model": "slow", "input": "hello", "max_output_tokens": 30, "store": True}
    stream = client.responses.create(**fields, background=True, stream=True)
    first = next(stream)
    stream.close()  # it goes on without its reader
    joined = client.responses.retrieve(first.response.id, stream=True, starting_after=2)
    early = [next(joined) for _ in range(3)]
    assert [event.sequence_number for event in early] == [3, 4, 5]
    (root / "slow" / GO_FILE).touch()
    events = [*early, *joined]
    assert events[-1].type == "response.incomplete"
    again = list(client.responses.retrieve(first.response.id, stream=True, starting_after=2))
    assert plain_events(again) == plain_events(events)
    with pytest.raises(openai.BadRequestError):
        client.responses.retrieve(first.response.id, extra_query={"starting_after": 1})


def test_a_cancelled_one_tells_its_readers(client, root):
    (root / "slow" / GO_FILE).unlink(missing_ok=True)
    fields = {"model": "slow", "input": "hello", "max_output_tokens": 900, "store": True}
    stream = client.responses.create(**fields, background=True, stream=True)
    first = next(stream)
    assert client.responses.cancel(first.response.id).status == "cancelled"
    last = list(stream)[-1]
    assert (last.type, last.response["status"]) == ("response.cancelled", "cancelled")


def test_truncation_leaves_out_the_oldest_and_says_so(client):
    items = [{"role": "system", "content": "Be brief."}]
    items += [{"role": "user", "content": f"{number} " + "word " * 100} for number in range(20)]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="plain", input=items)
    assert caught.value.code == "context_length_exceeded"
    fields = {"model": "plain", "input": items, "max_output_tokens": 100, "truncation": "auto"}
    answer = client.responses.create(**fields)
    assert answer.truncation == "auto"
    (warning,) = answer.warnings
    count = int(warning.split("oldest ")[1].split()[0])
    assert 0 < count < 20
    kept = [items[0], *items[1 + count :]]
    whole = client.responses.input_tokens.count(model="plain", input=kept)
    assert answer.usage.input_tokens == whole.input_tokens
    one_more = client.responses.input_tokens.count(model="plain", input=[items[0], *items[count:]])
    assert one_more.input_tokens + 100 > 1024
    short = client.responses.create(model="plain", input="hello", truncation="auto")
    assert not hasattr(short, "warnings")


def test_outputs_go_with_their_calls(client):
    items = [
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        *[{"role": "user", "content": "word " * 100} for _ in range(9)],
    ]
    fields = {"model": "caller", "tools": TOOLS, "truncation": "auto", "max_output_tokens": 200}
    answer = client.responses.create(input=items, **fields)
    count = int(answer.warnings[0].split("oldest ")[1].split()[0])
    kept = client.responses.input_tokens.count(model="caller", tools=TOOLS, input=items[count:])
    assert answer.usage.input_tokens == kept.input_tokens


def test_tool_calls_are_bounded_where_a_server_runs_tools(client):
    answer = client.responses.create(model="caller", input="hello", tools=TOOLS, max_tool_calls=1)
    assert answer.max_tool_calls == 1
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    ids = [item.id.partition("_")[0] for item in answer.output]
    assert (answer.id[:5], ids) == ("resp_", ["rs", "msg", "fc"])


def test_tokens_are_counted_as_they_are_sent(client):
    fields = {"model": "caller", "input": "hello", "instructions": "Be brief.", "tools": TOOLS}
    counted = client.responses.input_tokens.count(**fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.responses.create(**fields).usage.input_tokens


def test_a_compacted_conversation_goes_on(client):
    items = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "What is it?"},
        {"role": "user", "content": "Count."},
    ]
    compacted = client.responses.compact(model="plain", input=items)
    assert compacted.object == "response.compaction"
    *kept, summary = compacted.output
    assert [item.content[0].text for item in kept] == ["hello", "Count."]
    assert (summary.type, compacted.usage.output_tokens > 0) == ("compaction", True)
    following = [item.model_dump(exclude_none=True) for item in compacted.output]
    following.append({"role": "user", "content": "And?"})
    answer = client.responses.create(model="plain", input=following)
    plain = [
        {"role": "user", "content": "hello"},
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "Summary of the conversation so far:\none two three"},
        {"role": "user", "content": "And?"},
    ]
    same = client.responses.input_tokens.count(model="plain", input=plain)
    assert answer.usage.input_tokens == same.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="plain", input=[{"type": "compaction", "encrypted_content": "gAAA"}])
    assert caught.value.param == "input[0].encrypted_content"


def test_a_conversation_and_its_items(client):
    made = client.conversations.create(
        items=[{"role": "user", "content": "hello"}], metadata={"topic": "counting"}
    )
    assert (made.object, made.id[:5], made.metadata) == ("conversation", "conv_", {"topic": "counting"})
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    added = client.conversations.items.create(
        made.id, items=[{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Count."}]
    )
    assert [item.content[0].type for item in added.data] == ["output_text", "input_text"]
    first, *rest = list(client.conversations.items.list(made.id, order="asc", limit=2))
    assert (first.content[0].text, rest) == ("hello", added.data)
    assert client.conversations.items.retrieve(first.id, conversation_id=made.id) == first
    assert client.conversations.items.delete(first.id, conversation_id=made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(first.id, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.delete(first.id, conversation_id=made.id)
    gone = client.conversations.delete(made.id)
    assert (gone.deleted, gone.object) == (True, "conversation.deleted")
    for call in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


def test_responses_of_a_conversation_add_to_it(client):
    made = client.conversations.create(items=[{"role": "user", "content": "hello"}])
    first = client.responses.create(model="plain", input="Count.", conversation=made.id)
    assert (first.conversation.id, first.store) == (made.id, False)
    texts = [item.content[0].text for item in client.conversations.items.list(made.id, order="asc")]
    assert texts == ["hello", "Count.", "one two three"]
    list(client.responses.create(model="plain", input="And?", conversation={"id": made.id}, stream=True))
    told = [
        {"role": item.role, "content": item.content[0].text}
        for item in client.conversations.items.list(made.id, order="asc")
    ]
    assert len(told) == 5
    counted = client.responses.input_tokens.count(model="plain", conversation=made.id, input="So?")
    same = client.responses.input_tokens.count(
        model="plain", input=[*told, {"role": "user", "content": "So?"}]
    )
    assert counted.input_tokens == same.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="plain", conversation=made.id, previous_response_id="x")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="plain", input="x", conversation="conv_0")
    assert missing.value.param == "conversation"


@pytest.mark.parametrize(
    "items", [[{"role": "user", "content": "x"}] * 21, [{"type": "web_search_call"}], [{"role": "robot"}]]
)
def test_items_that_no_conversation_takes(client, items):
    with pytest.raises(openai.BadRequestError):
        client.conversations.create(items=items)
