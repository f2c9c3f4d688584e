"""Which states a prompt keeps, and which of them make room for others."""

from typing import cast

import pytest

from llmbox.engine.core.kv_cache.state_manager import StateManager, StatePool
from llmbox.engine.core.request import Request

BLOCK = 16


class Prompt:
    """What `StateManager` reads of a request to choose its states."""

    def __init__(self, tokens: int) -> None:
        self.num_tokens = tokens


def marks(slots: int, tokens: int, known: int = 0) -> tuple[int, ...]:
    manager = StateManager(StatePool(slots), BLOCK, caching=True, drafts=False)
    return manager._marks(cast("Request", Prompt(tokens)), known)


def computed_again(kept: tuple[int, ...], shared: int) -> int:
    """Tokens of the shared front that another prompt computes again, beside those of its last block."""
    known = shared // BLOCK * BLOCK
    return known - max((mark for mark in kept if mark <= known), default=0)


@pytest.mark.parametrize("tokens", [100, 1000, 4096, 32_000, 131_072])
def test_few_slots_keep_an_eighth_apart_and_closer_to_the_end(tokens: int) -> None:
    kept = marks(57, tokens)
    assert len(kept) <= 20
    for shared in range(BLOCK, tokens, 7):
        apart = max(512, tokens / 8 + BLOCK)
        assert computed_again(kept, shared) <= min(apart, max(64, tokens - shared + BLOCK))


@pytest.mark.parametrize("tokens", [100, 1000, 4096, 16_000])
def test_many_slots_keep_a_state_every_64_tokens(tokens: int) -> None:
    kept = marks(2048, tokens)
    assert all(computed_again(kept, shared) < 64 for shared in range(1, tokens))
    assert len(kept) <= 2048 // 4
    assert marks(2048, tokens, known=3) == tuple(sorted({*kept, 3 * BLOCK}))


def test_ends_of_turns_outlive_states_in_the_middle_of_prompts() -> None:
    pool, order = StatePool(4), (b"middle", b"end", b"later middle", b"later end")
    for name in order:
        slot = pool.allocate()
        assert slot is not None
        pool.keep(slot, name, is_end=name.endswith(b"end"))
    gone = []
    for _ in range(4):
        slot = pool.allocate()
        assert slot is not None
        gone.append(next(name for name in order if not pool.has(name) and name not in gone))
        pool.check(_used(pool))
    assert gone == [b"middle", b"later middle", b"end", b"later end"]


def _used(pool: StatePool) -> list[int]:
    return sorted({*range(pool.num_slots)} - {*pool._free} - {*pool._kept.values()})
