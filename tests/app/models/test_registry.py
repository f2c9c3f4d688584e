"""Aliases and adopted folders: checked, kept in one move, read again when they change."""

import json
import threading
from pathlib import Path

import pytest

from llmbox.app.errors import CliError, Exit
from llmbox.app.models.catalog import find_served, resolve
from llmbox.app.models.registry import SYSTEM_LIMIT, Alias, Registry, parse_parameters


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "data" / "models.json")


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_what_one_writes_another_reads(registry: Registry):
    other = Registry(registry._file)
    assert other.read().aliases == {}
    registry.set_alias("poet", Alias("builtin", {"temperature": 0.9, "ctx": 64, "system": "Rhyme."}))
    alias = other.read().aliases["poet"]
    assert (alias.model, alias.context, alias.system) == ("builtin", 64, "Rhyme.")
    assert alias.sampling == {"temperature": 0.9}
    registry.remove_alias("poet")
    assert other.read().aliases == {}
    with pytest.raises(CliError) as caught:
        registry.remove_alias("poet")
    assert caught.value.exit == Exit.NOT_FOUND


def test_the_daemon_takes_no_word_for_a_folder_where_it_happens_to_run(tmp_path: Path, monkeypatch):
    folder = model(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    environ, file = {"HF_HOME": str(tmp_path / "none")}, tmp_path / "data" / "models.json"
    assert resolve("org/name", environ, Registry(file).read()).path == folder
    for change in (lambda _: None, lambda registry: registry.set_alias("poet", Alias("builtin"))):
        daemon = Registry(file, has_working_directory=False)
        change(daemon)
        with pytest.raises(CliError) as caught:
            resolve("org/name", environ, daemon.read())
        assert caught.value.exit == Exit.NOT_FOUND
    assert resolve(str(folder), environ, daemon.read()).path == folder


def test_writers_at_once_lose_nothing(registry: Registry):
    def write(number: int) -> None:
        Registry(registry._file).set_alias(f"a{number}", Alias("builtin"))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.read().aliases) == 16


@pytest.mark.parametrize(
    "text",
    ["temperature", "temperature=", "temperature=hot", "temperature=nan", "temperature=2.1", "ctx=1.5",
     "ctx=1", "top_k=-1", "color=red", "system=", "system=" + "x" * (SYSTEM_LIMIT + 1)],
)  # fmt: skip
def test_bad_parameters_are_named(text: str):
    with pytest.raises(CliError) as caught:
        parse_parameters([text])
    assert caught.value.exit == Exit.USAGE
    assert caught.value.why


def test_context_is_another_word_for_ctx():
    assert parse_parameters(["context=128", "top-p=0.5", "system=a=b"]) == {
        "ctx": 128,
        "top_p": 0.5,
        "system": "a=b",
    }


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"aliases": {}, "caches": 3, "directories": {}}',
     '{"aliases": {"a": {"model": "b", "parameters": {"top_p": 9}}}, "caches": [], "directories": {}}'],
)  # fmt: skip
def test_a_broken_file_is_named(registry: Registry, text: str):
    registry._file.parent.mkdir()
    registry._file.write_text(text)
    with pytest.raises(CliError, match="is broken"):
        registry.read()


def test_names_lead_to_adopted_folders_and_caches(registry: Registry, tmp_path: Path):
    registry.adopt_directory("mine", model(tmp_path / "elsewhere"))
    cache = tmp_path / "cache"
    commit = "a" * 40
    snapshot = model(cache / "models--org--name" / "snapshots" / commit)
    (cache / "models--org--name" / "refs").mkdir()
    (cache / "models--org--name" / "refs" / "main").write_text(commit)
    registry.adopt_cache(cache)
    registry.set_alias("poet", Alias("org/name"))
    environ = {"HF_HOME": str(tmp_path / "none")}
    names = registry.read()
    assert resolve("mine", environ, names).path == tmp_path / "elsewhere"
    assert resolve("poet", environ, names).path == snapshot
    assert resolve("poet", environ, names).name == "org/name"
    with pytest.raises(CliError) as caught:
        registry.adopt_directory("mine", model(tmp_path / "third"))
    assert caught.value.exit == Exit.CONFLICT
    registry.forget_directory("mine")
    assert registry.read().directories == {}


def test_clients_of_the_api_name_models_never_paths(registry: Registry, tmp_path: Path):
    place = model(tmp_path / "org" / "name")
    environ = {"HF_HOME": str(tmp_path / "none")}
    for name in (str(place), "./org/name", "../x", ".", "~", "", "org/name", "a/../b", "x" * 5000):
        assert find_served(name, environ, registry.read()) is None
    registry.adopt_directory("org/name", place)
    found = find_served("org/name", environ, registry.read())
    assert found is not None
    assert found.path == place
    (place / "config.json").unlink()
    assert find_served("org/name", environ, registry.read()) is None


def test_the_file_is_plain_json(registry: Registry):
    registry.set_alias("a", Alias("builtin"))
    data = json.loads(registry._file.read_text())
    assert data["schema"] == 1
    assert data["aliases"] == {"a": {"model": "builtin", "parameters": {}}}
