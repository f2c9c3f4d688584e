"""Choice of a replica, without Ray."""

from llmbox.app.engines.prefix_table import PrefixTable, block_hashes
from llmbox.app.ray.scaling import wanted_replicas
from llmbox.engine.core.kv_cache.prefix_cache import extend_hashes
from llmbox.engine.core.request import Request
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams

IDLE = {"a": 0, "b": 0}


def message(ids, namespace="", adapter=""):
    return AddRequest(
        request_id="r",
        prompt_ids=ids,
        params=SamplingParams(max_tokens=1),
        cache_namespace=namespace,
        adapter=adapter,
    )


def test_hashes_are_those_of_the_prefix_cache():
    own = message(list(range(70)), "salt")
    request = Request(
        request_id="r",
        prompt_ids=own.prompt_ids,
        params=own.params,
        cache_namespace="salt",
        token_ids=list(own.prompt_ids),
    )
    extend_hashes(request, 16, 4)
    assert block_hashes(own, 16) == request.block_hashes


def test_namespaces_and_adapters_share_nothing():
    ids = list(range(32))
    first = {block_hashes(each, 16)[0] for each in (message(ids), message(ids, "x"), message(ids, "", "y"))}
    assert len(first) == 3


def test_the_longest_prefix_wins():
    table = PrefixTable()
    table.record("a", [b"1"])
    table.record("b", [b"1", b"2"])
    assert table.choose([b"1", b"2", b"3"], IDLE) == "b"
    assert table.choose([b"1", b"9"], {"a": 1, "b": 0}) == "b"


def test_a_hole_ends_the_prefix():
    table = PrefixTable()
    table.record("a", [b"2", b"3"])
    table.record("b", [b"1"])
    assert table.choose([b"1", b"2", b"3"], IDLE) == "b"


def test_much_more_load_outweighs_a_prefix():
    table = PrefixTable(imbalance=4)
    table.record("a", [b"1"])
    assert table.choose([b"1"], {"a": 4, "b": 0}) == "a"
    assert table.choose([b"1"], {"a": 5, "b": 0}) == "b"


def test_new_prompts_spread_over_idle_replicas():
    table = PrefixTable()
    chosen = []
    for prompt in (b"1", b"2", b"3", b"4"):
        name = table.choose([prompt], IDLE)
        table.record(name, [prompt])
        chosen.append(name)
    assert sorted(chosen) == ["a", "a", "b", "b"]


def test_replicas_that_are_gone_hold_nothing():
    table = PrefixTable()
    table.record("a", [b"1"])
    table.forget("a")
    table.record("b", [b"2"])
    assert table.replicas() == {"b"}
    assert table.choose([b"1"], {"b": 1, "c": 0}) == "c"


def test_the_least_recently_used_blocks_are_forgotten():
    table = PrefixTable(most_blocks=2)
    table.record("a", [b"1", b"2"])
    table.record("a", [b"1"])
    table.record("b", [b"3"])
    assert table.choose([b"2"], {"a": 1, "b": 0}) == "b"
    assert table.choose([b"1"], {"a": 1, "b": 0}) == "a"


def test_replicas_follow_requests_and_a_full_cache():
    assert wanted_replicas(33, 16, {}, 1) == 3
    assert wanted_replicas(4, 16, {"a": 0.5, "b": 0.5}, 2) == 1
    assert wanted_replicas(4, 16, {"a": 1.0, "b": 1.0}, 2) == 3
    assert wanted_replicas(0, 16, {"a": 0.0}, 1) == 0
