"""Keys on disk: what is kept, what is compared, what survives."""

import hashlib
import hmac
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.app.errors import CliError, Exit
from llmbox.app.security.key_store import KeyStore, LastUsed
from llmbox.app.security.keys import PREFIX, KeySpec
from support.lanes import examples


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "keys.json"


@pytest.fixture
def store(file: Path) -> KeyStore:
    return KeyStore(file)


def test_a_secret_has_256_bits_and_is_kept_as_a_hash_only(store: KeyStore, file: Path) -> None:
    key, secret = store.add(KeySpec(name="laptop"))
    assert secret.startswith(PREFIX)
    assert len(secret) == len(PREFIX) + 43  # base64 of 32 bytes
    assert key.digest == hashlib.sha256(secret.encode()).hexdigest()
    assert secret.startswith(key.display.rstrip("…"))
    assert len(key.display) < 20
    assert secret not in file.read_text()
    assert secret.removeprefix(PREFIX) not in file.read_text()


def test_the_file_is_ours_alone(store: KeyStore, file: Path) -> None:
    before = os.umask(0)
    try:
        store.add(KeySpec(name="laptop"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert sorted(path.name for path in file.parent.iterdir()) == ["keys.json", "keys.lock"]


def test_life_of_a_key(store: KeyStore) -> None:
    key, secret = store.add(KeySpec(name="laptop", rpm=5))
    assert store.authenticate(secret) == key
    changed, fresh = store.rotate("laptop")
    assert (changed.id, changed.rpm, changed.created) == (key.id, 5, key.created)
    assert store.authenticate(secret) is None
    assert store.authenticate(fresh) == changed
    assert store.remove("laptop") == changed
    assert store.authenticate(fresh) is None
    assert store.list() == ()


def test_names_are_unique_and_must_exist(store: KeyStore) -> None:
    store.add(KeySpec(name="laptop"))
    with pytest.raises(CliError) as caught:
        store.add(KeySpec(name="laptop"))
    assert caught.value.exit == Exit.CONFLICT
    for change in (store.remove, store.rotate, store.get):
        with pytest.raises(CliError) as caught:
            change("other")
        assert caught.value.exit == Exit.NOT_FOUND


def test_an_expired_key_opens_nothing(store: KeyStore) -> None:
    _, secret = store.add(KeySpec(name="old", expires=1.0))
    assert store.authenticate(secret) is None
    assert store.usable() == 0
    assert len(store.list()) == 1


@pytest.mark.parametrize("wanted", ["first", "last", "none"])
def test_every_key_is_compared_in_constant_time(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    made = [store.add(KeySpec(name=f"k{i}"))[1] for i in range(5)]
    compared: list[str] = []

    def compare(one: Any, other: Any) -> bool:
        compared.append(one)
        return real(one, other)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    secret = {"first": made[0], "last": made[-1], "none": PREFIX + "x" * 43}[wanted]
    assert (store.authenticate(secret) is None) == (wanted == "none")
    assert compared == [key.digest for key in store.list()]


def test_another_process_changes_the_keys(file: Path) -> None:
    daemon, command_line = KeyStore(file), KeyStore(file)
    assert daemon.list() == ()
    _, secret = command_line.add(KeySpec(name="laptop"))
    assert daemon.authenticate(secret) is not None
    command_line.remove("laptop")
    assert daemon.authenticate(secret) is None


def test_two_writers_lose_nothing(file: Path) -> None:
    def write(writer: int) -> None:
        store = KeyStore(file)
        for i in range(5):
            store.add(KeySpec(name=f"w{writer}-{i}"))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(KeyStore(file).list()) == 20


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"schema": 2, "keys": []}', b'{"schema": 1, "keys": [{}]}', b"\xff\xfe", b"null"],
)
def test_a_broken_file_is_said_at_the_start_and_changes_nothing_later(file: Path, content: bytes) -> None:
    store = KeyStore(file)
    _, secret = store.add(KeySpec(name="laptop"))
    file.write_bytes(content)
    with pytest.raises(CliError, match="cannot be read"):
        KeyStore(file).check()
    assert store.authenticate(secret) is not None, "a running daemon goes on with what it knew"
    assert store.authenticate(PREFIX + "x" * 43) is None
    with pytest.raises(CliError):
        store.add(KeySpec(name="other"))
    assert file.read_bytes() == content, "what somebody may want to mend is not overwritten"


def test_no_file_means_no_keys(store: KeyStore, file: Path) -> None:
    _, secret = store.add(KeySpec(name="laptop"))
    file.unlink()
    assert store.authenticate(secret) is None


@given(st.binary(max_size=200))
@settings(max_examples=examples(60))
def test_any_bytes_in_the_file_are_keys_or_an_error(tmp_path_factory: Any, content: bytes) -> None:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_bytes(content)
    with pytest.raises(CliError):
        KeyStore(file).check()


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"name": "-x"},
        {"name": "a b"},
        {"name": "a/b"},
        {"name": "x" * 65},
        {"name": "(panel)"},
        {"name": "a\n"},
        {"name": "a", "scopes": []},
        {"name": "a", "scopes": ["root"]},
        {"name": "a", "models": [""]},
        {"name": "a", "models": ["x" * 201]},
        {"name": "a", "models": ["a\x1b"]},
        {"name": "a", "models": ["a\n"]},
        {"name": "a", "rpm": 0},
        {"name": "a", "tpm": -1},
        {"name": "a", "rpm": 2**40},
        {"name": "a", "priority": 101},
        {"name": "a", "expires": 0},
        {"name": "a", "digest": "00"},
        {"name": "a", "id": "key_1"},
    ],
)
def test_bad_keys_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(fields), type=KeySpec)


def test_models_by_name_and_glob(store: KeyStore) -> None:
    key, _ = store.add(KeySpec(name="laptop", models=("qwen*", "org/exact")))
    assert all(map(key.allows_model, ["qwen", "qwen3/x", "org/exact"]))
    assert not any(map(key.allows_model, ["Qwen", "org/exactly", "", "xqwen"]))
    assert store.add(KeySpec(name="any"))[0].allows_model("whatever")


def test_admin_includes_the_other_scopes(store: KeyStore) -> None:
    admin, _ = store.add(KeySpec(name="admin", scopes=("admin",)))
    infer, _ = store.add(KeySpec(name="infer"))
    assert [admin.allows(scope) for scope in ("infer", "read", "admin")] == [True, True, True]
    assert [infer.allows(scope) for scope in ("infer", "read", "admin")] == [True, False, False]


def test_last_used_is_kept_apart_and_may_be_lost(tmp_path: Path) -> None:
    file = tmp_path / "keys-used.json"
    used = LastUsed(file)
    used.note("key_1")
    used.close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert LastUsed(file).of("key_1") == used.of("key_1")
    file.write_bytes(b"\xff{")
    assert LastUsed(file).of("key_1") is None
    LastUsed(tmp_path / "gone" / "keys-used.json").write()  # a warning, no more
