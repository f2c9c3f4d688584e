"""A local Ray with two replicas of a tiny model: same tokens, keys, prefixes, and nothing lost."""

import asyncio
import json
import os
import signal
import socket

import httpx
import msgspec
import psutil
import pytest

from llmbox.app.config.settings import Settings
from llmbox.app.models.catalog import resolve
from llmbox.app.models.load_request import ModelRequest
from llmbox.app.models.registry import NameLookup
from llmbox.engine.ipc.messages import AddRequest, RequestOutput
from llmbox.engine.sampling_params import SamplingParams
from support.tiny_models import make_tiny_model

ray = pytest.importorskip("ray", reason="llmbox[ray] is not installed")
serve = pytest.importorskip("ray.serve", reason="llmbox[ray] is not installed")

pytestmark = pytest.mark.slow
GREEDY = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    from llmbox.app.ray.deploy import Deployment, deploy

    folder = tmp_path_factory.mktemp("ray")
    model = make_tiny_model(folder / "tiny")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home folder
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    options = {"model.threads": 1, "model.ctx": 256, "model.kv_tokens": 4096}
    settings = Settings()
    wanted = ModelRequest(resolve(str(model), os.environ, NameLookup()), None, options)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        plan = Deployment(
            config=wanted.config(settings.model),
            settings=settings,
            keys_file=folder / "keys.json",
            replicas=2,
            cpus=0.5,
        )
        deploy(plan, host="127.0.0.1", port=port, limit=120)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        patch.undo()


async def complete(client, prompt, **more):
    answer = await client.post("/v1/completions", json={**GREEDY, "prompt": prompt, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(client, prompt, begun=None):
    """Token ids of a streamed completion. `begun` counts those that have one."""
    ids = []
    body = {**GREEDY, "prompt": prompt, "stream": True, "return_token_ids": True, "max_tokens": 150}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    if begun is not None and not ids:
                        begun.release()
                    ids += choice.get("token_ids") or []
    return ids


def client_of(url):
    return httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None))


async def test_tokens_are_those_of_a_direct_engine(url, tmp_path):
    from llmbox import LLM

    prompts = [[5 + number, 6, 7] for number in range(8)]
    async with client_of(url) as client:
        answers = await asyncio.gather(
            *(complete(client, prompt, return_token_ids=True) for prompt in prompts)
        )
    model = make_tiny_model(tmp_path / "tiny")
    with LLM(str(model), threads=1, ctx=256, kv_tokens=4096) as llm:
        direct = llm.generate(prompts, max_tokens=24, temperature=0, ignore_eos=True)
    assert [each["choices"][0]["token_ids"] for each in answers] == [
        each.outputs[0].token_ids for each in direct
    ]


async def test_a_prefix_stays_with_its_replica(url):
    async with client_of(url) as client:
        for start in range(20, 26):
            front = [start + number % 7 for number in range(96)]
            cached = []
            for last in range(4):
                answer = await complete(client, [*front, last], max_tokens=1)
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert cached == [0, 96, 96, 96]


async def test_a_prefix_stays_with_a_replica_that_tells_its_queue_late(url):
    fronts = [[start + number % 5 for number in range(96)] for start in range(30, 34)]
    async with client_of(url) as client:
        for front in fronts:
            await complete(client, front, max_tokens=1)
        for pid in replica_pids():
            await asyncio.sleep(10.5)  # Ray knows a queue's length for 10 s, and asks only then
            os.kill(pid, signal.SIGSTOP)
            asks = [asyncio.create_task(complete(client, [*front, 4], max_tokens=1)) for front in fronts]
            await asyncio.sleep(0.4)
            os.kill(pid, signal.SIGCONT)
            answers = await asyncio.gather(*asks)
            assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers] == [96] * 4


async def test_a_wrong_key_is_refused(url):
    async with client_of(url) as client:
        headers = {"Authorization": "Bearer sk-llmbox-wrong"}
        answer = await client.post("/v1/completions", json={**GREEDY, "prompt": "a"}, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_of_200_streams_none_is_lost_with_a_killed_replica(url):
    """Half of them run in that replica or wait in its queue."""
    prompts = [[5 + number % 40, 6, 7 + number // 40] for number in range(200)]
    async with client_of(url) as client:
        wanted = await asyncio.gather(*(stream(client, each) for each in prompts))
        begun = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(stream(client, each, begun)) for each in prompts]
        for _ in range(60):  # more than run at once: all are sent by now
            await begun.acquire()
        os.kill(replica_pids()[0], signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
    lost = [number for number, (got, full) in enumerate(zip(answers, wanted, strict=True)) if got != full]
    assert not lost
    assert all(len(each) == 150 for each in answers)
    front = serve.get_deployment_handle("front", "llmbox")
    assert await front.resumed.remote() > 0, "it had some of them"


async def test_a_replica_of_another_version_refuses_with_both_fingerprints(url):
    """As one does that outlives the deployment of a front with another model."""
    request = AddRequest(request_id="other", prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=4))
    engines = serve.get_deployment_handle("engines", "llmbox")
    calls = engines.options(stream=True).generate.remote(msgspec.msgpack.encode(request), [], "another")
    (output,) = [msgspec.msgpack.decode(each, type=RequestOutput) async for each in calls]
    assert (output.finish_reason, output.error_code) == ("error", "replica_mismatch")
    assert "than this front (another). Deploy it again: llmbox ray deploy." in output.error_message


async def test_without_replicas_requests_are_answered_or_told_when_to_come_again(url):
    prompts = [[5 + number, 9, 7] for number in range(12)]
    async with client_of(url) as client:
        wanted = await asyncio.gather(*(complete(client, each, return_token_ids=True) for each in prompts))
        for pid in replica_pids():
            os.kill(pid, signal.SIGKILL)

        async def ask(number):
            """Ask until it is answered, and return the refusals before that."""
            refusals = []
            body = {**GREEDY, "prompt": prompts[number], "return_token_ids": True}
            while (answer := await client.post("/v1/completions", json=body)).status_code == 503:
                refusals.append(answer)
                await asyncio.sleep(0.2)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == wanted[number]["choices"][0]["token_ids"]
            return refusals

        told = [each for refusals in await asyncio.gather(*map(ask, range(12))) for each in refusals]
    assert {each.json()["error"]["code"] for each in told} <= {"no_replica"}
    assert all(int(each.headers["Retry-After"]) >= 1 for each in told)


def replica_pids():
    """Pids of the processes of this Ray's replicas, whose engines end with them."""
    children = psutil.Process().children(recursive=True)
    titles = {each.pid: " ".join(each.cmdline()) for each in children if each.status() != "zombie"}
    return [pid for pid, title in titles.items() if title.startswith("ray::ServeReplica:llmbox:engines")]
