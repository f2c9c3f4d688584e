import pytest

from llmbox.engine.core.kv_cache.block_pool import BlockPool
from llmbox.engine.core.kv_cache.prefix_cache import extend_hashes
from support.scheduling import make_request


def hashes_of(tokens, namespace="", block_size=4):
    request = make_request("r", tokens, namespace=namespace)
    extend_hashes(request, block_size, len(tokens) // block_size)
    return request.block_hashes


def publish(pool, tokens, namespace=""):
    """Computed blocks of `tokens`, held once and published."""
    hashes = hashes_of(tokens, namespace)
    blocks = pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.cache_block(block, block_hash)
    return blocks


def test_free_blocks_are_handed_out_and_come_back():
    pool = BlockPool(3, 4)
    blocks = pool.allocate(2)
    assert len(set(blocks)) == 2
    assert (pool.num_used, pool.num_available) == (2, 1)
    pool.free(blocks)
    assert (pool.num_used, pool.num_available, pool.num_cached) == (0, 3, 0)
    pool.check()


def test_taking_more_than_there_is_is_a_bug():
    with pytest.raises(AssertionError):
        BlockPool(3, 4).allocate(4)


def test_releasing_twice_is_a_bug():
    pool = BlockPool(3, 4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError):
        pool.free(blocks)


def test_shared_block_is_used_until_the_last_holder_leaves():
    pool = BlockPool(3, 4)
    blocks = pool.allocate(1)
    pool.touch(blocks)
    pool.free(blocks)
    assert pool.num_used == 1
    pool.free(blocks)
    assert pool.num_used == 0
    pool.check()


def test_published_blocks_are_found_held_or_not():
    pool = BlockPool(4, 4)
    blocks = publish(pool, range(8))
    assert pool.find(hashes_of(range(8))) == blocks
    pool.free(blocks)
    assert pool.find(hashes_of(range(8))) == blocks
    assert (pool.num_cached, pool.num_idle(blocks)) == (2, 2)
    pool.touch(blocks)
    assert (pool.num_cached, pool.num_used) == (0, 2)
    pool.check()


def test_longest_prefix_is_found():
    pool = BlockPool(4, 4)
    blocks = publish(pool, range(8))
    assert pool.find(hashes_of([0, 1, 2, 3, 9, 9, 9, 9])) == blocks[:1]
    assert pool.find(hashes_of([9, 1, 2, 3, 4, 5, 6, 7])) == []


def test_same_block_behind_another_prefix_is_another_block():
    assert hashes_of([1, 1, 1, 1, 2, 2, 2, 2])[1] != hashes_of([3, 3, 3, 3, 2, 2, 2, 2])[1]


def test_namespaces_do_not_see_each_other():
    pool = BlockPool(4, 4)
    publish(pool, range(4), namespace="alice")
    assert pool.find(hashes_of(range(4), namespace="bob")) == []
    assert pool.find(hashes_of(range(4))) == []


def test_hashes_are_extended_not_recomputed():
    request = make_request("r", range(12))
    extend_hashes(request, 4, 1)
    first = request.block_hashes[0]
    extend_hashes(request, 4, 3)
    assert request.block_hashes[0] is first
    assert request.block_hashes == hashes_of(range(12))


def test_tail_is_evicted_before_head():
    pool = BlockPool(3, 4)
    pool.free(publish(pool, range(12)))
    pool.allocate(1)
    assert len(pool.find(hashes_of(range(12)))) == 2
    pool.allocate(1)
    assert len(pool.find(hashes_of(range(12)))) == 1
    pool.check()


def test_least_recently_used_is_evicted_first_and_free_ones_before_all():
    pool = BlockPool(3, 4)
    old, new = publish(pool, [1] * 4), publish(pool, [2] * 4)
    pool.free(old)
    pool.free(new)
    pool.touch(old)
    pool.free(old)  # used again: now the newer one
    pool.allocate(2)  # the free one, then an evicted one
    assert pool.find(hashes_of([1] * 4)) == old
    assert pool.find(hashes_of([2] * 4)) == []
    pool.check()


def test_second_copy_of_a_prefix_stays_unnamed():
    pool = BlockPool(3, 4)
    first, second = publish(pool, range(4)), publish(pool, range(4))
    assert pool.find(hashes_of(range(4))) == first
    pool.free(second)
    assert pool.num_cached == 0
    pool.free(first)
    assert pool.num_cached == 1
    pool.check()


def test_unpublished_blocks_are_not_found_and_end_up_free():
    pool = BlockPool(3, 4)
    blocks = publish(pool, range(8))
    pool.uncache(blocks)
    assert pool.find(hashes_of(range(8))) == []
    pool.free(blocks)
    assert (pool.num_cached, pool.num_available) == (0, 3)
    pool.check()
