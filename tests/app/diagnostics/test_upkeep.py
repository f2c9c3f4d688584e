"""The request log's file, the bundle for helpers, uninstall: no secret goes out, nothing else is lost."""

import json
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path

import pytest

from llmbox.app.diagnostics.bundle import GONE, redact, redact_text
from llmbox.app.errors import Exit
from llmbox.app.store.database import open_database
from support.cli_call import Call, FakeClient, call, home

__all__ = ["call", "home"]

SECRETS = {
    "key": "sk-llmbox-" + "a1B2" * 10,
    "hub token": "hf_" + "q" * 30,
    "link": "http://127.0.0.1:7411/admin/signin?token=" + "zZ9" * 12,
    "proxy": "http://alice:hunter22@proxy:3128/",
    "header": "Authorization: Bearer " + "x" * 24,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijk",
}
WORDS = {"zZ9" * 12, "hunter22", "x" * 24, "a1B2a1B2", "q" * 30, "abcdefghijk"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    file = tmp_path / "data" / "state" / "requests.db"
    file.parent.mkdir(parents=True)
    open_database(file).dispose()
    return file


# -------------------------------------------------------------------- llmbox db


def test_check_backup_vacuum_and_migrate(call: Call, store: Path, tmp_path: Path):
    told = json.loads(call("db", "check", "--json").out)
    assert told["schema"] == "llmbox.db/1"
    assert told["revision"] == told["newest_schema"]
    assert told["sound"]
    copy = tmp_path / "copy.db"
    assert call("db", "backup", copy).out.strip() == str(copy)
    assert copy.stat().st_mode & 0o077 == 0
    assert sqlite3.connect(copy).execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert call("db", "backup", copy).code == Exit.CONFLICT
    assert call("db", "vacuum").code == 0
    assert call("db", "migrate").code == 0


def test_a_backup_has_no_secret_that_an_older_version_left(call: Call, store: Path, tmp_path: Path):
    body = json.dumps(
        {"url": "https://tools.test/mcp", "headers": {"Authorization": "Bearer " + "s3cret" * 600}}
    )
    with closing(sqlite3.connect(store)) as database, database:
        database.execute(
            "INSERT INTO panel_item (owner, kind, name, body) VALUES ('', 'mcp_server', 'web', ?)", (body,)
        )
    copy = tmp_path / "copy.db"
    assert call("db", "backup", copy).code == 0
    with closing(sqlite3.connect(copy)) as database:
        ((kept,),) = database.execute("SELECT body FROM panel_item").fetchall()
    assert json.loads(kept)["headers"] == {"Authorization": ""}
    assert not [file for file in tmp_path.glob("copy.db*") if b"s3cret" in file.read_bytes()]


def test_a_damaged_file_is_found_with_exit_8(call: Call, store: Path):
    data = bytearray(store.read_bytes())
    data[4096:8192] = b"\xff" * 4096
    store.write_bytes(data)
    done = call("db", "check")
    assert done.code == Exit.INTEGRITY
    assert "DAMAGED" in done.out
    store.write_bytes(b"no database at all, but long enough to be looked at" * 40)
    assert call("db", "check").code == Exit.INTEGRITY
    assert call("db", "vacuum").code == Exit.INTEGRITY


def test_a_file_of_a_newer_version_is_not_called_older(call: Call, store: Path):
    with closing(sqlite3.connect(store, isolation_level=None)) as file:
        file.execute("UPDATE alembic_version SET version_num = '999'")
    done = call("db", "check")
    assert done.code == 0
    assert "A newer llmbox wrote it" in done.err
    assert "migrate" not in done.err


def test_a_locked_file_is_waited_for_and_told(call: Call, store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llmbox.app.store.database_file.BUSY_S", 0.05)
    holder = sqlite3.connect(store, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    done = call("db", "vacuum")
    assert done.code == Exit.FAILED
    assert "locked" in done.err
    holder.close()


def test_a_backup_that_cannot_be_written_leaves_nothing(call: Call, store: Path, tmp_path: Path):
    assert call("db", "backup", tmp_path / "absent" / "x.db").code == Exit.FAILED


def test_without_a_file_exit_4(call: Call):
    assert call("db", "check").code == Exit.NOT_FOUND


# -------------------------------------------------------------------- what leaves the box


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_secrets_are_known_by_their_look(secret: str):
    shown = redact_text(f"before {secret} after")
    assert not any(word in shown for word in WORDS)
    assert shown.startswith("before ")
    assert shown.endswith(" after")


def test_secrets_and_texts_are_known_by_their_name():
    data = {
        "api_key": "plain",
        "x-api-key": "plain",
        "messages": [{"role": "user", "content": "secret words"}],
        "prompt": "secret words",
        "system": "secret words",
        "prompt_tokens": 3,
        "token_budget": 512,
        "name": "kept",
        "tokens": [1, 2],
    }
    shown = redact(data)
    assert "secret words" not in str(shown)
    assert "plain" not in str(shown)
    assert shown["name"] == "kept"
    assert (shown["prompt_tokens"], shown["token_budget"], shown["tokens"]) == (3, 512, [1, 2])
    assert shown["api_key"] == GONE


def test_a_bundle_holds_no_secret_and_no_prompt(call: Call, tmp_path: Path):
    state = tmp_path / "data" / "state"
    state.mkdir(parents=True)
    lines = [json.dumps({"message": each}) + "\n" for each in SECRETS.values()]
    (state / "daemon.log").write_text("".join(lines))
    (tmp_path / "data" / "config.toml").write_text('[server]\nallowed_hosts = ["box.lan"]\n')
    status = {"begun_with": {"flags": {}}, "last": {"prompt": "secret words"}, "url": SECRETS["link"]}
    client = FakeClient(
        {"/admin/api/status": status, "/admin/api/stats": {}, "/admin/api/downloads": {"downloads": []}}
    )
    file = tmp_path / "bundle.zip"
    done = call(
        "doctor",
        "--bundle",
        file,
        client=client,
        HF_TOKEN=SECRETS["hub token"],
        HTTPS_PROXY=SECRETS["proxy"],
        LLMBOX_API_KEY=SECRETS["key"],
    )
    assert done.code in {0, Exit.DOCTOR}
    assert file.stat().st_mode & 0o077 == 0
    with zipfile.ZipFile(file) as bundle:
        parts = {name: bundle.read(name).decode() for name in bundle.namelist()}
    everything = "\n".join(parts.values())
    assert not [word for word in (*WORDS, "secret words") if word in everything]
    assert "box.lan" in parts["settings.json"]
    assert json.loads(parts["environment.json"])["HF_TOKEN"] == GONE
    assert {"findings.json", "versions.json", "machine.json", "daemon.log"} <= set(parts)
    assert call("doctor", "--bundle", file).code == Exit.CONFLICT


# -------------------------------------------------------------------- llmbox uninstall


@pytest.fixture
def lived_in(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    for name in ("state/daemon.log", "cache/kernels/x.so", "run/llmbox.lock", "keys.json", "config.toml"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text("")
    (data / "thesis.txt").write_text("not ours")
    model = tmp_path / "hf" / "hub" / "models--org--name" / "refs"
    model.mkdir(parents=True)
    return data


def test_uninstall_asks_and_without_a_terminal_needs_yes(call: Call, lived_in: Path):
    done = call("uninstall")
    assert done.code == Exit.USAGE
    assert "--yes" in done.err
    assert str(lived_in / "keys.json") in done.err
    assert (lived_in / "keys.json").exists()


def test_uninstall_takes_ours_and_leaves_models_and_other_files(call: Call, lived_in: Path, tmp_path: Path):
    done = call("uninstall", "--yes", "--json")
    assert done.code == 0
    assert json.loads(done.out)["schema"] == "llmbox.uninstall/1"
    assert [path.name for path in lived_in.iterdir()] == ["thesis.txt"]
    assert (tmp_path / "hf" / "hub" / "models--org--name").is_dir()
    assert call("uninstall", "--yes").err.startswith("No files of llmbox")


def test_the_service_of_other_files_stays(call: Call, lived_in: Path, home: Path):
    unit = home / ".config" / "systemd" / "user" / "llmbox.service"
    unit.parent.mkdir(parents=True)
    for words, goes in (("", False), (f" --data-dir {lived_in}2", False), (f" --data-dir {lived_in}", True)):
        (lived_in / "keys.json").write_text("")
        unit.write_text(f"[Service]\nExecStart=python -P -m llmbox{words} serve\n")
        assert call("uninstall", "--yes").code == 0
        assert unit.exists() is not goes


def test_uninstall_with_models(call: Call, lived_in: Path, tmp_path: Path):
    assert call("uninstall", "--yes", "--models").code == 0
    assert not (tmp_path / "hf" / "hub" / "models--org--name").exists()
