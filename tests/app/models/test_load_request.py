"""From settings and a load's own options to the engine's configuration, and back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmbox.app.config.model_settings import ModelSettings
from llmbox.app.models.catalog import ModelRef
from llmbox.app.models.load_request import ModelRequest, default_engine, options_of, with_draft_path
from llmbox.app.models.registry import recommended
from llmbox.engine.config import EngineConfig

REF = ModelRef("org/name", Path("/models/name"), "hub")


def test_every_setting_of_models_reaches_the_engine() -> None:
    """All of them are told back too: `up` compares its flags with them."""
    names = set(ModelSettings.__dataclass_fields__) - {"overrides"}
    assert set(options_of(ModelRequest(REF).config(ModelSettings()))) == names


def test_plans_count_with_the_settings_that_a_load_without_flags_has() -> None:
    settings = replace(
        ModelSettings(), tp=2, memory=3.0, max_running=4, kv_tokens=4096, draft="mtp", disaggregate="1:1"
    )
    loaded = ModelRequest(REF).config(settings)
    assert default_engine(settings) == replace(loaded, model_path="", name="")


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_the_share_of_premium_keys_is_a_setting_and_an_option(share: float) -> None:
    defaults = replace(ModelSettings(), premium_share=share)
    config = ModelRequest(REF).config(defaults)
    assert config.premium_share == share
    assert ModelRequest(REF, options={"model.premium_share": 0.5}).config(defaults).premium_share == 0.5
    assert options_of(config)["premium_share"] == share
    assert EngineConfig(model_path="", name="").premium_share == 0.0


def test_a_models_own_settings_come_before_those_of_all_and_after_a_loads_options() -> None:
    entries = ("org/*:max_running=4", "org/name:max_running=9", "*:disaggregate=auto", "q8:ctx=64")
    defaults = replace(ModelSettings(), max_running=16, overrides=entries)
    config = ModelRequest(REF).config(defaults)
    assert (config.max_running, config.auto_disaggregate, config.context) == (4, True, None)
    assert options_of(config)["disaggregate"] == "auto"
    asked = ModelRequest(REF, options={"model.max_running": 2, "model.disaggregate": "1:1"}).config(defaults)
    assert (asked.max_running, asked.disaggregate, asked.auto_disaggregate) == (2, (1, 1), False)
    other = ModelRequest(replace(REF, name="q8")).config(defaults)
    assert (other.max_running, other.context) == (16, 64)


def test_encoders_run_on_the_cpu_of_a_machine_with_gpus_too(tmp_path: Path) -> None:
    model = next(each for each in recommended() if each.name == "all-minilm:22m")
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    request = ModelRequest(ModelRef("encoder", tmp_path, "directory"))
    assert request.config(ModelSettings()).device == "cpu"
    assert ModelRequest(REF).config(ModelSettings()).device == "auto"


@pytest.mark.parametrize(("draft", "mtp"), [("", "auto"), ("mtp", "on"), ("none", "off")])
def test_two_names_of_drafts_are_those_of_no_model(draft: str, mtp: str) -> None:
    options = with_draft_path({"model.draft": draft}, lambda name: pytest.fail(f"{name} was looked for"))
    config = ModelRequest(REF, options=options).config(ModelSettings())
    assert (config.mtp, config.draft_path) == (mtp, None)
    assert options_of(config)["draft"] == draft
