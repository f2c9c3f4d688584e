"""KV blocks from a prefill engine: the same tokens as from one engine, whatever is lost on the way."""

import os
import random
from collections import deque

import pytest

from llmbox.engine.core.kv_cache import handover
from llmbox.engine.core.kv_cache.handover import HandoverIntake, HandoverOutlet
from llmbox.engine.core.kv_cache.state_manager import pool_blocks
from llmbox.engine.core.kv_cache.tiers import CacheMemory
from llmbox.engine.ipc.handover_messages import HandedBlocks, Prefill, TakenSlots
from llmbox.engine.ipc.messages import AbortRequest
from llmbox.engine.kv_store.block_file import DamagedBlock, HandoverSegment, slot_bytes
from support.fake_runner import expected_output
from support.kv_tiers import MODEL, FakeBlockMemory
from support.scheduling import FakeEngine, make_request

KINDS = {
    "attention": {},
    "hybrid": {"state_slots": 20},
    "window": {"window": 5, "window_blocks": pool_blocks(5, 4, 8, 64)},
    "hybrid, window": {"state_slots": 20, "window": 5, "window_blocks": pool_blocks(5, 4, 8, 64)},
}


class Pair:
    """A decode engine, and prefill engines that take each other's place; this is the link between them."""

    def __init__(self, *, slots=6, prefill=None, **options):
        self.kind = {
            key: options[key] for key in ("state_slots", "window", "window_blocks") if key in options
        }
        self.prefill_options = prefill or {}
        self.decode = FakeEngine(**options)
        memory = FakeBlockMemory(self.decode.runner)
        self.largest = max(memory.sizes.values())
        self.handle = os.memfd_create("test")
        os.ftruncate(self.handle, slots * slot_bytes(self.largest))
        self.deaths, self.is_ready, self.is_given_up, self.pid = 0, False, False, 7
        self.messages, self.sent = deque(), []
        self.damage = lambda message: None
        self.start()
        kv_cache = self.decode.scheduler.kv_cache
        self.segment = HandoverSegment(self.handle, self.largest, MODEL)
        self.intake = kv_cache.intake = HandoverIntake(
            self, self.segment, CacheMemory(memory, kv_cache), clock=lambda: 0.0, least_tokens=8
        )

    def start(self):
        self.prefill = FakeEngine(**self.kind, **self.prefill_options)
        kv_cache = self.prefill.scheduler.kv_cache
        segment = HandoverSegment(self.handle, self.largest, MODEL)
        memory = FakeBlockMemory(self.prefill.runner)
        self.outlet = kv_cache.outlet = HandoverOutlet(
            segment, CacheMemory(memory, kv_cache), self.receive_from
        )
        self.is_ready = True

    def receive_from(self, message):
        self.damage(message)
        self.messages.append(message)

    def kill(self, *, is_final=False):
        self.deaths, self.is_ready, self.is_given_up = self.deaths + 1, False, is_final

    def send(self, message):
        if self.is_ready:
            self.sent.append(message)
            engine = self.prefill.engine
            match message:
                case Prefill():
                    engine.prefill(message)
                case TakenSlots():
                    engine.free_slots(message.slots)
                case AbortRequest():
                    engine.abort(message.request_id)

    def receive(self, *, is_waiting):
        found = list(self.messages)
        self.messages.clear()
        return found

    def wait(self, seconds):
        pass

    def close(self):
        pass

    def step(self):
        if self.is_ready and self.prefill.engine.has_work:
            self.messages.append(self.prefill.engine.step())
        if self.decode.engine.has_work:
            self.decode.step()
        self.decode.scheduler.check()
        self.prefill.scheduler.check()

    def run(self, meanwhile=lambda number: None):
        number = 0
        while self.decode.engine.has_work:
            assert number < 5000, "work is left, but nothing was done"
            meanwhile(number)
            self.step()
            number += 1
        for _ in range(100):  # what was aborted is still on its way
            self.intake.poll(hurry=True)
            self.step()
        assert self.decode.scheduler.pool.num_used == self.prefill.scheduler.pool.num_used == 0
        assert len(self.outlet._free) == self.segment.num_slots
        return self.decode.answers

    @property
    def prefills(self):
        return [message for message in self.sent if isinstance(message, Prefill)]

    def most_prompt_tokens(self):
        """Return the largest piece of a prompt in a step of the decode engine beside streams."""
        steps = [plan.rows for plan in self.decode.runner.plans]
        beside = [rows for rows in steps if any(row.start >= row.request.num_prompt for row in rows)]
        return max((row.num_tokens for rows in beside for row in rows), default=0)


