"""Every order of events of up to four requests in up to six blocks (`support/exploration.py`).

No leak: without requests no block is used. No deadlock: a step with work schedules rows. No starvation: from
each state, steps alone end every request, within a bound.
"""

import pytest

from support.exploration import Explorer
from support.lanes import nightly
from support.scheduling import make_request

PROMPTS = ([1, 1, 2], [1, 1, 3, 4, 5], [1, 1], [6, 7, 8, 9])
"""Prompts that share a block, and one that shares none."""
TIGHT = {"num_blocks": 4, "max_running": 2, "token_budget": 2, "context": 8}
ROOMY = {"num_blocks": 6, "max_running": 3, "token_budget": 3, "context": 8}


def requests(count, *, forks=False):
    """The second is another caller's, the third is premium. `forks`: all are answers to one call."""
    return {
        f"r{n}": make_request(
            f"r{n}",
            PROMPTS[1] if forks else PROMPTS[n],
            max_tokens=2 + n % 2,
            tenant="b" if n == 1 and not forks else "",
            priority=0 if forks else -(n == 2),
            fork_of="r0" if forks and n else None,
            seed=n,
        )
        for n in range(count)
    }


@pytest.mark.parametrize(
    ("count", "aborts", "preemptions", "config"),
    [
        (2, 2, 2, TIGHT),
        (2, 1, 1, {**TIGHT, "num_blocks": 5, "cache": False}),
        (2, 1, 1, {**ROOMY, "chunked_prefill": False}),
        (3, 0, 0, TIGHT),
        (3, 0, 1, {**ROOMY, "token_budget": 8}),
        nightly(3, 1, 1, TIGHT),
        nightly(3, 1, 1, {**TIGHT, "cache": False}),
        nightly(3, 1, 1, ROOMY),
        nightly(3, 1, 1, {**ROOMY, "num_blocks": 5, "token_budget": 5, "watermark": 0.2}),
        nightly(3, 1, 1, {**ROOMY, "chunked_prefill": False, "premium_share": 0.34}),
        nightly(4, 0, 0, TIGHT),
        nightly(4, 0, 1, {**ROOMY, "num_blocks": 5}),
        nightly(4, 1, 1, ROOMY),
    ],
)
def test_every_order_of_events_ends_every_request(count, aborts, preemptions, config):
    asked = requests(count)
    found = Explorer(asked, aborts=aborts, preemptions=preemptions, block_size=2, **config).run()
    print(f"{found.states} states, {found.transitions} transitions, at most {found.longest} steps to the end")
    assert found.states > 100
    # Every step computes a token, and nothing is computed again more often than it is preempted.
    tokens = sum(len(request.prompt_ids) + request.params.max_tokens for request in asked.values())
    assert found.longest <= 2 * tokens


@pytest.mark.parametrize(("count", "aborts", "preemptions"), [(2, 1, 1), nightly(3, 1, 0), nightly(3, 1, 1)])
def test_every_order_of_events_of_forks(count, aborts, preemptions):
    asked = requests(count, forks=True)
    found = Explorer(
        asked, aborts=aborts, preemptions=preemptions, block_size=2, **{**ROOMY, "context": 10}
    ).run()
    print(f"{found.states} states, {found.transitions} transitions, at most {found.longest} steps to the end")
    assert found.states > 100
