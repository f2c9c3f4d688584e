"""Blocks that a GPU evicted to main memory: the same tokens, from fewer computed ones."""

import random

import pytest

from llmbox.engine.core.kv_cache import host_tier
from llmbox.engine.core.kv_cache.state_manager import pool_blocks
from support.fake_runner import expected_output
from support.kv_tiers import SECONDS, TieredEngine, write_out
from support.scheduling import make_request

KINDS = {
    "attention": {},
    "hybrid": {"state_slots": 6},
    "window": {"window": 5, "window_blocks": pool_blocks(5, 4, 8, 64)},
    "hybrid, window": {"state_slots": 6, "window": 5, "window_blocks": pool_blocks(5, 4, 8, 64)},
}
TIMES = {"at once": {}, "overlap": {"depth": 1, "polls": 3}}


def serve(engine, requests):
    """Run them and check each token; return the tokens that came from the host tier and from disk."""
    for request in requests:
        engine.add(request)
    answers = engine.run()
    for request in requests:
        expected = expected_output(request.cache_namespace, request.prompt_ids, request.params)
        assert answers[request.request_id].token_ids == expected
    first = [answers[request.request_id].outputs[0] for request in requests]
    return sum(each.host_tokens for each in first), sum(each.disk_tokens for each in first)


def test_what_the_device_evicted_comes_back_from_the_host(tmp_path):
    engine = TieredEngine(None, num_blocks=12, host=20)
    serve(engine, [make_request("long", range(100, 132))])
    serve(engine, [make_request("other", range(200, 236))])
    assert serve(engine, [make_request("again", range(100, 132))]) == (24, 0)
    assert engine.engine.stats().host_hits == 24
    stats = engine.tiers.stats()
    assert stats["host_loaded_bytes"] == 6 * engine.memory.sizes["kv"]
    assert stats["host_saved_bytes"] >= stats["host_loaded_bytes"]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", [3, 12, 60])
def test_random_requests_have_their_tokens_whatever_the_tiers_keep(tmp_path, kind, times, host):
    for seed in range(3):
        rng, found = random.Random(seed), 0
        prefixes = [[rng.randrange(9) for _ in range(length)] for length in (8, 13, 21)]
        root = tmp_path / str(seed) if seed else None
        engine = TieredEngine(root, num_blocks=16, host=host, **KINDS[kind], **TIMES[times])
        for round_ in range(8):
            requests = [
                make_request(
                    f"{round_} {number}",
                    rng.choice(prefixes) + [rng.randrange(3)] * rng.randrange(1, 12),
                    namespace=rng.choice(["", "alice"]),
                    max_tokens=rng.randrange(1, 12),
                )
                for number in range(3)
            ]
            found += serve(engine, requests)[0]
            engine.scheduler.check()
        assert found or host < 60
        engine.tiers.close(SECONDS)


def test_a_block_that_went_back_is_not_copied_again_and_leaves_first():
    engine = TieredEngine(None, num_blocks=12, host=20)
    serve(engine, [make_request("a", range(100, 132))])
    serve(engine, [make_request("b", range(200, 236))])
    serve(engine, [make_request("a2", range(100, 132))])
    saved = engine.host.saved_bytes
    kept = list(engine.host._blocks["kv"])
    serve(engine, [make_request("b2", range(200, 236))])
    serve(engine, [make_request("a3", range(100, 132))])
    again = engine.host.saved_bytes - saved
    assert again < saved, "most of it was here already"
    assert len(set(kept)) == len(kept)


def test_both_tiers_give_their_part(tmp_path):
    """The host keeps the beginning of what was evicted longest, the disk has all of it."""
    engine = TieredEngine(tmp_path, num_blocks=12, host=3)
    serve(engine, [make_request("long", range(100, 132))])
    write_out(engine.tiers)
    serve(engine, [make_request("other", range(200, 232))])
    host, disk = serve(engine, [make_request("again", range(100, 132))])
    assert host > 0
    assert disk > 0
    engine.close()


