"""One table of settings: precedence, origins, and errors that name their place."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from llmbox.app.config.entries import is_collector
from llmbox.app.config.loader import check_value, load_settings, parse, set_value, template
from llmbox.app.config.paths import Paths, find_paths
from llmbox.app.config.settings import SECTIONS, Settings, schema
from llmbox.app.errors import CliError, Exit


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = find_paths(tmp_path)
    return Paths(
        found.config_file,
        tmp_path / "system.toml",
        found.data_dir,
        found.state_dir,
        found.cache_dir,
        found.runtime_dir,
    )


def error_of(paths: Paths, environ=None, flags=None) -> CliError:
    with pytest.raises(CliError) as caught:
        load_settings(paths, environ or {}, flags or {})
    assert caught.value.exit == Exit.USAGE
    return caught.value


@pytest.mark.parametrize("name", schema())
def test_every_key_is_documented_and_its_default_is_valid(name: str):
    row = schema()[name]
    assert row.doc[0].isupper()
    assert row.doc.endswith(".")
    assert check_value(row, row.default, "default") == row.default


def test_sections_of_the_schema_are_those_of_the_settings():
    assert list(SECTIONS) == list(Settings.__dataclass_fields__)


def test_precedence_and_origin_step_by_step(paths: Paths):
    def port(environ=None, flags=None):
        loaded = load_settings(paths, environ or {}, flags or {})
        return loaded.settings.server.port, str(loaded.origins["server.port"])

    assert port() == (7411, "default")
    paths.system_config.write_text("[server]\n\nport = 1001\n")
    assert port() == (1001, f"system ({paths.system_config}:3)")
    paths.config_file.write_text("# mine\n[server]\nport = 1002\n")
    assert port() == (1002, f"user ({paths.config_file}:3)")
    environ = {"LLMBOX_SERVER_PORT": "1003"}
    assert port(environ) == (1003, "env (LLMBOX_SERVER_PORT)")
    assert port(environ, {"server.port": 1004}) == (1004, "flag (--port)")


def test_keys_of_both_files_are_merged(paths: Paths):
    paths.system_config.write_text('[log]\nlevel = "debug"\n[server]\nport = 1\n')
    paths.config_file.write_text("[server]\nport = 2\n")
    settings = load_settings(paths, {}, {}).settings
    assert (settings.log.level, settings.server.port) == ("debug", 2)


def test_settings_do_not_change():
    with pytest.raises(FrozenInstanceError):
        Settings().server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "what", "hint", "line"),
    [
        ("[server]\nprot = 1\n", "unknown key server.prot", "server.port", ":2"),
        ("\n[sever]\nport = 1\n", "unknown section [sever]", "[server]", ":2"),
        ("port = 1\n", "unknown key port", "server.port", ":1"),
        ('[server]\nport = "7411"\n', "bad value for server.port", "whole number", ":2"),
        ("[server]\n\nport = true\n", "bad value for server.port", "whole number", ":3"),
        ("[server]\nport = 70000\n", "bad value for server.port", "between 0 and 65535", ":2"),
        ('[model]\ndevice = "gpu"\n', "bad value for model.device", "auto, cpu, cuda", ":2"),
        ("[limits]\nheader_timeout = nan\n", "bad value for limits.header_timeout", "between", ":2"),
        ('[server]\ncors_origins = ["*"]\n', "bad value for server.cors_origins", "name each", ":2"),
        (
            '[server]\ncors_origins = ["https://a.b/c"]\n',
            "bad value for server.cors_origins",
            "origins",
            ":2",
        ),
        ('[server]\ncors_origins = ["null"]\n', "bad value for server.cors_origins", "'null'", ":2"),
        (
            '[telemetry]\notlp_endpoint = "collector:4318"\n',
            "bad value for telemetry.otlp_endpoint",
            "such as http://127.0.0.1:4318",
            ":2",
        ),
        ("[server]\nallowed_hosts = [1]\n", "bad value for server.allowed_hosts", "list of text", ":2"),
        ("[server\n", "is not valid TOML", "line 1", ""),
    ],
)
def test_a_wrong_file_is_told_with_file_line_and_nearest_key(
    paths: Paths, text: str, what: str, hint: str, line: str
):
    paths.config_file.write_text(text)
    error = error_of(paths)
    assert what in error.what
    assert f"{paths.config_file}{line}" in error.what
    assert hint in error.why


def test_files_of_windows_editors_are_read(paths: Paths):
    paths.config_file.write_bytes(b"\xef\xbb\xbf[server]\r\nport = 5\r\n")
    assert load_settings(paths, {}, {}).settings.server.port == 5
    set_value(paths.config_file, schema()["log.level"], "debug")
    assert load_settings(paths, {}, {}).settings.server.port == 5
    paths.config_file.write_bytes("[server]".encode("utf-16"))
    assert "save it as UTF-8" in error_of(paths).fix


def test_a_file_that_may_not_be_read_is_to_be_made_readable(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(CliError) as caught:
        load_settings(paths, {}, {})
    assert caught.value.exit == Exit.DENIED
    assert "let this user read it" in caught.value.fix


def test_dotted_and_inline_spellings_are_read(paths: Paths):
    paths.config_file.write_text('server.port = 5\nlog = { level = "error" }\n')
    loaded = load_settings(paths, {}, {})
    assert (loaded.settings.server.port, loaded.settings.log.level) == (5, "error")
    assert loaded.origins["server.port"].place.endswith(":1")


def test_environment_values_are_read_as_text(paths: Paths):
    environ = {
        "LLMBOX_MODEL_PREFIX_CACHE": "off",
        "LLMBOX_MODEL_CTX": "auto",
        "LLMBOX_MODEL_MEMORY": "1.5",
        "LLMBOX_SERVER_ALLOWED_HOSTS": "a, b:80",
        "LLMBOX_DATA_DIR": "/elsewhere",
        "LLMBOX_KERNELS": "reference",
    }
    settings = load_settings(paths, environ, {}).settings
    assert settings.model.prefix_cache is False
    assert settings.model.ctx is None
    assert settings.model.memory == 1.5
    assert settings.server.allowed_hosts == ("a", "b:80")


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("LLMBOX_SERVER_PROT", "1", "LLMBOX_SERVER_PORT"),
        ("LLMBOX_SERVER_PORT", "x", "whole number"),
        ("LLMBOX_MODEL_PREFIX_CACHE", "maybe", "true or false"),
        ("LLMBOX_MODEL_MEMORY", "nan", "between"),
    ],
)
def test_a_wrong_variable_is_told_by_name(paths: Paths, variable: str, value: str, hint: str):
    error = error_of(paths, {variable: value})
    assert variable in error.what
    assert hint in error.why


def test_set_keeps_comments_and_writes_private_files(paths: Paths):
    paths.config_file.write_text("# about me\n[server]\nport = 1 # why\n")
    set_value(paths.config_file, schema()["server.port"], 2)
    set_value(paths.config_file, schema()["model.ctx"], None)
    set_value(paths.config_file, schema()["server.models"], ("a", "b/c"))
    text = paths.config_file.read_text()
    assert "# about me" in text
    assert "# why" in text
    assert paths.config_file.stat().st_mode & 0o077 == 0
    settings = load_settings(paths, {}, {}).settings
    assert (settings.server.port, settings.server.models) == (2, ("a", "b/c"))
    assert [item.name for item in paths.config_file.parent.iterdir()] == ["config.toml"]


def test_set_refuses_to_touch_a_broken_file(paths: Paths):
    paths.config_file.write_text("[server]\nprot = 1\n")
    with pytest.raises(CliError, match="unknown key"):
        set_value(paths.config_file, schema()["server.port"], 2)
    assert paths.config_file.read_text() == "[server]\nprot = 1\n"


def test_the_template_names_every_key_and_is_valid_with_comments_removed():
    text = template()
    lines = [
        line.removeprefix("# ") for line in text.splitlines()[2:] if " = " in line or line.startswith("[")
    ]
    found = parse("\n".join(lines), Path("template"))
    assert {name: value for name, (value, _) in found.items()} == {
        name: row.default for name, row in schema().items()
    }


@pytest.mark.parametrize(
    ("url", "is_good"),
    [
        ("", True),
        ("http://127.0.0.1:4318", True),
        ("https://otel.example/otlp/", True),
        ("http://[::1]:4318", True),
        ("grpc://otel.example:4317", False),
        ("file:///etc/passwd", False),
        ("http://", False),
        ("http://:4318", False),
        ("http://host:99999", False),
        ("http://host:0", False),
        ("http://user:secret@host", False),
        ("http://host/?a=b", False),
        ("http://host/#a", False),
        ("http://host /a", False),
        ("http://host\r\nX: y", False),
        ("http://[::1", False),
    ],
)
def test_urls_of_collectors(url: str, is_good: bool):
    assert is_collector(url) is is_good


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("max_running=4", "holds entries such as"),
        ("a:max_running", "holds entries such as"),
        ("a:max_runing=4", "did you mean model.max_running"),
        ("a:overrides=b", "unknown key model.overrides"),
        ("a:max_running=0", "must be between 1"),
        ("a:lora_memory=0", "must be at least 0.001"),
        ("a:max_running=many", "must be a whole number"),
        ("a:disaggregate=1", "two numbers of cores"),
    ],
)
def test_a_wrong_override_is_told(entry: str, words: str):
    with pytest.raises(CliError) as told:
        check_value(schema()["model.overrides"], ("a:ctx=64", entry), "llmbox.toml:3")
    assert words in f"{told.value.what} {told.value.why}"
    assert "llmbox.toml:3" in told.value.what
    assert told.value.exit == Exit.USAGE
