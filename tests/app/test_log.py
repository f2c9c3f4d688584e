import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmbox.app import log as logs
from llmbox.app.cli import output
from llmbox.app.cli.server.logs import error_in, last_lines, parse
from llmbox.app.config.settings import LogSettings
from llmbox.app.errors import CliError


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, raising = root.handlers[:], root.level, logging.raiseExceptions
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:], logging.raiseExceptions = handlers, raising
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def test_lines_are_json_private_and_cannot_be_forged(tmp_path: Path):
    path = tmp_path / "daemon.log"
    logs.set_up(path, LogSettings(), background=False)
    logging.getLogger("llmbox.app.gateway.gateway").info('one\n{"forged": 1}\x1b[2J')
    logging.getLogger("llmbox.app.gateway.gateway").debug("too fine")
    (line,) = path.read_text().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["component"]) == ("info", "gateway")
    assert "\x1b" not in line
    assert "\x1b" not in parse(line).text


def test_the_level_follows_the_settings(tmp_path: Path):
    path = tmp_path / "daemon.log"
    logs.set_up(path, LogSettings(level="error"), background=False)
    logging.getLogger("llmbox.x").warning("no")
    logs.set_level(LogSettings(level="debug"))
    logging.getLogger("llmbox.x").debug("yes")
    assert [json.loads(line)["message"] for line in path.read_text().splitlines()] == ["yes"]


def test_the_file_is_rotated(tmp_path: Path):
    path = tmp_path / "daemon.log"
    logs.set_up(path, LogSettings(file_bytes=10_000, files=2), background=False)
    for number in range(400):
        logging.getLogger("llmbox.x").info("line %d %s", number, "x" * 60)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["daemon.log", "daemon.log.1", "daemon.log.2"]
    assert all(item.stat().st_size <= 10_000 for item in tmp_path.iterdir())


def test_last_lines_start_at_an_offset_and_survive_foreign_text(tmp_path: Path):
    path = tmp_path / "daemon.log"
    path.write_text("old\n")
    offset = path.stat().st_size
    with path.open("a") as file:
        file.write(
            '{"time": 1, "level": "error", "component": "daemon", "message": "m"}\nSegfault \x1b[31m\n'
        )
    first, second = last_lines(path, offset, 5)
    assert first.endswith("error   daemon   m")
    assert second == "Segfault \\x1b[31m"
    assert last_lines(path, 10**9, 5)[0] == "old"
    assert last_lines(tmp_path / "absent", 0, 5) == []


@pytest.mark.parametrize(
    ("logger", "name"),
    [
        ("llmbox.app.engines.supervisor", "engines"),
        ("llmbox.engines", "engines"),
        ("llmbox.daemon", "daemon"),
        ("uvicorn.error", "uvicorn"),
        ("llmbox", "daemon"),
    ],
)
def test_components(logger: str, name: str):
    assert logs.component(logger) == name


def test_a_printed_error_is_read_back(capsys: pytest.CaptureFixture[str]):
    output.print_error(CliError("port 1: in use", "pid 2: there", "another port", log="/l"))
    told = error_in(["noise", *capsys.readouterr().err.splitlines(), "more noise"])
    assert told == CliError("port 1: in use", "pid 2: there", "another port")
    assert error_in(["noise"]) is None
