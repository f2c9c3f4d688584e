import asyncio
import time

import pytest

from llmbox.app.bench.client import BenchTarget, Prompts
from llmbox.app.bench.measure import LoadPoint, PointSpec, find_operating_point, measure_point
from llmbox.app.config.entries import LatencyTarget
from support.clock import Clock

LAX = LatencyTarget(1000.0, 1000.0)


def point(streams, *missed):
    return LoadPoint(
        concurrency=streams,
        requests=9,
        errors=0,
        first_error="",
        requests_per_s=1.0,
        output_tokens_per_s=1.0,
        ttft=0.1,
        tpot=0.1,
        missed=missed,
    )


async def search(limit, most=256, seconds=1e9, takes=1.0, missed=("tpot",)):
    """A server whose targets hold up to `limit` streams."""
    clock, tried = Clock(), []

    async def measure(streams, left):
        tried.append((streams, left))
        clock.now += takes
        return point(streams) if streams <= limit else point(streams, *missed)

    result = await find_operating_point(measure, most, seconds, clock)
    return result, [streams for streams, _ in tried]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 15, 16])
async def test_the_last_load_within_the_targets_is_found(limit):
    result, tried = await search(limit)
    assert result.found.concurrency == limit
    assert result.is_over
    assert len(tried) == len(set(tried)) <= 10


async def test_many_streams_are_found_to_a_sixteenth():
    result, tried = await search(200)
    assert 200 - 200 // 16 <= result.found.concurrency <= 200
    assert tried[:9] == [1, 2, 4, 8, 16, 32, 64, 128, 256]


async def test_no_load_within_the_targets_ends_at_once():
    result, tried = await search(0)
    assert result.found is None
    assert tried == [1]


async def test_the_most_streams_end_the_search():
    result, tried = await search(1000, most=24)
    assert tried == [1, 2, 4, 8, 16, 24]
    assert result.found.concurrency == 24
    assert not result.is_over


async def test_time_ends_the_search_with_what_was_found():
    result, tried = await search(100, seconds=3.5)
    assert tried == [1, 2, 4, 8]
    assert result.found.concurrency == 8
    assert not result.is_over


async def test_a_load_that_was_not_over_in_time_ends_it_too():
    result, tried = await search(4, missed=("time",))
    assert tried == [1, 2, 4, 8]
    assert result.found.concurrency == 4
    assert not result.is_over


@pytest.mark.parametrize(("percent", "streams", "count"), [(95, 1, 20), (99, 1, 100), (95, 50, 150)])
def test_enough_requests_for_a_percentile(percent, streams, count):
    assert PointSpec(8, 8, LAX, percent).count(streams) == count
    assert PointSpec(8, 8, LAX, percent, requests=5).count(streams) == 5


CHUNK = b'data: {"choices": [{"text": "a"}], "usage": null}\n\n'
END = b'data: {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'


class Server:
    """Answers two tokens. `status`: of the answers from the second on; `hangs` from then on."""

    def __init__(self, status=b"200 OK", *, hangs=False):
        self.status, self.hangs = status, hangs
        self.asked = self.open = self.most = 0

    async def answer(self, reader, writer):
        self.asked += 1
        self.open += 1
        self.most = max(self.most, self.open)
        late = self.asked > 1
        await reader.readuntil(b"\r\n\r\n")
        status = self.status if late else b"200 OK"
        writer.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\n\r\n" + CHUNK)
        await writer.drain()
        await asyncio.sleep(0.01)
        if self.hangs and late:
            await reader.read()
        writer.write(CHUNK + END)
        writer.close()
        self.open -= 1

    async def measure(self, target, streams, seconds=60.0):
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            spec, prompts = PointSpec(8, 8, target, 95), Prompts("x", (10, 99))
            return await measure_point(BenchTarget(url, "m"), prompts, spec, streams, seconds, spread=0.0)


async def test_a_load_within_its_targets_is_measured_whole():
    server = Server()
    made = await server.measure(LAX, 3)
    assert made.is_within
    assert (made.requests, made.errors, server.asked) == (23, 0, 23)
    assert server.most == 3
    assert made.ttft > 0
    assert made.tpot > 0


async def test_a_load_that_cannot_keep_a_target_any_more_is_given_up():
    server = Server()
    made = await server.measure(LatencyTarget(1000.0, 0.0), 2)
    assert made.missed == ("tpot",)
    assert server.asked < 10


async def test_a_refused_request_ends_a_load():
    server = Server(b"429 Too Many Requests")
    made = await server.measure(LAX, 1)
    assert made.missed == ("errors",)
    assert "429" in made.first_error
    assert server.asked == 2


async def test_a_load_that_hangs_is_given_up_in_time():
    began = time.monotonic()
    made = await Server(hangs=True).measure(LAX, 2, seconds=0.3)
    assert made.missed == ("time",)
    assert time.monotonic() - began < 60  # it would never have ended
