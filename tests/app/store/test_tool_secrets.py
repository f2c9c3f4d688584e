"""Secrets of MCP servers: a file of their own, and names alone in the database."""

import stat
from types import SimpleNamespace

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.http.admin.keys import erase_stored_of_gone_keys
from llmbox.app.store import RequestLog
from llmbox.app.store.conversations import (
    ChatToolServer,
    PanelItems,
    ToolServerSecrets,
    has_values,
    without_values,
)

WEB = ChatToolServer(url="https://tools.test/mcp", headers={"Authorization": "Bearer s3cret"}, allowed=True)
PROGRAM = ChatToolServer(command=["/bin/tool"], environment={"TOKEN": "t0ken", "EMPTY": ""})


@pytest.fixture
def secrets(tmp_path) -> ToolServerSecrets:
    return ToolServerSecrets(tmp_path / "mcp-secrets.json")


def test_secrets_are_apart_from_the_entry_and_come_back_with_it(secrets):
    for name, spec in (("web", WEB), ("program", PROGRAM)):
        secrets.save("anna", name, spec)
        entry = without_values(spec)
        assert (has_values(spec), has_values(entry)) == (True, False)
        assert "s3cret" not in repr(entry)
        assert "t0ken" not in repr(entry)
        assert secrets.filled("anna", name, entry) == spec
    assert stat.S_IMODE(secrets.file.stat().st_mode) == 0o600


def test_a_server_without_secrets_leaves_no_file(secrets):
    bare = ChatToolServer(url="https://tools.test/mcp")
    secrets.save("anna", "bare", bare)
    assert not secrets.file.exists()
    assert secrets.filled("anna", "bare", bare) == bare


def test_a_lost_secret_is_named_and_one_of_another_owner_is_none(secrets):
    secrets.save("anna", "web", WEB)
    with pytest.raises(ApiError) as lost:
        secrets.filled("bert", "web", without_values(WEB))
    assert (lost.value.status, lost.value.code) == (409, "mcp_secret_missing")
    assert "Authorization" in lost.value.message
    assert "s3cret" not in lost.value.message


def test_secrets_go_with_their_server_and_with_their_key(secrets):
    for owner in ("", "anna", "bert"):
        secrets.save(owner, "web", WEB)
    secrets.remove("anna", "web")
    secrets.remove("anna", "never")
    secrets.keep_owners(frozenset({"anna"}))
    assert secrets.filled("", "web", without_values(WEB)) == WEB  # the box's own user
    assert b"bert" not in secrets.file.read_bytes()
    secrets.remove("", "web")
    assert not secrets.file.exists()


def test_a_damaged_file_is_told_and_not_replaced(secrets):
    secrets.file.write_bytes(b"{")
    for use in (lambda: secrets.save("", "web", WEB), lambda: secrets.filled("", "web", WEB)):
        with pytest.raises(ApiError, match="move it away"):
            use()
    assert secrets.file.read_bytes() == b"{"


async def test_a_damaged_file_keeps_nothing_else_of_a_gone_key(secrets):
    erased = []

    async def erase(known):
        erased.append(known)
        return 1

    secrets.file.write_bytes(b"{")
    services = SimpleNamespace(
        security=SimpleNamespace(keys=SimpleNamespace(ids=lambda: frozenset({"anna"}))),
        paths=SimpleNamespace(mcp_secrets_file=secrets.file),
        stored=SimpleNamespace(erase_owners_but=erase),
    )
    with pytest.raises(ApiError, match="damaged"):
        await erase_stored_of_gone_keys(services)
    assert erased == [frozenset({"anna"})]


async def test_what_an_older_version_left_in_the_database_is_moved_at_the_start(secrets, tmp_path, caplog):
    log = RequestLog(tmp_path / "requests.db")
    log.start()
    items = PanelItems(log, ChatToolServer)
    for owner, name, spec in (
        ("", "web", WEB),
        ("anna", "program", PROGRAM),
        ("anna", "moved", without_values(WEB)),
    ):
        await items.put(owner, name, spec)
    secrets.file.write_bytes(b"{")
    secrets.take_from(log)
    ((_, kept),) = (await items.all("")).items()
    assert kept.headers == WEB.headers, "it is kept where it can be read"
    assert "is damaged" in caplog.text
    secrets.file.unlink()
    secrets.take_from(log)
    ((_, kept),) = (await items.all("")).items()
    assert kept.headers == {"Authorization": ""}
    assert secrets.filled("", "web", without_values(WEB)) == WEB
    assert secrets.filled("anna", "program", without_values(PROGRAM)) == PROGRAM
    log.close()
    assert not [file for file in tmp_path.glob("requests.db*") if b"s3cret" in file.read_bytes()]
