"""Commands that need no daemon, run in this process."""

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from llmbox.app.cli.options import as_arguments
from llmbox.app.cli.root import COMMANDS, OPTIONS, LazyGroup, cli, run
from llmbox.app.errors import Exit
from llmbox.app.lifecycle.program import Program


@pytest.fixture
def llmbox(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str, **environ: str) -> tuple[int, str, str]:
        program = Program(environ={"HF_HOME": str(tmp_path / "hf"), **environ})
        code = run(["--data-dir", str(tmp_path / "data"), *arguments], program)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(llmbox, name: str):
    code, out, err = llmbox(name, "--help")
    assert (code, err) == (0, "")
    assert "Usage: llmbox" in out
    assert "--data-dir" in out


def test_the_list_of_commands_is_the_help():
    assert isinstance(cli, LazyGroup)
    assert cli.table is COMMANDS


def test_an_unknown_command_or_flag_is_exit_2(llmbox):
    assert llmbox("frobnicate")[0] == Exit.USAGE
    assert llmbox("ps", "--frobnicate")[0] == Exit.USAGE
    assert llmbox("logs", "-n", "x")[0] == Exit.USAGE
    assert llmbox("logs", "-n", "9" * 30)[0] == Exit.USAGE


def float_options(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every command with each of its options that takes a number that need not be whole."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from float_options(command, (*path, name))
        elif command is not None:
            for param in command.params:
                if isinstance(param, click.Option) and isinstance(param.type, click.types.FloatParamType):
                    missing = ("x" for each in command.params if each.required and each is not param)
                    yield (*path, name, param.opts[0], "nan", *missing)


def test_no_option_takes_nan(llmbox):
    commands = list(float_options(cli))
    assert len(commands) > 5
    for command in commands:
        code, _, err = llmbox(*command)
        assert (code, "nan" in err) == (Exit.USAGE, True), command


def test_a_component_without_lines_is_said_so(llmbox, tmp_path: Path):
    log = tmp_path / "data" / "state" / "daemon.log"
    log.parent.mkdir(parents=True)
    log.write_text('{"time": 1.0, "level": "info", "component": "http", "message": "hello"}\n')
    assert llmbox("logs", "--component", "htpt")[2].startswith("No line of htpt")
    assert "hello" in llmbox("logs", "--component", "http")[1]


@pytest.mark.parametrize("url", ["", "-1", "localhost:7411", "/tmp", "http://", "http://h:x", "http://ünï"])
def test_bench_refuses_what_is_no_url(llmbox, url: str):
    code, _, err = llmbox("bench", "--url", url)
    assert (code, "http://host:7411" in err) == (Exit.USAGE, True)


def test_a_model_without_a_client_is_refused(llmbox):
    code, _, err = llmbox("connect", "--model", "builtin")
    assert (code, "llmbox connect CLIENT --model builtin" in err) == (Exit.USAGE, True)


@pytest.mark.parametrize(
    "command",
    [
        ["ps"],
        ["status"],
        ["stats"],
        ["requests"],
        ["requests", "show", "x"],
        ["load", "{model}"],
        ["unload", "--all"],
        ["config", "show", "--effective"],
    ],
)
def test_without_a_daemon_commands_exit_3(llmbox, tmp_path: Path, command: list[str]):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    code, out, err = llmbox(*[part.format(model=tmp_path / "m") for part in command])
    assert code == Exit.UNREACHABLE
    assert "llmbox up" in out + err


def test_status_json_says_so_and_still_exits_3(llmbox):
    code, out, _ = llmbox("status", "--json")
    assert code == Exit.UNREACHABLE
    assert json.loads(out) == {"schema": "llmbox.status/1", "running": False}


def test_down_without_a_daemon_is_fine(llmbox):
    assert llmbox("down")[0] == 0


def test_config_set_get_show(llmbox, tmp_path: Path):
    assert llmbox("config", "set", "server.port", "7500")[0] == 0
    assert llmbox("config", "get", "server.port")[1] == "7500\n"
    assert llmbox("config", "path")[1].strip() == str(tmp_path / "data" / "config.toml")
    assert llmbox("config", "check")[0] == 0
    code, out, _ = llmbox("config", "show", "--json", LLMBOX_LOG_LEVEL="debug")
    shown = json.loads(out)["settings"]
    assert code == 0
    assert shown["server.port"]["value"] == 7500
    assert shown["server.port"]["origin"] == "user"
    assert shown["log.level"] == {
        "value": "debug",
        "origin": "env",
        "place": "LLMBOX_LOG_LEVEL",
        "default": "info",
    }
    assert "user (" in llmbox("config", "show", "--origin", "server")[1]


def test_wrong_config_stops_every_start_with_exit_2(llmbox, tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.toml").write_text("[server]\nprot = 1\n")
    for command in (["up"], ["serve"], ["config", "check"], ["config", "get", "server.port"]):
        code, _, err = llmbox(*command)
        assert code == Exit.USAGE
        assert "config.toml:2" in err
        assert "did you mean server.port?" in err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["up", "--ctx", "x"], Exit.USAGE),
        (["up", "--device", "tpu"], Exit.USAGE),
        (["up", "org/absent"], Exit.NOT_FOUND),
        (["up", "a/b/c"], Exit.USAGE),
        (["up", "x", "y", "--alias", "z"], Exit.USAGE),
        (["up", "--alias", "a b"], Exit.USAGE),
        (["unload"], Exit.USAGE),
        (["show", "org/absent"], Exit.NOT_FOUND),
        (["logs"], Exit.NOT_FOUND),
        (["config", "get", "server.prot"], Exit.USAGE),
        (["config", "set", "server.port", "99999"], Exit.USAGE),
        (["config", "show", "sever"], Exit.USAGE),
        (["requests", "--since", "soon"], Exit.USAGE),
        (["requests", "show", "/"], Exit.NOT_FOUND),
        (["requests", "show", "\udcff"], Exit.USAGE),
        (["bench", "--concurrency", "1,x"], Exit.USAGE),
        (["bench", "--concurrency", "4,0"], Exit.USAGE),
        (["bench", "--prompt", "0"], Exit.USAGE),
        (["bench", "--requests", "-1"], Exit.USAGE),
        (["bench", "--url", "http://127.0.0.1:1/v1", "--concurrency", "1"], Exit.FAILED),
        (["ps", "--data-dir", ""], Exit.USAGE),
        (["ps", "--config="], Exit.USAGE),
        (["load", "x" * 300], Exit.FAILED),
        (["import", "x" * 300], Exit.FAILED),
        (["load", "./absent.gguf"], Exit.NOT_FOUND),
        (["serve", "--host", "0.0.0.0"], Exit.DENIED),
    ],
)
def test_mistakes_have_their_exit_codes(llmbox, tmp_path: Path, arguments: list[str], code: Exit):
    if arguments[0] == "serve":
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text("{}")
        arguments = [*arguments, str(tmp_path / "m")]
    got, out, err = llmbox(*arguments)
    assert got == code
    assert out == ""
    assert "Traceback" not in err
    assert "0.0 tok/s" not in err
    assert "no directory" not in err


