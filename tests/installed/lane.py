"""Everything once, as installed: for `make test-installed`. The suite takes files named test_* alone.

A wheel of this tree, once in an environment of the pinned versions, once of the lowest that pyproject.toml
allows. The tests of one environment are steps of one life, in this order.
"""

import http.cookiejar
import json
import re
import signal
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.adapters import plain_tensors, write_adapter
from support.cli_box import PATIENCE, until
from support.gguf_models import write_gguf
from support.hub_models import model_files
from support.hub_stub import StubHub, StubRepo, stub_hub
from support.installed_box import (
    HELD,
    InstalledBox,
    all_commands,
    build_wheel,
    floors,
    install,
    lowest_versions,
    pins,
)
from support.tiny_models import make_tiny_model

NAME = "org/little"
MESSAGES = [{"role": "user", "content": "What is llmbox?"}]
NOT_THERE = (
    "numpy",
    "pytest",
    "transformers",
    "safetensors",
    "gguf",
    "aiohttp",
    "triton",
    "hatchling",
)
IMPORTS = """
import importlib, pkgutil, llmbox
for module in pkgutil.walk_packages(llmbox.__path__, "llmbox."):
    if module.name.startswith(("llmbox.__main__", "llmbox.migrations")):
        continue  # a program, and steps that Alembic runs
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in ("triton", "ray"):  # torch brings the first; an extra
            raise
    print(module.name)
"""
NO_PAGES = ("/admin/live/", "/admin/models/plan", "/admin/models/template")
"""Endless, and answers to forms."""
VERSIONS = """
from importlib.metadata import distributions
for each in distributions():
    print(f"{each.name}={each.version}")
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model `source`, the same as a GGUF file, and an `adapter`."""
    folder = tmp_path_factory.mktemp("models")
    write_gguf(make_tiny_model(folder / "source", arch="llama"), folder / "source.gguf")
    write_adapter(folder / "adapter", plain_tensors())
    return folder


@pytest.fixture(scope="session")
def hub() -> Iterator[StubHub]:
    with stub_hub() as stub:
        stub.repos[NAME] = StubRepo(model_files(vocab_size=512))
        yield stub


@pytest.fixture(scope="module", params=["pinned", "lowest"])
def versions(request: pytest.FixtureRequest) -> dict[str, str]:
    return pins() if request.param == "pinned" else lowest_versions()


@pytest.fixture(scope="module")
def box(
    versions: dict[str, str], wheel: Path, hub: StubHub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InstalledBox]:
    folder = tmp_path_factory.mktemp("installed")
    subject = InstalledBox(folder / "home", install(wheel, folder / "env", versions), hub.url)
    yield subject
    subject.close()


def api(box: InstalledBox) -> str:
    """The address of the daemon, without /v1."""
    address: str = box.json("status")["url"]
    return address


def share_and_end(box: InstalledBox) -> None:
    """Share the box, where this machine has a network, and undo it."""
    shared = box.run("share", "--yes", "--json", code=None)
    if shared.code:
        assert "no address that other devices could use" in shared.err
        return
    assert json.loads(shared.out)["secret"]
    box.run("share", "--off", "--yes")
    assert box.run("config", "get", "server.host").out.strip() == "127.0.0.1"


# ------------------------------------------------------------------ without a daemon


def test_it_has_its_runtime_dependencies_and_no_others(box: InstalledBox, versions: dict[str, str]):
    script = f"from importlib.util import find_spec\nprint(*[n for n in {NOT_THERE} if find_spec(n)])"
    assert box.python(script).split() == []
    there = dict(each.lower().replace("_", "-").split("=") for each in box.python(VERSIONS).split())
    for name in floors():
        assert there[name].partition("+")[0] == versions[name] or there[name].startswith(versions[name]), name


def test_every_module_can_be_imported(box: InstalledBox):
    assert len(box.python(IMPORTS).split()) > 400


def test_a_model_inside_a_program(box: InstalledBox):
    script = (
        "from llmbox import LLM\nwith LLM('builtin', ctx=512) as llm:\n"
        "    print(len(llm.generate('one', max_tokens=3, ignore_eos=True)[0].outputs[0].token_ids))"
    )
    assert box.python(script).split() == ["3"]