def workload(seed):
    rng = random.Random(seed)
    prefixes = [[rng.randrange(9) for _ in range(length)] for length in (8, 13, 41)]
    return [
        make_request(
            f"r{number}",
            rng.choice(prefixes) + [number] * rng.randrange(1, 20),
            namespace=rng.choice(["", "alice"]),
            max_tokens=rng.randrange(1, 20),
            temperature=float(number % 2),
            seed=number,
        )
        for number in range(10)
    ]


def check(pair, requests):
    for request in requests:
        answer = pair.decode.answers[request.request_id]
        assert answer.finish_reason in {"length", "stop"}
        short = pair.decode.scheduler.config.short_context
        expected = expected_output(request.cache_namespace, request.prompt_ids, request.params, short)
        assert answer.token_ids == expected


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 24}, {"draft_rows": 12}], ids=["roomy", "tight", "drafts"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_gives_the_tokens_of_one_engine(kind, options):
    for seed in range(4):
        pair, requests = Pair(**KINDS[kind], **options), workload(seed)
        for request in requests:
            pair.decode.add(request)
        pair.run()
        check(pair, requests)
        assert pair.intake.handed_tokens > 0
        assert pair.intake.num_damaged == 0


@pytest.mark.parametrize("short", [20, 42])
def test_both_engines_have_the_factors_of_the_same_length(short):
    """A long prompt is sent with as many tokens as tell that it is long: 42 is not the end of a block."""
    pair = Pair(short_context=short, prefill={"short_context": short})
    requests = [make_request(f"r{n}", n, max_tokens=9) for n in (12, 16, 20, 21, 36, 42, 43, 44, 45)]
    for request in requests:
        pair.decode.add(request)
    pair.run()
    check(pair, requests)
    seen = {row.request for plan in pair.decode.runner.plans for row in plan.rows}
    twice = sum(request.is_long and request.num_prompt <= short for request in seen)
    assert len(pair.prefills) == len(requests) + twice, "nothing was computed in vain"
    assert twice


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_prefill_engine_computed_is_not_computed_again(kind):
    pair = Pair(**KINDS[kind])
    pair.decode.add(make_request("long", 90))
    pair.run()
    computed = sum(row.num_tokens for plan in pair.decode.runner.plans for row in plan.rows)
    assert computed == 2 + 7  # 88 tokens were handed over; the last of 8 tokens is not computed
    first = pair.decode.answers["long"].outputs[0]
    assert (first.cached_tokens, first.prefix_end) == (0, "new"), "computed now is no hit of the cache"


def test_known_and_short_prompts_stay_in_the_decode_engine():
    pair = Pair()
    pair.decode.add(make_request("first", range(100, 140)))
    pair.run()
    for name, prompt in {"again": range(100, 140), "longer": range(100, 147), "short": range(8)}.items():
        pair.decode.add(make_request(name, prompt))
    pair.run()
    assert [message.request_id.split()[0] for message in pair.prefills] == ["first"]
    assert pair.decode.answers["again"].outputs[0].cached_tokens == 36
    pair.decode.add(make_request("next", range(100, 180)))
    pair.run()
    assert pair.prefills[-1].first_block == 11, "what the decode engine has is not handed over again"


def test_what_needs_every_row_of_its_prompt_stays_in_the_decode_engine():
    pair = Pair()
    pair.decode.add(make_request("told", 40, prompt_logprobs=1))
    pair.run()
    assert not pair.prefills


def test_streams_have_no_long_prompt_beside_them(monkeypatch):
    monkeypatch.setattr(handover, "COPY_SHARE", 0.0)
    pair = Pair()
    streams = [make_request(f"s{number}", 5, max_tokens=100) for number in range(3)]
    late = [make_request(f"p{number}", 60 + number) for number in range(3)]
    for stream in streams:
        pair.decode.add(stream)

    def arrive(number):
        if number >= 10 and late:
            pair.decode.add(late.pop())

    pair.run(arrive)
    check(pair, streams)
    assert 1 < pair.most_prompt_tokens() <= handover.DECODE_PROMPT_TOKENS


def test_a_full_segment_holds_the_prefill_engine_back():
    pair = Pair(slots=2)
    requests = [make_request(f"r{number}", 60) for number in range(3)]
    for request in requests:
        pair.decode.add(request)
    for _ in range(3):
        pair.prefill.engine.step()
    assert not pair.outlet._free
    assert pair.outlet.holding("kv"), "blocks wait in the pool of the prefill engine"
    pair.run()
    check(pair, requests)


def test_blocks_that_wait_for_a_full_segment_leave_windows_their_pool():
    """The pool of sliding windows has room for the requests that run, not for those that have ended."""
    sizes = {"max_running": 2, "token_budget": 8}
    pair = Pair(slots=2, prefill=sizes, window=9, window_blocks=pool_blocks(9, 4, 2, 8), **sizes)
    requests = [make_request(f"r{n}", 26, max_tokens=4, seed=n) for n in range(14)]
    for request in requests:
        pair.decode.add(request)
    while pair.prefill.engine.has_work:  # the decode engine takes nothing meanwhile
        pair.messages.append(pair.prefill.engine.step())
        pair.prefill.scheduler.check()
    pair.run()
    check(pair, requests)


def test_choices_share_what_was_handed_over():
    pair = Pair()
    requests = [
        make_request(f"r{n}", range(50), seed=n, temperature=1.0, fork_of="r0" if n else None)
        for n in range(3)
    ]
    for request in requests:
        pair.decode.add(request)
    pair.run()
    check(pair, requests)
    assert len(pair.prefills) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_dies_or_is_torn_the_tokens_are_the_same(kind):
    deaths = damaged = 0
    for seed in range(8):
        rng = random.Random(seed)
        pair, requests = Pair(slots=rng.choice([1, 3, 9]), num_blocks=40, **KINDS[kind]), workload(seed)

        def tear(message, pair=pair, rng=rng):
            if isinstance(message, HandedBlocks) and message.blocks and rng.random() < 0.2:
                at = message.blocks[0].slot * slot_bytes(pair.largest) + rng.randrange(128 + 8)
                pair.segment._memory[at] ^= 1 + rng.randrange(255)

        def disturb(number, pair=pair, rng=rng):
            if not pair.is_ready and not pair.is_given_up and rng.random() < 0.5:
                pair.start()
            elif pair.is_ready and rng.random() < 0.1 and pair.deaths < 5:
                pair.kill(is_final=pair.deaths == 4)

        pair.damage = tear
        for request in requests:
            pair.decode.add(request)
        while pair.decode.engine.has_work:
            disturb(0)
            pair.step()
        check(pair, requests)
        assert pair.decode.scheduler.pool.num_used == 0
        deaths, damaged = deaths + pair.deaths, damaged + pair.intake.num_damaged
    assert deaths > 8
    assert damaged > 0


def test_a_request_that_two_engines_died_of_is_computed_in_the_decode_engine():
    pair = Pair()
    pair.decode.add(make_request("poison", 40))
    for _ in range(2):
        pair.decode.step()
        pair.kill()
        pair.decode.step()
        pair.start()
    pair.run()
    check(pair, [make_request("poison", 40)])
    assert len(pair.prefills) == 2
    assert pair.intake.handed_tokens == 0


def test_a_request_that_fails_in_the_prefill_engine_is_computed_in_the_decode_engine():
    pair = Pair()
    pair.prefill.runner.poisoned.add("bad 1")
    pair.decode.add(make_request("bad", 90))
    pair.run()
    check(pair, [make_request("bad", 90)])
    assert sum(row.num_tokens for plan in pair.decode.runner.plans for row in plan.rows) == 90 + 7


@pytest.mark.parametrize("steps", range(4))
def test_an_abort_while_blocks_are_handed_over_leaves_nothing(steps):
    pair = Pair(slots=3)
    for name in "ab":
        pair.decode.add(make_request(name, 90))
    for _ in range(steps):
        pair.step()
    pair.decode.abort("a")
    pair.run()
    assert pair.decode.answers["a"].finish_reason == "abort"
    check(pair, [make_request("b", 90)])


def test_preempted_requests_come_back_from_the_prefill_engine():
    pair = Pair(num_blocks=26)
    requests = [make_request(f"r{number}", 24, max_tokens=40) for number in range(4)]
    for request in requests:
        pair.decode.add(request)
    pair.run()
    check(pair, requests)
    assert pair.decode.scheduler.active.preemptions > 0
    assert len(pair.prefills) > 4


def test_a_slot_tells_torn_and_other_blocks():
    handle = os.memfd_create("test")
    os.ftruncate(handle, 2 * slot_bytes(64))
    writer, reader = (HandoverSegment(handle, 64, MODEL) for _ in range(2))
    writer.payload(1, 64)[:] = bytes(range(64))
    with pytest.raises(DamagedBlock):
        reader.open(1, "kv", b"a" * 32, 64)  # not sealed: the prefill engine died before
    writer.seal(1, "kv", b"a" * 32, 64)
    assert bytes(reader.open(1, "kv", b"a" * 32, 64)) == bytes(range(64))
    for wrong in [
        (1, "kv", b"b" * 32, 64),
        (1, "state", b"a" * 32, 64),
        (1, "kv", b"a" * 32, 60),
        (2, "kv", b"a" * 32, 64),
    ]:
        with pytest.raises(DamagedBlock):
            reader.open(*wrong)
    with pytest.raises(DamagedBlock):
        HandoverSegment(handle, 64, bytes(16)).open(1, "kv", b"a" * 32, 64)
    writer.payload(1, 64)[40] ^= 4
    with pytest.raises(DamagedBlock):
        reader.open(1, "kv", b"a" * 32, 64)
