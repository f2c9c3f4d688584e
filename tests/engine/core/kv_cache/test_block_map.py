"""The map of blocks against what the pool counts, and the prefixes that were found."""

from support.scheduling import FakeEngine, make_request


def counts(engine):
    found = {"live": 0, "cached": 0, "free": 0}
    for run in engine.engine.blocks().runs:
        found[run.state] += run.count
    return found


def test_the_map_agrees_with_the_counters_at_every_step():
    engine = FakeEngine(num_blocks=30, block_size=4, max_running=3)
    for name in "abcde":
        engine.add(make_request(name, 20, max_tokens=12))
    while engine.engine.has_work:
        engine.step()
        stats = engine.engine.stats()
        told = counts(engine)
        assert (told["live"], told["cached"]) == (stats.blocks_used, stats.blocks_cached)
        assert sum(told.values()) == 30


def test_live_blocks_name_their_holder_and_cached_ones_who_computed_them():
    engine = FakeEngine(num_blocks=30, block_size=4)
    engine.add(make_request("a", 10, max_tokens=8))
    engine.step()
    seen = engine.engine.blocks()
    (run,) = [run for run in seen.runs if run.state == "live"]
    assert (run.count, seen.owners[run.owner], run.holders) == (3, "a", 1)
    engine.run()
    seen = engine.engine.blocks()
    cached = [run for run in seen.runs if run.state == "cached"]
    assert sum(run.count for run in cached) == 4  # 17 of 18 tokens have KV
    assert {seen.owners[run.owner] for run in cached} == {"a"}


def test_blocks_in_several_tables_say_so():
    engine = FakeEngine(num_blocks=30, block_size=4)
    prompt = list(range(16))
    engine.add(make_request("a", prompt, max_tokens=20))
    engine.step()
    engine.step()
    engine.add(make_request("b", prompt, max_tokens=20))
    engine.step()
    shared = [run for run in engine.engine.blocks().runs if run.holders == 2]
    assert sum(run.count for run in shared) == 3  # the last token's block is computed again
    holders = {each.request_id: each for each in engine.engine.blocks().holders}
    assert {name: each.shared for name, each in holders.items()} == {"a": 3, "b": 3}
    assert holders["b"].blocks == len(engine.scheduler._requests["b"].block_table)


def test_top_prefixes_are_those_that_saved_most():
    engine = FakeEngine(num_blocks=60, block_size=4)
    short, long = list(range(100, 109)), list(range(33))
    for number, prompt in enumerate([short, long, short, short, long]):
        engine.add(make_request(f"r{number}", prompt, max_tokens=1))
        engine.run()
    first, second = engine.engine.blocks().prefixes
    assert (first.tokens, first.blocks, first.hits, first.last_request) == (32, 8, 1, "r4")
    assert (second.tokens, second.hits, second.last_request) == (8, 2, "r3")


def test_an_evicted_prefix_is_no_longer_told_but_counted():
    engine = FakeEngine(num_blocks=10, block_size=4)
    for name in ("a", "b"):
        engine.add(make_request(name, list(range(17)), max_tokens=1))
        engine.run()
    assert len(engine.engine.blocks().prefixes) == 1
    engine.add(make_request("large", 38, max_tokens=2))
    engine.run()
    seen = engine.engine.blocks()
    assert seen.prefixes == []
    assert seen.evictions >= 4
