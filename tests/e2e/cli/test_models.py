"""From nothing to a model on disk by the command line: search, fit, pull, list, alias, delete; kill -9."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmbox.app.errors import Exit
from support.cli_box import PATIENCE, Box, box, is_alive, until
from support.hub_models import CONFIG, model_files
from support.hub_stub import StubHub, StubRepo, stub_hub

__all__ = ["box"]

NAME = "org/little"


@pytest.fixture
def hub(box: Box) -> Iterator[StubHub]:
    with stub_hub() as stub:
        stub.repos[NAME] = StubRepo(model_files())
        box.environ |= {"HF_ENDPOINT": stub.url, "LLMBOX_SERVER_MODELS": str(box.model())}
        box.environ.pop("HF_TOKEN", None)
        yield stub


def test_search_fit_pull_list_show_delete(box: Box, hub: StubHub):
    hub.repos["org/large"] = StubRepo(model_files())
    config = {**CONFIG, "num_hidden_layers": 1000, "hidden_size": 65536}
    hub.repos["org/large"].files["config.json"] = json.dumps(config).encode()
    hub.repos["org/odd"] = StubRepo({"config.json": b'{"architectures": ["OddModel"]}'})
    found = {row["name"]: row for row in box.run("search", "org", "--json").json["models"]}
    assert {name: row["fits"] for name, row in found.items()} == {
        NAME: "yes",
        "org/large": "no",
        "org/odd": "unsupported",
    }
    assert found[NAME]["context"] == 256

    fit = box.run("fit", NAME, "--json").json
    assert fit["fits"]
    assert fit["plan"]["context"] == 256
    assert fit["disk_need"] > 80_000
    assert not list((box.folder / "hf").rglob("*.safetensors"))
    large = box.run("pull", "org/large")
    assert large.code == Exit.DOES_NOT_FIT, large.err
    assert "Starting the daemon" in large.err
    assert "does not fit on this machine" in large.err

    pulled = box.run("pull", NAME)
    assert pulled.code == 0, pulled.err
    assert "every file checked" in pulled.err
    rows = {row["name"]: row for row in box.run("ls", "--json").json["models"]}
    assert rows[NAME]["servable"]
    assert box.run("pull", NAME, "--json").out.count('"state": "ready"') == 1

    assert box.run("load", NAME).code == 0
    busy = box.run("rm", NAME, "--yes")
    assert busy.code == Exit.CONFLICT
    assert "llmbox unload" in busy.err
    assert box.run("unload", NAME).code == 0
    used = box.run("df", "--json").json
    assert used["models"][0]["size"] > 80_000
    removed = box.run("rm", NAME, "--yes", "--json").json
    assert removed["freed"] == used["models"][0]["size"]
    assert box.run("rm", NAME, "--yes").code == Exit.NOT_FOUND
    assert NAME not in box.run("ls", "-q").out


def test_kill_9_in_the_middle_of_a_pull_is_resumed_and_never_ready_early(box: Box, hub: StubHub):
    hub.hold_after = 49_152
    child = box.serve()
    assert box.run("pull", NAME, "--no-wait").code == 0
    client = box.client
    until(lambda: client.get("/admin/api/downloads")["downloads"][0]["done"] > 40_000)
    running = box.running
    assert running is not None
    os.kill(running.pid, signal.SIGKILL)
    child.communicate()
    assert box.run("show", NAME).code == Exit.NOT_FOUND
    hub.go_on.set()
    box.serve()
    until(lambda: [row["state"] for row in client.get("/admin/api/downloads")["downloads"]] == ["ready"])
    ranges = [seen.headers.get("Range") for seen in hub.requests("cdn", "model.safetensors")]
    assert ranges[0] is None
    assert int(ranges[-1].removeprefix("bytes=").rstrip("-")) >= 16_384
    path = Path(box.run("show", NAME, "--json").json["path"])
    assert (path / "model.safetensors").read_bytes() == hub.repos[NAME].files["model.safetensors"]
    assert not list((box.folder / "hf").rglob("*.incomplete"))


def test_pause_list_resume_and_cancel_by_command(box: Box, hub: StubHub):
    hub.hold_after = 16_384
    box.serve()
    assert box.run("pull", NAME, "--no-wait").code == 0
    assert box.run("pull", "--pause", NAME).code == 0
    (row,) = box.run("pull", "--list", "--json").json["downloads"]
    assert row["state"] == "paused"
    assert box.run("rm", NAME, "--yes").code in {Exit.CONFLICT, Exit.NOT_FOUND}
    hub.go_on.set()
    resumed = box.run("pull", "--resume", NAME)
    assert resumed.code == 0, resumed.err
    assert box.run("pull", "--cancel", NAME).code == Exit.CONFLICT
    assert box.run("pull", "--cancel", "org/other").code == Exit.NOT_FOUND
    assert box.run("pull").code == Exit.USAGE


def test_what_the_hub_refuses_has_its_exit_code(box: Box, hub: StubHub):
    hub.repos["org/gated"] = StubRepo(model_files(), gated=True)
    hub.repos["org/private"] = StubRepo(model_files(), token="hf_x")
    box.serve()
    gated = box.run("pull", "org/gated")
    assert gated.code == Exit.DENIED
    assert "accept its terms" in gated.err
    private = box.run("fit", "org/private")
    assert private.code == Exit.NOT_FOUND
    assert "HF_TOKEN is not set" in private.err
    assert box.run("fit", "org/private", HF_TOKEN="hf_x").code == 0
    assert box.run("fit", NAME, HF_ENDPOINT="http://127.0.0.1:9").code == Exit.NETWORK
    assert box.run("search", "x", HF_HUB_OFFLINE="1").code == Exit.NETWORK
    assert box.run("pull", "no-such-name").code == Exit.NOT_FOUND


def test_adopt_and_alias_without_a_daemon(box: Box, hub: StubHub):
    studio = box.folder / "studio" / "org" / "mine"
    studio.mkdir(parents=True)
    for name, data in model_files().items():
        (studio / name).write_bytes(data)
    assert box.run("adopt", box.folder / "studio").code == 0
    assert "org/mine" in box.run("ls", "-q").out.split()
    assert box.run("fit", "org/mine").code == 0
    spaced = shutil.copytree(studio, box.folder / "my model")
    assert f"llmbox adopt '{spaced}' --name NAME" in box.run("adopt", spaced).err
    assert f"llmbox adopt '{spaced}' --name NAME" in box.run("run", spaced, "hi").err
    assert box.run("adopt", spaced, "--name", "spaced").code == 0
    assert box.run("rm", "spaced", "--yes").code == 0
    nothing = box.run("adopt", box.folder / "data")
    assert nothing.code == Exit.NOT_FOUND

    bad = box.run("alias", "set", "poet", "org/mine", "temperature=3")
    assert bad.code == Exit.USAGE
    assert "from 0 to 2" in bad.err
    assert box.run("alias", "set", "poet", "org/absent").code == Exit.NOT_FOUND
    assert box.run("alias", "set", "poet", "org/mine", "temperature=0.9", "context=128").code == 0
    (row,) = box.run("alias", "ls", "--json").json["aliases"]
    assert row["parameters"] == {"temperature": 0.9, "ctx": 128}
    assert box.run("show", "poet", "--json").json["name"] == "org/mine"
    assert box.run("rm", "poet", "--yes").code == Exit.FAILED
    assert box.run("alias", "rm", "poet").code == 0
    assert box.run("alias", "rm", "poet").code == Exit.NOT_FOUND
    assert "forgotten" in box.run("rm", "org/mine", "--yes").err
    assert studio.is_dir()
    other = box.folder / "other"
    shutil.copytree(studio, other / "models--a--b" / "snapshots" / ("0" * 40))
    (other / "models--a--b" / "refs").mkdir()
    (other / "models--a--b" / "refs" / "main").write_text("0" * 40)
    assert box.run("adopt", other).code == 0
    assert "a/b" in box.run("ls", "-q").out.split()
    assert json.loads((box.paths.data_dir / "models.json").read_text())["caches"] == [str(other)]


def test_two_clients_wait_for_one_download(box: Box, hub: StubHub):
    hub.chunk_pause = 0.02
    box.serve()
    pulls = [box.spawn("pull", NAME, "--json") for _ in range(2)]
    assert [pull.wait(PATIENCE) for pull in pulls] == [0, 0]
    assert len(hub.requests("cdn", "model.safetensors")) == 1
    running = box.running
    assert running is not None
    assert is_alive(running.pid)


def test_a_failure_keeps_its_reason_over_a_kill_until_it_is_dismissed(box: Box, hub: StubHub):
    child = box.serve()
    typo = box.run("pull", "org/typo")
    assert typo.code == Exit.NOT_FOUND
    assert "org/typo was not found" in typo.err
    running = box.running
    assert running is not None
    os.kill(running.pid, signal.SIGKILL)
    child.communicate()
    box.serve()
    listed = box.run("pull", "--list")
    assert "org/typo was not found: the hub knows no such model" in listed.out
    assert "llmbox pull --dismiss org/typo" in listed.err
    assert "failed: org/typo was not found" in box.run("ls").out
    assert box.run("pull", "--dismiss", "org/typo").err == "org/typo was removed from the list.\n"
    assert box.run("pull", "--list", "--json").json["downloads"] == []
    assert box.run("pull", "--dismiss", "org/typo").code == Exit.NOT_FOUND


def test_without_a_network_it_is_said_what_fails(box: Box):
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    box.serve(**nowhere)
    pull = box.run("pull", NAME)
    assert pull.code == Exit.NETWORK
    assert "http://127.0.0.1:9 cannot be reached" in pull.err
    assert "nothing listens at 127.0.0.1 port 9" in pull.err
    search = box.run("search", "x", HF_ENDPOINT="http://no-such-host.invalid")
    assert search.code == Exit.NETWORK
    assert "the name no-such-host.invalid cannot be resolved" in search.err


@pytest.mark.parametrize("command", ["up", "serve", "load", "run", "fit", "show"])
def test_a_damaged_gguf_file_is_refused_by_every_command_that_takes_a_model(box: Box, command: str):
    file = box.folder / "tiny.gguf"
    file.write_bytes(b"GGUF")
    done = box.run(command, file, *(["hello"] if command == "run" else []))
    assert done.code == Exit.FAILED
    assert "tiny.gguf cannot be served" in done.err
    assert f"{file}: its header is cut short" in done.err
    assert box.running is None


def test_what_will_not_work_is_said_when_a_model_is_loaded(box: Box):
    """Its tokenizer has more tokens than its embedding has rows."""
    box.serve(box.model())
    loaded = box.run("load", box.model("odd", declared_vocab=0))
    assert loaded.code == Exit.OK
    assert "Warning: odd: the tokenizer has " in loaded.err
    assert "embedding 256 rows" in loaded.err
    assert "chat template writes <|im_start|>" in loaded.err
    warnings = {model["name"]: model["warnings"] for model in box.api("models")["models"]}
    assert warnings["tiny"] == []
    assert any("embedding 256 rows" in warning for warning in warnings["odd"])
