"""`llmbox fit --on`: GPUs that are not here, prices, and plans for users; bad input is told."""

import json
import re
import shlex
from pathlib import Path

import pytest

from llmbox.app.cli.models.fit import PredictionRequest, read_gpu_models, report_prediction
from llmbox.app.errors import Exit
from llmbox.app.fit.capacity import UserLoad
from llmbox.app.fit.gpu_prediction import USUAL_REQUEST
from llmbox.app.hub.model_info import ModelFacts, parse_config_files
from llmbox.app.models.registry import recommended
from llmbox.engine.config import EngineConfig
from support.cli_call import Call, call, home

__all__ = ["call", "home"]

SCALE = Path(__file__).parents[4] / "docs/scale.md"


def test_each_card_has_its_plan_speed_and_price(call: Call) -> None:
    done = call("fit", "builtin", "--on", "RTX 4090,h100,h100", "--price", "h100=2.5")
    assert done.code == 0, done.err
    assert "builtin fits on RTX 4090.\n  card       24 GiB, 1.01 TB/s" in done.out
    assert done.out.count("fits on H100 SXM") == 1
    assert len(re.findall(r"^  price +2\.5 an hour: .* a million output tokens", done.out, re.MULTILINE)) == 1
    assert "predicted from data sheets, not measured" in done.err


def test_json_has_every_number(call: Call) -> None:
    options = ("--prompt", 100, "--output", 10, "--plan", "--users", 7, "--price", "rtx5090=0.5")
    told = json.loads(call("fit", "builtin", "--on", "rtx5090,l4", *options, "--json").out)
    first, second = told["gpus"]
    assert (told["schema"], told["name"]) == ("llmbox.fit.on/1", "builtin")
    assert (told["source"], told["notes"]) == ("data sheets", [])
    assert (first["gpu"], first["fits"], first["memory"]) == ("rtx5090", True, 32 * 2**30)
    assert first["speed"]["load"] == {"prompt": 100, "output": 10}
    assert first["speed"]["output_price"] > 0
    assert second["speed"]["output_price"] is None
    assert first["users"]["cards"] == 1
    assert first["users"]["hourly"] == 0.5


def test_a_plan_is_printed_line_by_line(call: Call) -> None:
    done = call("fit", "builtin", "--on", "h100", "--plan", "--users", 100, "--requests-per-minute", 2)
    assert done.code == 0, done.err
    labels = re.findall(r"^  (\S.{0,9}?)  +", done.out, re.MULTILINE)
    assert labels == [
        *("card", "weights", "KV a user", "in memory", "step", "prompts", "TPOT", "TTFT"),
        *("an engine", "load", "engines"),
    ]
    assert "100 users x 2 a minute = 3.33 requests/s" in done.out


def test_no_card_that_would_do_is_exit_5(call: Call) -> None:
    words = ("fit", "builtin", "--on", "h100", "--plan", "--users", 1)
    missed = call(*words, "--tpot-target", 1e-9)
    assert missed.code == Exit.DOES_NOT_FIT
    assert "one stream alone is beyond the target" in missed.out
    long = call(*words, "--prompt", 1_000_000)
    assert long.code == Exit.DOES_NOT_FIT
    assert "more than the context of 4096 tokens" in long.out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--on rtx4099", "did you mean rtx4090? known are rtx3090, "),
        ("--on h100,", "no data sheet of ''"),
        ("--on h100 --price a100=2", "a100 is not among the GPUs of --on"),
        ("--on h100 --price h100=1,h100=2", "h100 has two prices"),
        ("--on h100 --price h100", "write NAME=PRICE"),
        ("--on h100 --price h100=-1", "write NAME=PRICE"),
        ("--on h100 --price h100=nan", "write NAME=PRICE"),
        ("--on h100 --price h100=inf", "write NAME=PRICE"),
        ("--on h100 --plan", "--plan needs --users N"),
        ("--on h100 --plan --users 0", "0 is not in the range"),
        ("--on h100 --plan --users 1 --output 0", "0 is not in the range"),
        ("--on h100 --plan --users 1 --requests-per-minute 0", "0.0 is not in the range"),
        ("--on h100 --plan --users 1 --requests-per-minute nan", "'nan' is not a number"),
        ("--on h100 --plan --users 1 --tpot-target nan", "'nan' is not a number"),
        ("--on h100 --users 5", "--users needs --plan"),
        ("--plan --users 5", "needs --on GPU,..."),
        ("--price h100=2", "--price needs --on GPU,..."),
        ("--on h100 --device cpu", "leave them out with --on"),
        ("--on h100 --probe", "leave them out with --on"),
        ("--on h100 --cpu-experts on", "leave them out with --on"),
    ],
)
def test_bad_input_is_told(call: Call, options: str, why: str) -> None:
    done = call("fit", "builtin", *options.split())
    assert (done.code, done.out) == (Exit.USAGE, "")
    assert why in done.err


def commands() -> list[str]:
    return re.findall(r"^\$? ?llmbox fit (.+?)(?: +#.*)?$", SCALE.read_text("utf-8"), re.MULTILINE)


def test_the_commands_of_the_page_exist(call: Call) -> None:
    found = commands()
    assert len(found) >= 3
    for words in found:
        _, *options = shlex.split(words)
        done = call("fit", "builtin", *options)
        assert done.code == 0, done.err


def test_the_example_of_the_page_is_printed_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    model = next(model for model in recommended() if model.repo == "Qwen/Qwen3-8B")
    config = parse_config_files({"config.json": model.config})
    size = model.download_bytes
    facts = ModelFacts(model.repo, config, size, model.params, missing_bytes=0)
    users = UserLoad(users=1000, per_minute=1.0, request=USUAL_REQUEST, tpot_target=0.03)
    prices = {"rtx4090": 0.4, "h100": 2.5}
    asked = PredictionRequest(read_gpu_models("rtx4090,h100"), prices, USUAL_REQUEST, users)
    assert report_prediction(facts, EngineConfig(model_path="", name=""), asked, as_json=False) == 0
    assert capsys.readouterr().out in SCALE.read_text("utf-8")
