"""Adapters of the hub: two files alone, checked, resumed, refused by their reason; `llmbox lora add`."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmbox.app.errors import CliError, Exit
from llmbox.app.hub import adapter_download
from llmbox.app.hub.adapter_download import download_adapter
from llmbox.app.models import adapters
from support.adapters import plain_tensors, write_adapter
from support.cli_call import Call, call, home
from support.hub_stub import LARGE, StubHub, StubRepo, stub_hub

__all__ = ["call", "home"]

NAME = "org/pirate"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    folder = write_adapter(tmp_path / "a", plain_tensors(), base_model_name_or_path="org/absent")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(files["adapter_model.safetensors"]) >= LARGE
    with stub_hub() as stub:
        stub.repos[NAME] = StubRepo({**files, "README.md": b"x", "adapter_model.bin": b"pickle"})
        monkeypatch.setenv("HF_ENDPOINT", stub.url)
        yield stub


def download(tmp_path: Path, name: str = NAME, **options: object) -> Path:
    environ = {"HF_HOME": str(tmp_path / "hf")}
    return download_adapter(name, environ, stop=threading.Event(), **options)


def test_the_two_files_alone_are_fetched_and_found_offline(
    tmp_path: Path, hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, object]] = []
    folder = download(tmp_path, check=told.append)
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert folder.name == hub.repos[NAME].commit
    assert told[0]["base_model_name_or_path"] == "org/absent"
    assert not hub.requests("hub", "README")
    assert not hub.requests("hub", "adapter_model.bin")
    seen = len(hub.seen)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert download(tmp_path) == download(tmp_path, f"{NAME}@{folder.name}") == folder
    with pytest.raises(CliError, match="switched off") as refused:
        download(tmp_path, f"{NAME}@v1")
    assert refused.value.exit == Exit.NETWORK
    assert len(hub.seen) == seen


def test_a_revision_is_that_which_is_named(tmp_path: Path, hub: StubHub) -> None:
    assert download(tmp_path, f"{NAME}@v1").name == hub.repos[NAME].commit
    with pytest.raises(CliError, match="was not found"):
        download(tmp_path, f"{NAME}@v2")


def test_what_was_fetched_is_not_fetched_again(tmp_path: Path, hub: StubHub) -> None:
    data = hub.repos[NAME].files["adapter_model.safetensors"]
    folder = download(tmp_path)
    blob = (folder / "adapter_model.safetensors").resolve()
    blob.rename(blob.with_name(f"{blob.name}.incomplete"))
    blob.with_name(f"{blob.name}.incomplete").write_bytes(data[:1000])
    hub.seen.clear()
    assert (download(tmp_path) / "adapter_model.safetensors").read_bytes() == data
    (request,) = hub.requests("cdn")
    assert request.headers["Range"].startswith("bytes=1000-")


def test_refusals_say_why(tmp_path: Path, hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = hub.repos[NAME].files
    config = {"adapter_config.json": files["adapter_config.json"]}
    hub.repos["org/pickled"] = StubRepo({**config, "adapter_model.bin": b"pickle"})
    hub.repos["org/model"] = StubRepo({"config.json": b"{}"})
    hub.repos["org/gated"] = StubRepo(files, gated=True)
    for name, told in (
        ("org/pickled", "adapter_model.bin is a pickle"),
        ("org/model", "it has no adapter_config.json"),
        ("org/gated", "gated"),
        ("org/nowhere", "was not found"),
    ):
        with pytest.raises(CliError) as refused:
            download(tmp_path, name)
        assert told in f"{refused.value.what}: {refused.value.why}"
    monkeypatch.setattr(adapter_download, "free_space", lambda _: 1000)
    with pytest.raises(CliError, match="too full"):
        download(tmp_path)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, hub: StubHub) -> None:
    folder = tmp_path / "hf" / "hub" / "models--org--pirate"
    folder.mkdir(parents=True)
    (folder / "snapshots").touch()
    with pytest.raises(CliError, match="cannot write to"):
        download(tmp_path)


def test_damaged_weights_are_not_kept(tmp_path: Path, hub: StubHub) -> None:
    def damage(handler: object) -> bool:
        if handler.name != "cdn":
            return False
        data = hub.repos[NAME].files["adapter_model.safetensors"]
        handler.bytes_of(bytes(len(data)), {"ETag": '"x"'})
        return True

    hub.faults.append(damage)
    with pytest.raises(CliError, match="arrived damaged twice") as refused:
        download(tmp_path)
    assert refused.value.exit == Exit.INTEGRITY
    assert not list((tmp_path / "hf").rglob("snapshots/*"))


def test_an_adapter_of_the_hub_is_added(call: Call, hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_check", lambda *_: None)
    without = call("lora", "add", "pirate", NAME)
    assert without.code == Exit.NOT_FOUND
    assert "llmbox pull org/absent" in without.err
    assert not hub.requests("cdn")  # the weights are fetched once the rest is known to be right
    added = call("lora", "add", "pirate", NAME, "--base", "builtin", "--json")
    assert added.code == 0, added.err
    assert '"base": "builtin"' in added.out
    assert call("lora", "add", "pirate", NAME, "--base", "builtin").code == Exit.CONFLICT
    assert call("lora", "ls", "-q").out == "pirate\n"


def test_a_folder_of_the_client_goes_before_a_name_of_the_hub_and_none_of_the_daemon(
    call: Call, hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_check", lambda *_: None)
    others = ("./org/pirate", "/org/pirate", "org/pirate:Q4", "pirate", "a/..")
    assert not any(map(adapters.is_from_hub, others))
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / NAME, plain_tensors())
    assert call("lora", "add", "mine", NAME, "--base", "builtin").code == 0
    assert not hub.seen
    assert adapters.is_from_hub(NAME), "the panel's daemon has no folder that its user could mean"
