"""What the built-in model is taught to say names commands, flags, settings, routes and limits that exist."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click

from llmbox.app.cli.root import cli
from llmbox.app.config.settings import schema
from llmbox.app.integrations.guides import GUIDES

ROOT = Path(__file__).parents[2]
DATA = ROOT / "packaging" / "builtin_model" / "data"
API = (ROOT / "docs" / "api.md").read_text("utf-8")
FILES = ("product", "concepts", "smalltalk")
TOPICS = [t for name in FILES for t in tomllib.loads((DATA / f"{name}.toml").read_text("utf-8"))["topic"]]
ANSWERS: dict[str, str] = {topic["id"]: topic["answer"] for topic in TOPICS}


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that `words` call, and what is left of them."""
    command: click.Command = cli
    left = list(words)
    while isinstance(command, click.Group) and left and not left[0].startswith("-") and not left[0].isupper():
        found = command.get_command(click.Context(command), left[0])
        assert found is not None, f"no command {' '.join(words)}"
        command, left = found, left[1:]
    return command, left


def flags_of(command: click.Command) -> set[str]:
    return {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}


def every_flag(group: click.Group) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield from flags_of(command)
        if isinstance(command, click.Group):
            yield from every_flag(command)


def test_commands_exist_with_the_flags_they_are_shown_with() -> None:
    wrong = []
    for answer in ANSWERS.values():
        for call in re.findall(r"`llmbox ([^`]+)`", answer):
            command, left = command_of(call.split())
            if not {word for word in left if word.startswith("-")} <= flags_of(command):
                wrong.append(call)
    assert wrong == []


def test_flags_exist() -> None:
    flags = set(every_flag(cli)) | {"--help"}
    named = {flag for answer in ANSWERS.values() for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", answer)}
    assert len(named) > 20
    assert named - flags == set()


def test_settings_exist() -> None:
    sections = {key.section for key in schema().values()}
    text = " ".join(ANSWERS.values())
    named = {f"{s}.{key}" for s, key in re.findall(r"\b([a-z]+)\.([a-z_]+)\b", text) if s in sections}
    assert len(named) > 5
    assert named - set(schema()) == set()


def test_routes_are_served() -> None:
    served = set(re.findall(r"`(?:GET|POST) (/[^`]+)`", API))
    for name, answer in ANSWERS.items():
        routes = set(re.findall(r"(?<![\w.])/(?:v1/)?[a-z_]+(?:\.json)?\b(?=`)", answer))
        routes |= set(re.findall(r"`(/(?:v1|api)/[a-z_/]+)`", answer))
        assert routes <= served, name


def test_clients_are_those_that_connect_knows() -> None:
    named = re.findall(r"\b[a-z]+\b", ANSWERS["connect"].split(" with ")[1].split(".")[0])
    assert set(named) - {"or"} <= set(GUIDES)


def test_fields_that_are_said_to_be_refused_are_refused() -> None:
    refused = set(re.findall(r"^\| `(\w+)` \| 400 \|", API, re.MULTILINE))
    named = re.findall(
        r"`(\w+)`", ANSWERS["unsupported_parameter"].split("such as ")[1].split(" in a chat")[0]
    )
    assert len(named) == 1
    assert set(named) <= refused


def test_limits_are_those_of_the_settings() -> None:
    keys = schema()
    assert f"up to {keys['limits.stop_strings'].default} strings" in ANSWERS["stop_strings"]
    assert f"from 1 to {keys['limits.choices'].default}." in ANSWERS["n_param"]
    assert f"default port is {keys['server.port'].default}," in ANSWERS["port"]
    assert f"kept for {keys['requests.retention_days'].default:.0f} days" in ANSWERS["retention"]
    assert f"answers for {keys['requests.content_days'].default:.0f}." in ANSWERS["retention"]
    ttl = keys["memory.ttl"].default
    assert isinstance(ttl, float)
    assert f"{ttl / 60:.0f} minutes if a request loaded it" in ANSWERS["ttl"]
    assert keys["model.quant"].default == "none"
    assert "The default is none" in ANSWERS["quant_auto"]