def test_settings_keys_and_names(box: InstalledBox, models: Path):
    assert box.run("version").out.startswith("llmbox ")
    box.run("version", "--check", code=3)  # its index is the stub of the hub, which has no packages
    assert "_LLMBOX_COMPLETE" in box.run("completion", "bash").out
    box.run("config", "set", "limits.stream_timeout", "50")
    assert box.run("config", "get", "limits.stream_timeout").out.strip() == "50"
    box.run("config", "set", "requests.log_content", "true")  # so that a request can be sent once more
    assert Path(box.run("config", "path").out.splitlines()[0].split()[-1]).is_relative_to(box.home)
    for command in ("show", "check", "edit"):
        box.run("config", command)
    assert "ExecStart" in box.run("service", "install", "--user", "--print").out
    box.run("service", "status", "--user", code=3)
    box.run("service", "uninstall", "--user", code=4)
    for words in (["deploy", "builtin"], ["status"], ["rm"]):
        assert "pip install 'llmbox[ray]'" in box.run("ray", *words, code=1).err
    for words in (
        ["add", "one"],
        ["ls"],
        ["set", "one", "--rpm", "9"],
        ["rotate", "one"],
        ["rm", "one", "--yes"],
    ):
        box.run("key", *words)
    box.run("adopt", models / "source", "--name", "adopted")
    box.run("alias", "set", "poet", "builtin", "temperature=0.5")
    assert "poet" in box.run("alias", "ls").out
    box.run("alias", "rm", "poet")
    assert box.json("lora", "ls")["adapters"] == []
    box.run("lora", "add", "none", models, "--base", "builtin", code=1)
    box.run("lora", "rm", "none", code=4)
    box.run("fit", "builtin", "--lora", models / "adapter")
    box.run("fit", "builtin", "--on", "rtx4090,h100", "--price", "h100=2.5", "--plan", "--users", "100")
    box.run("lora", "merge", "none", "--out", models / "merged", code=4)
    assert {"builtin", "adopted"} <= {row["name"] for row in box.json("ls")["models"]}
    box.run("show", "adopted")
    box.run("df")
    box.run("connect")
    box.run("doctor")
    box.run("status", code=3)


def test_a_gguf_file_becomes_a_model_and_a_smaller_one(box: InstalledBox, models: Path):
    box.run("import", models / "source.gguf", "--out", box.home / "imported")
    box.run("quantize", box.home / "imported", "--to", "int8", "--out", box.home / "rounded")
    assert box.run("fit", box.home / "rounded").code == 0


# ------------------------------------------------------------------ with one


def test_up_and_what_it_says_of_itself(box: InstalledBox):
    assert [model["state"] for model in box.json("up", "builtin")["models"]] == ["ready"]
    assert "builtin" in box.run("ps").out
    for command in ("status", "stats", "logs"):
        box.run(command)


