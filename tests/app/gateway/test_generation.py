from hypothesis import given
from hypothesis import strategies as st

from llmbox.app.gateway.generation import choice_seed, draw_seed

signed = st.integers(-(2**63), 2**63 - 1)


@given(signed)
def test_choices_differ_and_stay_in_range(seed):
    seeds = [choice_seed(seed, index) for index in range(16)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 16
    assert all(-(2**63) <= each < 2**63 for each in seeds)


def test_derived_seeds_are_fixed_for_ever():
    assert [choice_seed(42, index) for index in range(3)] == [42, choice_seed(42, 1), choice_seed(42, 2)]
    assert choice_seed(0, 1) == -2152535657050944081  # splitmix64's first output


def test_drawn_seeds_survive_readers_that_know_only_doubles():
    assert all(int(float(seed)) == seed for seed in (draw_seed() for _ in range(100)))
