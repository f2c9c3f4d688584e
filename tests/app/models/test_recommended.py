"""Recommended models: their data, names and plans, and what is offered in place of one that does not fit."""

import errno
import json
import os
from math import prod
from types import SimpleNamespace

import pytest

from llmbox.app.control import library
from llmbox.app.control.library import Library
from llmbox.app.errors import ApiError, CliError, Exit
from llmbox.app.fit.bandwidth import Bandwidth
from llmbox.app.fit.fit import FitSite
from llmbox.app.fit.recommendations import (
    USABLE_RATE,
    Recommendation,
    begin_with,
    first_choices,
    recommend,
    slow_warning,
    smaller_models,
)
from llmbox.app.hub.download import Download
from llmbox.app.hub.errors import HubError
from llmbox.app.hub.model_info import ask_recommended, parse_config_files
from llmbox.app.hub.repo_files import Hub
from llmbox.app.models.catalog import HUB_ID, resolve
from llmbox.app.models.registry import (
    HubFacts,
    family_of,
    full_name,
    keep_hub_facts,
    read_hub_facts,
    recommended,
    short_names,
)
from llmbox.engine.config import EngineConfig
from llmbox.engine.hardware.machine import Cpu, Machine, Memory
from support.hub_models import model_files
from support.hub_stub import StubRepo, stub_hub

CONFIG = EngineConfig(model_path="", name="", device="cpu")