def test_a_chat_in_each_dialect(box: InstalledBox):
    url = api(box)
    body = {"model": "builtin", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    said = box.post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert said
    assert box.post(f"{url}/v1/messages", body)["content"] == [{"type": "text", "text": said}]
    answer = box.post(
        f"{url}/api/chat", {**body, "options": {"num_predict": 12, "temperature": 0}, "stream": False}
    )
    assert answer["message"]["content"] == said
    body = {"model": "builtin", "input": MESSAGES, "max_output_tokens": 16, "temperature": 0}
    answer = box.post(f"{url}/v1/responses", body)
    assert answer["output"][0]["content"][0]["text"].startswith(said)
    assert box.run("run", "builtin", "What is llmbox?").out.strip()
    picture = box.home / "picture.gif"
    picture.write_bytes(b"GIF89a")
    refused = box.run("run", "builtin", "--image", picture, "What is it?", code=1)
    assert "builtin cannot read images" in refused.err


def test_a_file_of_requests(box: InstalledBox, tmp_path: Path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "one", "max_tokens": 2}\n{"prompt": "two", "max_tokens": 2}\n')
    box.run("batch", source, target, "--model", "builtin")
    assert {json.loads(line)["custom_id"] for line in target.read_text().splitlines()} == {"1", "2"}


def test_an_answer_by_a_schema(box: InstalledBox):
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    shape = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    body = {"model": "builtin", "messages": MESSAGES, "response_format": shape, "max_tokens": 64}
    said = box.post(f"{api(box)}/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert re.fullmatch(r'\{\s*"yes"\s*:\s*(true|false)\s*\}', said)


def test_models_come_from_the_hub_and_from_folders_and_go(box: InstalledBox):
    assert NAME in box.run("search", "org").out
    box.run("fit", NAME)
    box.run("pull", NAME)
    for model in (NAME, box.home / "imported", box.home / "rounded", "adopted"):
        box.run("load", model)
    for name in (NAME, "imported", "rounded", "adopted"):
        body = {"model": name, "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        assert box.post(f"{api(box)}/v1/completions", body)["usage"]["completion_tokens"] == 4
        box.run("unload", name)
    box.run("pin", "builtin")
    box.run("unpin", "builtin")
    box.run("rm", NAME, "--yes")
    assert NAME not in {row["name"] for row in box.json("ls")["models"]}


def test_a_benchmark_and_the_dashboard(box: InstalledBox):
    words = ("bench", "builtin", "--concurrency", "1", "--requests", "2", "--profile")
    level = box.json(*words)["levels"][0]
    assert level["output_tokens_per_s"] > 0
    assert level["profile"]["engine"]["steps"] > 0
    for command in ("top", "dash"):
        box.screen(command, shows="builtin")


def test_every_page_of_the_panel(box: InstalledBox):
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    link = urllib.parse.urlsplit(box.json("up", "builtin")["sign_in"])
    base = f"{link.scheme}://{link.netloc}"
    form = urllib.parse.urlencode(urllib.parse.parse_qsl(link.query)).encode()
    sign_in = urllib.request.Request(f"{base}{link.path}", form, {"Origin": base})
    found = re.compile(r'(?:href|src|hx-get)="(/admin[^"#]*)"')
    with browser.open(sign_in, timeout=PATIENCE) as page:
        waiting = found.findall(page.read().decode())
    seen: set[str] = set()
    while waiting:
        path = waiting.pop(0).replace("&amp;", "&")
        bare = path.partition("?")[0]
        if bare in seen or bare.startswith(NO_PAGES):
            continue
        seen.add(bare)
        try:
            with browser.open(f"{base}{path}", timeout=PATIENCE) as page:
                body = page.read()
        except urllib.error.HTTPError as error:
            pytest.fail(f"{path}: {error.code} {error.read().decode()[:500]}")
        if "html" in page.headers["Content-Type"]:
            waiting += found.findall(body.decode())
    pages = ("models", "requests", "memory", "playground", "telemetry", "keys", "settings", "system")
    assert {f"/admin/{page}" for page in pages} <= seen
    assert {f"/admin/static/{file}" for file in ("panel.css", "vendor/htmx.min.js")} <= seen


def test_an_assistant_by_mcp(box: InstalledBox):
    assert "llmbox" in box.run("mcp", "--print").out
    box.run("connect", "mcp")
    box.run("connect", "mcp", "cursor", "--write")
    entry = json.loads((box.home / ".cursor/mcp.json").read_text())["mcpServers"]["llmbox"]
    assert [entry["command"], *entry["args"]] == [str(box.env / "bin/llmbox"), "mcp"]
    begin = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "lane", "version": "1"},
    }
    calls = [
        {"id": 1, "method": "initialize", "params": begin},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "list_models", "arguments": {}}},
    ]
    said = box.run("mcp", stdin="".join(json.dumps({"jsonrpc": "2.0", **call}) + "\n" for call in calls)).out
    answers = {answer["id"]: answer for answer in map(json.loads, said.splitlines())}
    assert "builtin" in json.dumps(answers[2]["result"])


def test_the_request_log(box: InstalledBox):
    until(lambda: box.json("requests")["requests"])
    one = box.run("requests", "-q").out.split()[0]
    box.run("requests", "show", one)
    box.run("requests", "replay", one)
    box.run("requests", "cancel", "nothing", code=4)
    box.run("requests", "stored")
    box.run("why", one)
    assert "SIMULATED" in box.run("replay", "--kv-blocks", "2x").out
    box.run("requests", "purge", "--yes")
    for command in ("check", "backup", "vacuum"):
        box.run("db", command)


def test_restart_down_serve_and_uninstall(box: InstalledBox):
    box.run("restart")
    assert [model["name"] for model in box.json("ps")["models"]] == ["builtin"]
    share_and_end(box)
    box.run("down")
    box.run("db", "migrate")
    with box.running("serve", "builtin", "--tls") as daemon:
        until(lambda: (box.home / "run/llmbox/llmbox.sock").exists() and box.json("status")["ready"])
        daemon.send_signal(signal.SIGTERM)
    assert daemon.returncode == 0
    box.run("uninstall", "--yes", "--json")
    left = [path for path in box.home.rglob("*llmbox*") if not path.is_relative_to(box.home / "hf")]
    assert left == []


def test_every_command_was_called(box: InstalledBox):
    assert all_commands() - box.called == set()


def test_what_is_held_at_another_version_is_a_dependency():
    assert set(floors()) >= HELD
