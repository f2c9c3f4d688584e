"""The fake engine itself: what tests of answers may rely on."""

from llmbox.engine.sampling_params import SamplingParams
from support.fake_engine import FakeOptions, expected_tokens
from support.tokenizers_zoo import byte_level, drawn_ids


def test_hashes_never_end_an_answer():
    """A test whose answer is random must not fail when an end token is drawn first."""
    for seed in range(50):
        params = SamplingParams(max_tokens=20, seed=seed, stop_token_ids=[0, 2])
        assert set(expected_tokens([seed], params, FakeOptions(vocab_size=4))) <= {1, 3}
        assert len(expected_tokens([seed], params, FakeOptions(vocab_size=4))) == 20


def test_a_script_ends_with_the_stop_token():
    params = SamplingParams(max_tokens=20, stop_token_ids=[9])
    assert expected_tokens([1], params, FakeOptions(script=[4, 5])) == [4, 5, 9]


def test_drawn_ids_are_ids_of_text():
    tokenizer = byte_level()
    options = drawn_ids(tokenizer)
    assert tokenizer.token_to_id("</s>") >= options["vocab_size"]
    assert options["declared_vocab"] == tokenizer.get_vocab_size()
    assert all(tokenizer.decode([token]) for token in range(options["vocab_size"]))