@pytest.fixture(autouse=True)
def ample_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 1 TB free: what fits must not depend on the disk of the box that runs the tests."""
    monkeypatch.setattr("llmbox.app.fit.fit.free_space", lambda _: 10**12)


def machine(gigabytes: float) -> Machine:
    size = int(gigabytes * 1e9)
    memory = Memory(size, size, limited_by_cgroup=False)
    return Machine(Cpu("A CPU", 8, 8, ("avx2",)), memory, (), "no driver")


def planned(gigabytes: float, tmp_path, memory: float | None = 50e9, **options) -> list[Recommendation]:
    bandwidth = None if memory is None else Bandwidth.exact(memory)
    site = FitSite(machine=machine(gigabytes), budget_gb=None, disk=tmp_path, bandwidth=bandwidth)
    return recommend(CONFIG, site, **options)


@pytest.mark.parametrize("model", recommended(), ids=lambda model: model.name)
def test_the_config_describes_the_published_number_of_parameters(model):
    config = parse_config_files({"config.json": model.config})
    tower = sum(map(prod, config.vision.tensors.values())) if config.vision else 0
    assert config.num_parameters + tower + model.unused == model.params
    assert model.unused < 0.07 * model.params
    assert (config.vision is not None and not config.image_problem) is model.reads_images
    assert model.reads_images or model.purpose != "vision"


def test_names_are_unique_and_each_family_has_one_default():
    models = recommended()
    assert len({model.name for model in models}) == len(models)
    assert len({model.repo for model in models}) == len(models)
    assert all(HUB_ID.fullmatch(model.repo) for model in models)
    families = {model.family for model in models}
    assert sorted(model.family for model in models if model.default) == sorted(families)


@pytest.mark.parametrize(
    ("text", "repo"),
    [
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B"),
        ("QWEN3:0.6B", "Qwen/Qwen3-0.6B"),
        ("qwen3", "Qwen/Qwen3-4B"),
        ("llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct"),
        ("gemma3", "google/gemma-3-1b-it"),
        ("org/name", "org/name"),
        ("qwen3:5b", "qwen3:5b"),
    ],
)
def test_a_short_name_means_its_repository(text, repo):
    assert full_name(text) == repo


def test_a_short_name_resolves_as_its_repository_and_a_typo_gets_a_suggestion(tmp_path):
    environ = {"HF_HOME": str(tmp_path)}
    with pytest.raises(CliError) as missing:
        resolve("qwen3:0.6b", environ)
    assert missing.value.exit == Exit.NOT_FOUND
    assert "llmbox pull Qwen/Qwen3-0.6B" in missing.value.fix
    with pytest.raises(CliError) as typo:
        resolve("qwen3:0.6", environ)
    assert "did you mean qwen3:0.6b?" in typo.value.fix


def test_a_larger_machine_takes_more_and_the_hub_is_not_asked(tmp_path):
    small = {each.model.name for each in planned(4, tmp_path) if each.fit.plan}
    large = {each.model.name for each in planned(400, tmp_path) if each.fit.plan}
    assert "smollm2:135m" in small
    assert "qwen3:32b" not in small
    assert large == {model.name for model in recommended()}


def test_a_model_that_fits_with_fewer_bits_names_them(tmp_path):
    found = {each.model.name: each for each in planned(24, tmp_path)}
    quants = {name: each.fitting_quant for name, each in found.items()}
    assert (quants["qwen3:1.7b"], quants["qwen3:14b"], quants["qwen3:32b"]) == ("", "int8", "")
    assert quants["qwen3:30b-a3b"] == "int4"
    assert not found["qwen3:14b"].fit.fits
    assert found["qwen3:14b"].as_dict()["fitting_quant"] == "int8"


def test_what_is_on_this_disk_needs_no_download(tmp_path):
    found = {each.model.name: each for each in planned(64, tmp_path, present={"Qwen/Qwen3-0.6B"})}
    assert found["qwen3:0.6b"].here
    assert found["qwen3:0.6b"].fit.disk_need == 0
    assert found["qwen3:1.7b"].fit.disk_need == 2 * 1720574976
    json.dumps([each.as_dict() for each in found.values()])


def test_a_model_that_does_not_fit_is_answered_with_smaller_ones_of_its_family(tmp_path):
    found = planned(24, tmp_path)
    names = [text.partition(": ")[0] for text in smaller_models("Qwen/Qwen3-32B", found)]
    assert names == ["qwen3:1.7b", "qwen3:0.6b"]  # the 8B model fits, but is slower than reading speed
    assert family_of("Qwen/Qwen3-32B") == "qwen3"
    others = [text.partition(": ")[0] for text in smaller_models("org/huge", found)]
    assert others
    assert set(others) <= short_names()


def test_a_newcomer_is_offered_distinct_models_that_fit_without_a_license_to_accept(tmp_path):
    choices = first_choices(planned(64, tmp_path))
    assert list(choices) == ["Quick", "Balanced", "Best"]
    assert len({each.model.name for each in choices.values()}) == 3
    params = [each.model.params for each in choices.values()]
    assert params == sorted(params)
    assert all(each.fit.fits and not each.model.gated for each in choices.values())
    assert first_choices(planned(0.2, tmp_path)) == {}


@pytest.mark.parametrize("memory", [16e9, 50e9, 400e9, 3000e9, None])
def test_what_is_offered_answers_as_fast_as_people_read(tmp_path, memory):
    choices = first_choices(planned(64, tmp_path, memory=memory))
    assert list(choices) == ["Quick", "Balanced", "Best"]
    assert all(each.is_usable for each in choices.values())
    speeds = [each.fit.speed.expected for each in choices.values() if each.fit.speed]
    assert not speeds or min(speeds) >= USABLE_RATE
    assert begin_with(choices) is choices["Balanced"]


def test_what_the_hub_told_counts_until_it_cannot_be_served(tmp_path):
    packaged = {model.name: model for model in recommended()}
    small, large = packaged["qwen3:0.6b"], packaged["qwen3:1.7b"]
    facts = {
        small.repo: HubFacts(
            license="mit", gated=True, params=7, files=5_000_000_000, config=packaged["qwen3:4b"].config
        ),
        large.repo: HubFacts(license="mit", gated=True, params=7, files=1, config={"model_type": "new"}),
    }
    keep_hub_facts(tmp_path / "cache" / "recommended.json", facts)
    told = read_hub_facts(tmp_path / "cache" / "recommended.json")
    found = {each.model.name: each for each in planned(64, tmp_path, hub_facts=told)}
    plain = {each.model.name: each for each in planned(64, tmp_path)}
    now = found["qwen3:0.6b"]
    assert (now.model.license, now.model.gated, now.fit.disk_need) == ("mit", True, 5_000_000_000)
    assert now.fit.plan.weights_bytes == plain["qwen3:4b"].fit.plan.weights_bytes
    other = found["qwen3:1.7b"]
    assert (other.model, other.fit.plan) == (plain["qwen3:1.7b"].model, plain["qwen3:1.7b"].fit.plan)
    (tmp_path / "torn").write_text("{")
    assert read_hub_facts(tmp_path / "torn") == {}


def test_the_hub_is_asked_for_all_and_those_without_an_answer_are_named(tmp_path, monkeypatch):
    with stub_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
        hub.repos["Qwen/Qwen3-0.6B"] = StubRepo(model_files(), license="apache-2.0")
        found, failed = ask_recommended(Hub.of_environment())
    (facts,) = found.values()
    size = sum(map(len, model_files().values()))
    assert (facts.license, facts.gated, 0 < facts.files <= size) == ("apache-2.0", False, True)
    assert facts.params == parse_config_files({"config.json": facts.config}).num_parameters
    assert set(failed) == {model.repo for model in recommended()} - {"Qwen/Qwen3-0.6B"}


def test_a_hub_that_describes_no_model_is_an_error(tmp_path, monkeypatch):
    with stub_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
        with pytest.raises(HubError):
            ask_recommended(Hub.of_environment())


def test_where_nothing_is_fast_the_smallest_is_offered(tmp_path):
    (label, each), *others = first_choices(planned(64, tmp_path, memory=0.3e9)).items()
    assert (label, each.model.name, others) == ("Smallest", "smollm2:135m", [])


def test_a_model_that_fits_and_is_slow_is_named_so_with_a_faster_one(tmp_path):
    found = planned(64, tmp_path, memory=12e9)
    by_name = {each.model.name: each for each in found}
    slow = by_name["qwen3:8b"]
    assert slow.fit.fits
    assert not slow.as_dict()["usable"]
    told = slow_warning(slow.fit.speed, found)
    best = first_choices(found)["Best"].model.name
    assert told.startswith("expected here: ")
    assert told.endswith(f"{best} is the largest recommended one that keeps up")
    assert slow_warning(by_name[best].fit.speed, found) == ""
    assert slow_warning(None, found) == ""


@pytest.mark.parametrize(
    ("allowed", "name", "state", "code"),
    [
        ("off", "qwen3:0.6b", "downloading", ""),
        ("recommended", "org/other", "downloading", ""),
        ("recommended", "qwen3:0.6b", "downloading", "model_downloading"),
        ("any", "org/other", "checking", "model_downloading"),
        ("recommended", "qwen3:0.6b", "paused", "pull_failed"),
    ],
)
def test_a_request_fetches_what_the_owner_allows_and_resumes_nothing(allowed, name, state, code):
    library = object.__new__(Library)
    found = Download(full_name(name), full_name(name), None, state=state)
    library.downloads = SimpleNamespace(all=lambda: [found])
    settings = SimpleNamespace(hub=SimpleNamespace(pull_on_request=allowed))
    library._services = SimpleNamespace(settings=settings)
    if not code:
        assert library.pull_for_request(name) is None
        return
    with pytest.raises(ApiError) as refused:
        library.pull_for_request(name)
    assert (refused.value.status, refused.value.code) == (503, code)
    assert ("Retry-After" in refused.value.headers) is (code == "model_downloading")


async def test_a_full_disk_is_told_when_the_hubs_answers_cannot_be_kept(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(library, "ask_recommended", lambda _: ({}, {}))
    monkeypatch.setattr(library, "keep_hub_facts", full)
    paths = SimpleNamespace(recommended_file=tmp_path / "recommended.json")
    with pytest.raises(ApiError, match=r"No space left on device\. Free some space") as refused:
        await library.Library.refresh_recommended(SimpleNamespace(_services=SimpleNamespace(paths=paths)))
    assert (refused.value.status, refused.value.code) == (507, "disk_full")
