"""Several models in one memory through the daemon: load on request, time to live, pin, aliases."""

import json
import os
import re
import shutil
import signal
import urllib.error
import urllib.request
from typing import Any

import pytest

from llmbox.app.errors import Exit
from llmbox.app.models.catalog import BUILTIN_DIR
from support.cli_box import PATIENCE, Box, box, until

__all__ = ["box"]


@pytest.fixture
def served(box: Box) -> Box:
    box.environ["LLMBOX_MEMORY_TTL"] = "0.3"
    box.serve(box.model())
    return box


def post(box: Box, path: str, body: dict[str, Any]) -> dict[str, Any]:
    running = box.running
    assert running is not None
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        running.url + path, data, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def names(box: Box) -> list[str]:
    return [model["name"] for model in box.api("models")["models"]]


def test_a_request_loads_a_model_and_idleness_unloads_it(served: Box):
    body = {"model": "builtin", "prompt": "x", "max_tokens": 2}
    assert post(served, "/v1/completions", body)["model"] == "builtin"
    until(lambda: names(served) == ["tiny"])
    assert served.api("status")["ready"]
    left = "builtin is unloaded after 0.3 s without requests"
    until(lambda: left in served.paths.log_file.read_text())  # said once its process has ended
    log = served.run("logs", "-n", "50").out
    assert "builtin is loaded because a request names it" in log
    assert left in log
    assert post(served, "/v1/completions", body)["usage"]["completion_tokens"] == 2
    for name in ("org/absent", str(served.folder / "models" / "tiny"), "../tiny"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(served, "/v1/completions", {**body, "model": name})
        assert refused.value.code == 404


def listed(box: Box) -> dict[str, dict[str, Any]]:
    running = box.running
    assert running is not None
    with urllib.request.urlopen(running.url + "/v1/models", timeout=PATIENCE) as answer:
        return {model["id"]: model for model in json.load(answer)["data"]}


def test_clients_see_what_they_may_ask_for(served: Box):
    unfit = served.folder / "hf" / "hub" / "models--org--broken"
    snapshot = unfit / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (unfit / "refs").mkdir()
    (unfit / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text('{"model_type": "unknown"}')
    (snapshot / "model.safetensors").write_text("")
    assert served.run("alias", "set", "guide", "builtin", "ctx=100").code == 0
    found = listed(served)
    assert {name: model["state"] for name, model in found.items()} == {
        "tiny": "loaded",
        "builtin": "on_disk",
        "guide": "on_disk",
    }
    assert found["builtin"]["context_window"] == 4096
    assert found["guide"]["context_window"] == 100
    assert served.run("load", "builtin", "--ttl", "3600").code == 0
    assert listed(served)["builtin"]["state"] == "loaded"
    assert served.run("config", "set", "memory.load_on_request", "false").code == 0
    assert served.run("unload", "builtin").code == 0
    running = served.running
    assert running is not None
    os.kill(running.pid, signal.SIGHUP)
    until(lambda: listed(served).keys() == {"tiny"})


def test_pin_ttl_and_ps(served: Box):
    assert served.run("load", "builtin", "--ttl", "0.2", "--no-wait").code == 0
    assert served.run("pin", "nothing").code == Exit.NOT_FOUND
    until(lambda: names(served) == ["tiny"])
    assert served.run("load", "builtin", "--ttl", "3600").code == 0
    row = next(model for model in served.api("models")["models"] if model["name"] == "builtin")
    assert row["ttl_s"] == 3600
    assert 3300 < row["expires_s"] <= 3600
    assert served.run("pin", "builtin").code == 0
    assert "pinned" in served.run("ps").out
    assert served.run("unpin", "builtin").code == 0
    assert re.search(r"\b5[5-9] min", served.run("ps").out)


def test_an_alias_carries_its_parameters_over_one_load(served: Box):
    def tokens(model: str, *messages: tuple[str, str]) -> int:
        plain = [{"role": role, "content": text} for role, text in messages]
        return int(post(served, "/tokenize", {"model": model, "messages": plain})["count"])

    place = served.folder / "models" / "tiny"
    done = served.run("alias", "set", "poet", place, "system=Answer in rhymes.", "ctx=64")
    assert done.code == 0, done.err
    plain = tokens("tiny", ("user", "hi"))
    assert tokens("poet", ("user", "hi")) > plain + 10
    own = (("system", "Be brief."), ("user", "hi"))
    assert tokens("poet", *own) == tokens("tiny", *own)
    assert names(served) == ["tiny"]
    body = {"model": "poet", "prompt": "x" * 200, "max_tokens": 4}
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(served, "/v1/completions", body)
    error = json.load(refused.value)["error"]
    assert error["code"] == "context_length_exceeded"
    assert "64 tokens" in error["message"]
    answer = post(served, "/v1/completions", {**body, "prompt": "x"})
    assert answer["model"] == "poet"
    assert served.run("load", "builtin").code == 0
    assert served.run("alias", "set", "guide", "builtin", "ctx=100").code == 0
    assert listed(served)["guide"]["context_window"] == 100
    served.paths.registry_file.write_text("{")
    assert tokens("tiny", ("user", "hi")) == plain
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(served, "/v1/completions", body)
    assert refused.value.code == 404
    assert served.run("alias", "ls").code == Exit.FAILED
    served.paths.registry_file.unlink()
    assert served.run("alias", "set", "poet", place).code == 0
    assert served.run("alias", "rm", "poet").code == 0
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(served, "/v1/completions", body)
    assert refused.value.code == 404


def test_one_meaning_of_a_name(served: Box):
    """What /v1/models lists can be loaded, aliased, asked for by id and taken out of memory by that name."""
    place = served.folder / "models" / "tiny"
    (place / "model.safetensors").write_text("")  # what adopting looks for
    shutil.copy(BUILTIN_DIR / "config.json", place)  # one that a window can be reckoned for
    running = served.running
    assert running is not None
    assert served.run("alias", "set", "poet", place, "ctx=64").code == 0
    assert served.run("alias", "set", "bard", "tiny").code == 0
    assert served.run("adopt", place, "--name", "adopted").code == 0
    found = listed(served)
    assert {name: model["state"] for name, model in found.items() if name != "builtin"} == {
        "tiny": "loaded",
        "poet": "loaded",
        "bard": "loaded",
        "adopted": "loaded",
    }
    assert found["poet"]["context_window"] == 64
    for name in ("tiny", "poet", "bard"):
        with urllib.request.urlopen(f"{running.url}/v1/models/{name}", timeout=PATIENCE) as answer:
            assert json.load(answer)["id"] == name
        assert served.run("load", name).code == 0, name
        assert served.run("show", name, "--json").json["loaded"]["name"] == "tiny"
    assert served.run("ls", "--json").json["models"][1]["aliases"] == ["bard", "poet"]
    assert names(served) == ["tiny"]
    body = {"prompt": "x", "max_tokens": 1}
    assert post(served, "/v1/completions", {**body, "model": "adopted"})["model"] == "adopted"
    assert names(served) == ["tiny"]  # the same folder is not loaded twice
    taken = served.run("alias", "set", "tiny", "builtin")
    assert taken.code == Exit.CONFLICT
    assert served.run("unload", "poet").code == 0
    assert names(served) == []
    assert {"tiny", "poet", "bard", "adopted"} & set(listed(served)) == {"poet", "bard", "adopted"}
    assert post(served, "/v1/completions", {**body, "model": "bard"})["model"] == "bard"
    assert served.run("load", "adopted").code == 0