def test_another_key_finds_nothing(tmp_path):
    engine = TieredEngine(None, num_blocks=12, host=20)
    serve(engine, [make_request("a", range(100, 132), tenant="a", namespace="a/")])
    serve(engine, [make_request("other", range(200, 236))])
    assert serve(engine, [make_request("b", range(100, 132), tenant="b", namespace="b/")]) == (0, 0)
    assert engine.host.loaded_bytes == 0


def test_blocks_that_may_be_wrong_leave_the_host_too():
    engine = TieredEngine(None, num_blocks=12, host=20)
    serve(engine, [make_request("good", range(100, 132))])
    serve(engine, [make_request("other", range(200, 244), max_tokens=4)])
    engine.runner.poisoned.add("bad")
    engine.add(make_request("bad", range(100, 132)))
    engine.run()
    assert engine.answers["bad"].finish_reason == "error"
    assert serve(engine, [make_request("again", range(100, 132))])[0] == 0


def test_an_aborted_request_holds_no_block(tmp_path):
    engine = TieredEngine(None, num_blocks=12, host=20, polls=1000)
    serve(engine, [make_request("a", range(100, 132))])
    serve(engine, [make_request("other", range(200, 236))])
    engine.host.finish_copies(wait=True)
    engine.add(make_request("again", range(100, 132)))
    held = [block.holders for block in engine.host._blocks["kv"].values()]
    assert any(held)
    engine.abort("again")
    engine.run()
    engine.host.finish_copies(wait=True)
    assert not any(block.holders for block in engine.host._blocks["kv"].values())


def kept_bytes(engine):
    return sum(len(blocks) * engine.memory.sizes[kind] for kind, blocks in engine.host._blocks.items())


def test_windows_that_are_being_read_leave_requests_their_pool():
    """The pool of sliding windows has room for the requests that run, not for those that wait."""
    pool = pool_blocks(9, 4, 2, 8)
    sizes = {"window": 9, "window_blocks": pool, "max_running": 2, "token_budget": 8}
    engine = TieredEngine(None, host=400, num_blocks=60, **sizes)
    prompts = {f"p{n}": make_request(f"p{n}", 17, max_tokens=1) for n in range(30)}
    for request in prompts.values():
        engine.add(request)
    engine.run()
    for n in range(4):
        engine.add(make_request(f"other{n}", 120, max_tokens=1))
    engine.run()  # all else is on the host
    engine.memory.polls = 40
    for n in range(2):
        engine.add(make_request(f"running{n}", 12, max_tokens=40))
    for _ in range(6):
        engine.step()
    least = pool
    windows = engine.scheduler.kv_cache.windows
    for name, request in prompts.items():
        engine.add(make_request(f"{name} again", request.prompt_ids, max_tokens=4))
    while engine.engine.has_work:
        engine.step()
        engine.scheduler.check()
        least = min(least, windows.pool.num_available)
    assert least < 2
    assert engine.tiers.stats()["host_loaded_bytes"] > 0


def test_where_nothing_more_can_be_pinned_the_tier_stays_as_it_is(monkeypatch):
    engine = TieredEngine(None, num_blocks=12, host=20)
    block = engine.memory.sizes["kv"]
    monkeypatch.setattr(host_tier, "SLAB_BYTES", 2 * block)
    real, pinned = engine.memory.make_buffer, []

    def make_buffer(size):
        if len(pinned) == 2:
            raise RuntimeError("CUDA error: out of memory")
        pinned.append(size)
        return real(size)

    monkeypatch.setattr(engine.memory, "make_buffer", make_buffer)
    for number in range(4):
        serve(engine, [make_request(f"r{number}", range(100 * number, 100 * number + 36))])
    assert pinned == [2 * block, 2 * block]
    assert kept_bytes(engine) == 4 * block


def test_one_step_copies_so_many_bytes_at_most(monkeypatch):
    engine = TieredEngine(None, num_blocks=12, host=20)
    monkeypatch.setattr(host_tier, "STEP_BYTES", 2 * engine.memory.sizes["kv"])
    serve(engine, [make_request("long", range(100, 132))])
    serve(engine, [make_request("other", range(200, 236), max_tokens=1)])
    assert kept_bytes(engine) == 2 * engine.memory.sizes["kv"]
    assert engine.tiers.stats()["host_skipped"] > 0
