"""A run beside an earlier one."""

import json

import pytest

from llmbox.app.bench.measure import ratios, read_levels
from llmbox.app.errors import CliError


def level(concurrency, rate, tpot=0.02):
    times = {"ttft_p50": 0.1, "tpot_p50": tpot, "inter_token_p99": None}
    return {"concurrency": concurrency, "output_tokens_per_s": rate, **times}


def test_levels_that_both_have_are_compared(tmp_path):
    path = tmp_path / "before.json"
    path.write_text(json.dumps({"levels": [level(1, 20.0), level(4, 50.0)]}))
    compared = ratios([level(1, 30.0, tpot=0.01), level(16, 99.0)], read_levels(path))
    assert list(compared) == [1]
    assert compared[1]["output_tokens_per_s"] == pytest.approx(1.5)
    assert compared[1]["tpot_p50"] == pytest.approx(0.5)
    assert compared[1]["inter_token_p99"] is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"levels": 3}', '{"levels": [{"concurrency": "x"}]}'])
def test_what_is_no_result_is_refused_with_what_makes_one(tmp_path, text):
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(CliError) as refused:
        read_levels(path)
    assert refused.value.fix.startswith("llmbox bench --json")


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(CliError):
        read_levels(tmp_path / "none.json")
