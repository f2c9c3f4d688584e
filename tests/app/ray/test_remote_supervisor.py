"""Supervisor of replicas, without Ray: replicas that die, that are not there, and clients that leave."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest

from llmbox.app.errors import ApiError
from llmbox.app.ray import front
from llmbox.app.ray.front import MOST_RESUMES, RemoteSupervisor
from llmbox.app.ray.replica import NEEDS_VOCABULARY, ReplicaFacts
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.messages import AddRequest, RequestOutput, Vocabulary
from llmbox.engine.sampling_params import SamplingParams
from support.engines import read, until
from support.scheduling import INFO

Answer = Callable[[AddRequest], Iterator[RequestOutput]]


class Stream:
    """What a handle of Ray returns for a streamed call."""

    def __init__(self, outputs: Iterator[RequestOutput]) -> None:
        self._outputs = outputs
        self.is_cancelled = False

    async def __aiter__(self):
        for output in self._outputs:
            yield msgspec.msgpack.encode(output)
            await asyncio.sleep(0)

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """Deployment of which each call is answered by `answer`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[AddRequest] = []
        self.streams: list[Stream] = []
        self.vocabularies: list[tuple[object, ...]] = []
        self.facts = self.generate = self

    def options(self, **_: object) -> "Handle":
        return self

    def remote(self, *words: object):
        return self._facts() if not words else self._generate(words[0])

    async def _facts(self) -> bytes:
        return msgspec.msgpack.encode(
            ReplicaFacts(info=replace(INFO, block_size=4, max_running=2), fingerprint="own")
        )

    def _generate(self, message: object) -> Stream:
        request = msgspec.msgpack.decode(message, type=AddRequest)
        self.asked.append(request)
        self.streams.append(Stream(self.answer(request)))
        return self.streams[-1]

    def broadcast(self, name: str, *words: object) -> "Handle":
        assert name == "set_vocabulary"
        self.vocabularies.append(words)
        return self

    async def results_async(self) -> None: ...


def token(request: AddRequest, token_id: int, finish_reason: str | None = None) -> RequestOutput:
    return RequestOutput(request_id=request.request_id, token_ids=[token_id], finish_reason=finish_reason)


def counting(request: AddRequest) -> Iterator[RequestOutput]:
    """Tokens 0, 1, 2, ... up to `max_tokens`, after those that the request has."""
    last = request.params.max_tokens - 1
    for number in range(len(request.output_ids), last + 1):
        yield token(request, number, "length" if number == last else None)


def dying(after: int) -> Answer:
    """Each replica dies after so many tokens of a request."""

    def answer(request: AddRequest) -> Iterator[RequestOutput]:
        for count, output in enumerate(counting(request)):
            if count == after:
                raise RuntimeError("the replica died")
            yield output

    return answer


async def supervised(handle: Handle, running: dict[str, str] | None = None) -> RemoteSupervisor:
    fleet = {"a": "own"} if running is None else running
    supervisor = RemoteSupervisor(
        EngineConfig(model_path="/models/m", name="m"), handle=handle, running=lambda: fleet
    )
    await supervisor.start()
    return supervisor


def request(max_tokens: int = 6, **more: object) -> AddRequest:
    return AddRequest(
        request_id="r", prompt_ids=[1] * 9, params=SamplingParams(max_tokens=max_tokens), **more
    )


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(front, "_PAUSE", 0.0)


async def test_a_stream_has_the_tokens_of_its_replica():
    handle = Handle(counting)
    supervisor = await supervised(handle)
    tokens, last = await read(supervisor.submit(request()))
    assert (tokens, last.finish_reason) == ([0, 1, 2, 3, 4, 5], "length")
    assert handle.streams[0].is_cancelled, "Ray keeps nothing of it"
    await supervisor.stop()


async def test_a_request_goes_on_after_the_death_of_each_replica():
    handle = Handle(dying(2))
    supervisor = await supervised(handle)
    stream = supervisor.submit(request(max_tokens=6))
    tokens, last = await read(stream)
    assert (tokens, last.finish_reason) == ([0, 1, 2, 3, 4, 5], "length")
    assert [each.output_ids for each in handle.asked] == [[], [0, 1], [0, 1, 2, 3]]
    assert stream.resumes == supervisor.resumed == 2


async def test_a_request_under_which_replicas_keep_dying_is_given_up():
    handle = Handle(dying(0))
    supervisor = await supervised(handle)
    _, last = await read(supervisor.submit(request()))
    assert (last.finish_reason, last.error_code) == ("error", "engine_error")
    assert len(handle.asked) == 1 + MOST_RESUMES


async def test_a_client_that_leaves_ends_the_call_and_nothing_is_kept():
    def endless(request: AddRequest) -> Iterator[RequestOutput]:
        while True:
            yield token(request, 7)

    handle = Handle(endless)
    supervisor = await supervised(handle)
    stream = supervisor.submit(request(max_tokens=1 << 20))
    await anext(stream)
    stream.cancel()
    await until(lambda: handle.streams[0].is_cancelled)
    await until(lambda: not supervisor._tasks)
    assert not stream.awaits_times
    assert not supervisor._requests._in_engine
    assert not supervisor._requests._cancelled
    assert supervisor.open_requests == 0
    assert len(handle.asked) == 1, "it is not sent to another replica"


async def test_without_a_replica_requests_are_to_come_again():
    fleet = {"a": "own"}
    supervisor = await supervised(Handle(counting), fleet)
    fleet.clear()
    with pytest.raises(ApiError, match="No replica of m runs") as refused:
        supervisor.submit(request())
    assert (refused.value.status, refused.value.code) == (503, "no_replica")
    assert int(refused.value.headers["Retry-After"]) >= 1
    assert supervisor.readiness() == (False, refused.value.message)
    fleet["b"] = "own"
    tokens, _ = await read(supervisor.submit(request(max_tokens=2)))
    assert tokens == [0, 1]


async def test_replicas_of_another_model_are_told_with_both_fingerprints():
    fleet = {"a": "own"}
    supervisor = await supervised(Handle(counting), fleet)
    fleet["a"] = "other"
    with pytest.raises(
        ApiError, match=r"another model or version \(other\) than this front \(own\)"
    ) as refused:
        supervisor.submit(request())
    assert refused.value.status == 503


async def test_more_replicas_run_more_requests():
    supervisor = await supervised(Handle(counting), {"a": "own", "b": "own", "c": "other"})
    supervisor.check_room(1)
    assert supervisor.info.max_running == 2 * 2


async def test_a_replica_without_the_vocabulary_gets_it():
    def answer(request: AddRequest) -> Iterator[RequestOutput]:
        if not handle.vocabularies:
            yield RequestOutput(
                request_id=request.request_id, finish_reason="error", error_code=NEEDS_VOCABULARY
            )
        else:
            yield from counting(request)

    handle = Handle(answer)
    supervisor = await supervised(handle)
    supervisor.vocabulary = Vocabulary(data=b"ab", sizes=[1, 1], special=[0])
    tokens, _ = await read(supervisor.submit(request(max_tokens=2)))
    assert tokens == [0, 1]
    assert handle.vocabularies == [(b"ab", [1, 1], [0])]
