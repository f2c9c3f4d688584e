"""Requests that are being prepared count in a model's queue: a burst is refused before any template works."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from support.cli_box import PATIENCE
from support.fake_engine import write_model
from support.openai_server import serving
from support.tokenizers_zoo import LLAMA2, byte_level, drawn_ids, write_text_files

CHAT = {"model": "one", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
PLACES = 3


@pytest.fixture
def server(tmp_path):
    tokenizer = byte_level()
    folder = write_text_files(tmp_path / "one", tokenizer, LLAMA2)
    write_model(folder, **drawn_ids(tokenizer), max_running=1)
    with serving(tmp_path / "data", queue=PLACES - 1) as server:
        server.load(folder, "one")
        yield server


def test_chats_whose_template_is_awaited_hold_places(server):
    """Three stand before the template's worker, which does nothing: all others are told 429 at once."""
    pool = server.services.gateway.templates
    rendered, go = [], asyncio.Event()
    answer = pool.answer

    async def wait(job):
        rendered.append(job)
        await go.wait()
        return await answer(job)

    pool.answer = wait

    async def places() -> int:
        return server.services.engines.get("one").supervisor._reserved.places

    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE) as http,
        ThreadPoolExecutor(PLACES) as threads,
        ExitStack() as stack,
    ):
        stack.callback(lambda: server.call(_set(go)))  # also where a check fails: comments keep a stream open
        held = [
            threads.submit(http.post, "/v1/chat/completions", json=CHAT | {"stream": i == 0})
            for i in range(PLACES)
        ]
        while server.call(places()) < PLACES or len(rendered) < PLACES:
            assert not any(future.done() for future in held)
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/messages", CHAT),
            ("/v1/completions", {"model": "one", "prompt": "hello"}),
            ("/v1/embeddings", {"model": "one", "input": ["hello"]}),
        ):
            refused = http.post(path, json=body)
            assert refused.status_code == 429, refused.text
            assert int(refused.headers["Retry-After"]) >= 1
        assert len(rendered) == PLACES, "no template worked for those"
        server.call(_set(go))
        assert [future.result().status_code for future in held] == [200] * PLACES
        assert server.call(places()) == 0
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


async def _set(event: asyncio.Event) -> None:
    event.set()
