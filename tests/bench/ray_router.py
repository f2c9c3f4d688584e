"""Traffic with shared prefixes under Ray Serve: the prefix-aware router beside turns.

    PYTHONPATH=tests/bench python -P tests/bench/ray_router.py MODEL_DIR [--groups 12] [--kv-tokens N]

Needs `llmbox[ray]`. Both routers are deployed in turns, over replicas that have cached nothing yet, and get
the same requests: each begins with the long prefix of one of several groups, and ends with tokens of its own.
The KV cache of a replica has room for `--kv-tokens`: by default for three quarters of the prefixes, so that
turns compute some again and again, while two replicas together can keep all. Answers have equal tokens.
"""

import argparse
import asyncio
import os
import random
import socket
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx
import ray
from ray import serve
from ray.serve.request_router import PendingRequest, RunningReplica

from llmbox.app.config.settings import Settings
from llmbox.app.models.catalog import resolve
from llmbox.app.models.load_request import ModelRequest
from llmbox.app.models.registry import NameLookup
from llmbox.app.ray.deploy import Deployment, deploy
from llmbox.app.ray.router import PrefixRouter

ROUTERS = {"prefix": "llmbox.app.ray.router:PrefixRouter", "turns": "ray_router:TurnsRouter"}


class TurnsRouter(PrefixRouter):
    """Router that takes replicas in turns, whatever a prompt begins with."""

    def initialize_state(self, imbalance: int = 8) -> None:
        super().initialize_state(imbalance)
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ranked = sorted(candidate_replicas, key=lambda each: each.replica_id.unique_id)
        if pending_request is None or not ranked:
            return [ranked]
        self._turn += 1
        first = self._turn % len(ranked)
        return [[ranked[first]], [*ranked[:first], *ranked[first + 1 :]]]


def make_requests(options: argparse.Namespace) -> list[list[int]]:
    draw = random.Random(options.seed)
    low, high = 300, 1500
    prefixes = [[draw.randrange(low, high) for _ in range(options.prefix)] for _ in range(options.groups)]
    prompts = [
        [*prefix, *(draw.randrange(low, high) for _ in range(options.own))]
        for prefix in prefixes
        for _ in range(options.each)
    ]
    draw.shuffle(prompts)
    return prompts


async def measure(url: str, prompts: list[list[int]], options: argparse.Namespace):
    """Return seconds, the share of prompt tokens that were cached, and all tokens."""
    gate = asyncio.Semaphore(options.parallel)
    cached, asked, tokens = 0, 0, {}

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        nonlocal cached, asked
        body = {
            "model": "m", "prompt": prompts[number], "max_tokens": options.output, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        async with gate:
            answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        told = answer.json()
        usage = told["usage"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
        asked += usage["prompt_tokens"]
        tokens[number] = told["choices"][0]["token_ids"]

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        began = time.perf_counter()
        await asyncio.gather(*(ask(client, number) for number in range(len(prompts))))
        return time.perf_counter() - began, cached / asked, tokens


def serve_with(router: str, options: argparse.Namespace, folder: Path) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"model.threads": 1, "model.ctx": 2 * options.prefix, "model.kv_tokens": options.kv_tokens}
    settings = Settings()
    wanted = ModelRequest(resolve(options.model, os.environ, NameLookup()), "m", values)
    plan = Deployment(
        config=wanted.config(settings.model), settings=settings, keys_file=folder / "keys.json", alias="m",
        replicas=options.replicas, cpus=0.5,
    )  # fmt: skip
    plan = replace(plan, router=ROUTERS[router])
    deploy(plan, host="127.0.0.1", port=port, limit=300)
    return f"http://127.0.0.1:{port}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--each", type=int, default=16, help="requests of a group")
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--own", type=int, default=32, help="prompt tokens beside the prefix")
    parser.add_argument("--output", type=int, default=8)
    parser.add_argument("--kv-tokens", type=int, default=9216, help="of a replica")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    prompts = make_requests(options)
    seconds: dict[str, list[float]] = {name: [] for name in ROUTERS}
    tokens: dict[int, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for name in ROUTERS:
                ray.init(
                    num_cpus=options.replicas, include_dashboard=False, log_to_driver=False,
                    object_store_memory=80 << 20,
                )  # fmt: skip
                try:
                    url = serve_with(name, options, Path(folder))
                    took, hits, got = asyncio.run(measure(url, prompts, options))
                finally:
                    serve.shutdown()
                    ray.shutdown()
                assert got == (tokens or got), "other tokens"
                tokens = got
                seconds[name].append(took)
                rate = len(prompts) / took
                print(f"{name:7} {rate:6.2f} requests/s, {hits:.0%} of the prompt tokens cached", flush=True)
    ratios = [turns / prefix for prefix, turns in zip(seconds["prefix"], seconds["turns"], strict=True)]
    print(f"prefix / turns: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