def test_an_empty_disk_has_a_sentence_and_no_empty_table(llmbox):
    code, out, _ = llmbox("df")
    assert code == 0
    assert out.startswith("No models were downloaded or adopted.")


def test_a_bad_value_names_its_key_once(llmbox):
    assert (
        llmbox("config", "set", "server.port", "x")[2].splitlines()[0] == "Error: bad value for server.port"
    )


def test_letters_that_a_locale_lacks_are_replaced(llmbox, tmp_path: Path):
    assert llmbox("config", "set", "usage.currency", "\u20ac")[0] == 0
    command = [sys.executable, "-P", "-m", "llmbox", "--data-dir", tmp_path / "data"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*command, "config", "get", "usage.currency"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "?\n", "")


def test_values_of_a_fit_stand_below_each_other(llmbox):
    rows = [line[2:] for line in llmbox("fit", "builtin")[1].splitlines() if line.startswith("  ")]
    assert any(row.startswith("disk buffers ") for row in rows)
    assert all(row[12] == " " != row[13] for row in rows), rows


def test_show_and_ls_of_what_is_on_disk(llmbox, tmp_path: Path):
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2})
    )
    code, out, _ = llmbox("show", str(model), "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["architecture"], facts["layers"], facts["servable"]) == ("Qwen3ForCausalLM", 2, False)
    assert json.loads(llmbox("ls", "--json")[1])["schema"] == "llmbox.ls/1"


@pytest.mark.parametrize(("schema", "status"), [("999", "failed"), ("001", "ok"), (None, "failed")])
def test_doctor_looks_at_the_request_log(llmbox, tmp_path: Path, schema: str | None, status: str):
    _, out, _ = llmbox("doctor", "--json")
    assert "request log" not in out
    path = tmp_path / "data" / "state" / "requests.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    if schema is None:
        path.write_bytes(b"no database at all" * 400)
    else:
        with contextlib.closing(sqlite3.connect(path)) as file, file:
            file.execute("CREATE TABLE alembic_version (version_num TEXT)")
            file.execute("INSERT INTO alembic_version VALUES (?)", [schema])
    _, out, _ = llmbox("doctor", "--json")
    (found,) = [each for each in json.loads(out)["findings"] if each["name"] == "request log"]
    assert found["status"] == status
    assert bool(found["fix"]) == (status == "failed")


def test_doctor_reports_findings_with_fixes(llmbox, tmp_path: Path):
    code, out, _ = llmbox("doctor", "--json")
    report = json.loads(out)
    assert code in {0, Exit.DOCTOR}
    assert {"python", "torch", "memory", "config", "daemon"} <= {each["name"] for each in report["findings"]}
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "config.toml").write_text("[server]\nprot = 1\n")
    code, out, _ = llmbox("doctor")
    assert code == Exit.DOCTOR
    assert "FAILED  config: unknown key server.prot" in out
    assert "fix:" in out


