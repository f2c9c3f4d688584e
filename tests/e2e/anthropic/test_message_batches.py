"""Message batches as Anthropic's client makes them, on an engine whose tokens are known."""

import httpx
import pytest

from llmbox.app.security.keys import KeySpec
from llmbox.app.store import RecordFilter
from support.cli_box import PATIENCE, until
from support.deferred_module import DeferredModule
from support.fake_engine import write_model
from support.openai_server import serving
from support.tokenizers_zoo import byte_level, write_text_files

anthropic = DeferredModule("anthropic")

ASKED = {"model": "plain", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(tmp_path_factory, root):
    with serving(tmp_path_factory.mktemp("data")) as server:
        server.load_scripted(root, {"plain": "one two three"}, "")
        held = write_text_files(root / "held", byte_level())
        write_model(held, declared_vocab=512, context=1024, script=[72, 73], hold_at=2)
        server.load(held, "held")
        yield server


def client_of(server, key="none"):
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=PATIENCE)


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as client:
        yield client


def ended(client, batch):
    until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
    return client.messages.batches.retrieve(batch.id)


def test_a_batch_from_its_creation_to_its_results(server, client):
    requests = [
        {"custom_id": "good", "params": ASKED},
        {"custom_id": "nobody", "params": ASKED | {"model": "nobody"}},
        {"custom_id": "bad", "params": ASKED | {"max_tokens": "x"}},
    ]
    batch = client.messages.batches.create(requests=requests)
    assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 3)
    assert batch.results_url is None
    done = ended(client, batch)
    counts = done.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 1, 2)
    assert done.ended_at >= done.created_at
    results = {each.custom_id: each.result for each in client.messages.batches.results(batch.id)}
    assert list(results) == ["good", "nobody", "bad"]
    message = client.messages.create(**ASKED)
    assert results["good"].message.content == message.content
    assert results["nobody"].error.error.type == "not_found_error"
    assert results["bad"].error.error.type == "invalid_request_error"
    rows = server.call(server.services.request_log.query(RecordFilter(limit=50)))
    assert {row.client for _, row in rows} >= {"batch"}


def test_pages_of_batches(client):
    made = [client.messages.batches.create(requests=[{"custom_id": "a", "params": ASKED}]) for _ in range(3)]
    ids = [batch.id for batch in reversed(made)]
    first = client.messages.batches.list(limit=2)
    assert ([batch.id for batch in first.data], first.has_more) == (ids[:2], True)
    assert first.get_next_page().data[0].id == ids[2]
    assert [batch.id for batch in client.messages.batches.list(before_id=ids[2], limit=2).data] == ids[:2]
    assert ids == [batch.id for batch in client.messages.batches.list()][:3]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list(after_id="msgbatch_none")


def test_a_batch_is_cancelled_and_then_deleted(root, server, client):
    held = ASKED | {"model": "held"}
    requests = [{"custom_id": str(n), "params": held} for n in range(12)]
    batch = client.messages.batches.create(requests=requests)
    until(lambda: len(server.services.gateway.in_flight()) == 8)
    with pytest.raises(anthropic.BadRequestError, match="cancel"):
        client.messages.batches.delete(batch.id)
    with pytest.raises(anthropic.AnthropicError):
        client.messages.batches.results(batch.id)
    client.messages.batches.cancel(batch.id)
    done = ended(client, batch)
    assert done.request_counts.canceled == 12
    assert done.cancel_initiated_at is not None
    assert not server.services.gateway.in_flight()
    assert {each.result.type for each in client.messages.batches.results(batch.id)} == {"canceled"}
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_a_request_somebody_waits_for_goes_before_a_batch(server, client):
    priorities = []
    supervisor = server.services.engines.get("plain").supervisor
    submit = supervisor.submit

    def watched(message):
        priorities.append(message.priority)
        return submit(message)

    supervisor.submit = watched
    try:
        ended(client, client.messages.batches.create(requests=[{"custom_id": "a", "params": ASKED}]))
        client.messages.create(**ASKED)
    finally:
        supervisor.submit = submit
    assert priorities[0] > 100 > priorities[1]


@pytest.mark.parametrize(
    ("requests", "word"),
    [
        ([], "requests"),
        ([{"custom_id": "a b", "params": ASKED}], "custom_id"),
        ([{"custom_id": "a", "params": ASKED}] * 2, "twice"),
        ([{"custom_id": "a", "params": ASKED | {"stream": True}}], "streamed"),
    ],
)
def test_batches_that_cannot_be(client, requests, word):
    with pytest.raises(anthropic.BadRequestError, match=word) as error:
        client.messages.batches.create(requests=requests)
    assert error.value.body["type"] == "error"


def test_a_batch_is_its_keys_and_ends_with_it(root, server, client):
    keys = server.services.security.keys
    _, first = keys.add(KeySpec(name="first"))
    _, second = keys.add(KeySpec(name="second", models=("plain",)))
    held = [{"custom_id": str(n), "params": ASKED | {"model": "held"}} for n in range(2)]
    with client_of(server, first) as mine, client_of(server, second) as other:
        batch = mine.messages.batches.create(requests=held)
        for stranger in (other, client):
            with pytest.raises(anthropic.NotFoundError):
                stranger.messages.batches.retrieve(batch.id)
            assert batch.id not in [each.id for each in stranger.messages.batches.list()]
        refused = ended(other, other.messages.batches.create(requests=held))
        assert refused.request_counts.errored == 2
        (one, _) = other.messages.batches.results(refused.id)
        assert one.result.error.error.type == "permission_error"
        until(lambda: len(server.services.gateway.in_flight()) == 2)
        server.services.security.revoke("first")
        until(lambda: not server.services.gateway.in_flight())
    assert server.call(server.services.stored.erase_owners_but(keys.ids())) >= 1


def test_results_come_as_lines(server, client):
    batch = ended(client, client.messages.batches.create(requests=[{"custom_id": "a", "params": ASKED}]))
    assert batch.results_url == f"{server.url}/v1/messages/batches/{batch.id}/results"
    answer = httpx.get(batch.results_url, timeout=PATIENCE)
    assert answer.headers["content-type"].startswith("application/x-jsonl")
    assert answer.text.count("\n") == 1