@pytest.mark.process
def test_version_and_completion(llmbox):
    assert json.loads(llmbox("version", "--json")[1])["schema"] == "llmbox.version/1"
    assert "_LLMBOX_COMPLETE" in llmbox("completion", "bash")[1]


def test_flags_survive_the_way_to_another_process():
    flags = {"server.port": 0, "model.ctx": None, "model.prefix_cache": False, "model.deterministic": True}
    assert as_arguments(flags) == ["--port", "0", "--ctx", "auto", "--no-prefix-cache", "--deterministic"]


def test_the_data_dir_may_come_from_the_environment_and_a_flag_goes_over_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def path(*arguments: str) -> str:
        assert run([*arguments], Program()) == 0
        return capsys.readouterr().out.strip()

    monkeypatch.setenv("LLMBOX_DATA_DIR", str(tmp_path / "env"))
    assert path("config", "path") == str(tmp_path / "env" / "config.toml")
    assert path("--data-dir", str(tmp_path / "a"), "config", "path") == str(tmp_path / "a" / "config.toml")
    assert path("config", "path", "--data-dir", str(tmp_path / "b")) == str(tmp_path / "b" / "config.toml")
    monkeypatch.setenv("LLMBOX_CONFIG", str(tmp_path / "own.toml"))
    assert path("config", "path") == str(tmp_path / "own.toml")


def test_a_settings_file_that_is_named_must_exist(llmbox, tmp_path):
    file = str(tmp_path / "own.toml")
    code, _, err = llmbox("--config", file, "config", "get", "server.port")
    assert code == Exit.USAGE
    assert f"{file} does not exist" in err
    assert llmbox("--config", file, "config", "set", "server.port", "7500")[0] == 0
    assert llmbox("--config", file, "config", "get", "server.port")[1].strip() == "7500"


def test_the_help_of_up_begins_with_its_own_options(llmbox):
    _, out, _ = llmbox("up", "--help")
    own, _, rest = out.partition("\nNetwork:\n")
    network, _, model = rest.partition("\nModel:\n")
    assert "--open" in own
    assert "--data-dir" in own
    assert "--port" in network
    assert "--ctx" in model
    assert "--ctx" not in own


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does_and_what_it_takes(name: str):
    def commands(command: click.Command) -> Iterator[click.Command]:
        yield command
        if isinstance(command, click.Group):
            for each in command.commands.values():
                yield from commands(each)

    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    for command in commands(found):
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                record = option.get_help_record(click.Context(command))
                assert record is not None
                assert record[1].strip(), (command.name, option.name)
                assert "RANGE" not in record[0], (command.name, record[0])


def test_a_typo_in_pull_is_told_before_a_daemon_is_started(llmbox, tmp_path: Path):
    code, _, err = llmbox("pull", "lama3.2:1b")
    assert (code, "did you mean llama3.2:1b?" in err) == (Exit.NOT_FOUND, True)
    assert "Starting" not in err
    assert not (tmp_path / "data").exists()


def test_a_typo_in_pull_is_told_in_the_same_way_while_a_daemon_runs(llmbox, monkeypatch):
    monkeypatch.setattr("llmbox.app.cli.models.pull.find_running", lambda _paths: object())
    code, _, err = llmbox("pull", "lama3.2:1b")
    assert (code, "did you mean llama3.2:1b?" in err) == (Exit.NOT_FOUND, True)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("load", "m", "--tensor-parallel-size", "2"), "--tp"),
        (("load", "m", "--max-model-len", "4096"), "--ctx"),
        (("up", "m", "--gpu-memory-utilization", "0.9"), "--memory"),
        (("bench", "--streams", "8"), "--concurrency"),
        (("alias", "add", "a", "m"), "set"),
    ],
)
def test_names_of_other_programs_are_answered_with_ours(llmbox, words, meant):
    code, _, err = llmbox(*words)
    assert (code, err.rstrip().endswith(f"Did you mean '{meant}'?")) == (Exit.USAGE, True)


def test_an_option_that_this_command_lacks_is_not_suggested(llmbox):
    code, _, err = llmbox("ps", "--tensor-parallel-size", "2")
    assert (code, "--tp" in err) == (Exit.USAGE, False)


def test_every_option_that_is_suggested_exists(llmbox):
    known = "".join(llmbox(command, "--help")[1] for command in ("load", "bench"))
    assert [name for name in OPTIONS if not re.search(rf"{name}\b", known)] == []


def test_a_mistyped_choice_is_answered_with_the_nearest(llmbox):
    code, _, err = llmbox("connect", "claud")
    assert (code, "Did you mean 'claude'?" in err) == (Exit.USAGE, True)
    assert "Did you mean" not in llmbox("connect", "frobnicate")[2]
