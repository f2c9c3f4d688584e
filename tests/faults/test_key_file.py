"""A disk that fills up, or a crash, while keys or settings are written: the old or the new, never half."""

import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmbox.app.config.loader import read_file, remove_value, set_value
from llmbox.app.config.settings import schema
from llmbox.app.errors import CliError
from llmbox.app.security.key_store import KeyStore
from llmbox.app.security.keys import KeySpec
from support.full_disk import STEPS, fail_at


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "keys.json"


@pytest.fixture
def store(file: Path) -> KeyStore:
    return KeyStore(file)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("change", ["add", "rotate", "remove"])
def test_a_full_disk_leaves_the_old_keys(
    store: KeyStore, file: Path, monkeypatch: pytest.MonkeyPatch, step: str, change: str
) -> None:
    _, secret = store.add(KeySpec(name="laptop"))
    before = file.read_bytes()
    with monkeypatch.context() as patch:
        fail_at(patch, step)
        with pytest.raises(CliError, match="cannot write") as caught:
            {
                "add": lambda: store.add(KeySpec(name="other")),
                "rotate": lambda: store.rotate("laptop"),
                "remove": lambda: store.remove("laptop"),
            }[change]()
    assert "No space left" in caught.value.why
    assert file.read_bytes() == before
    assert not file.with_suffix(".new").exists()
    for reader in (store, KeyStore(file)):
        assert [key.name for key in reader.list()] == ["laptop"]
        assert reader.authenticate(secret) is not None
    store.add(KeySpec(name="other"))  # space again: no restart needed
    assert len(KeyStore(file).list()) == 2


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("change", ["set", "remove"])
def test_a_full_disk_leaves_the_old_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, change: str
) -> None:
    file, port = tmp_path / "config" / "config.toml", schema()["server.port"]
    set_value(file, port, 1234)
    before = file.read_bytes()
    changes = {"set": lambda: set_value(file, port, 99), "remove": lambda: remove_value(file, port)}
    with monkeypatch.context() as patch:
        fail_at(patch, step)
        with pytest.raises(CliError, match="cannot write") as caught:
            changes[change]()
    assert "No space left" in caught.value.why
    assert file.read_bytes() == before
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    changes[change]()
    (value, _) = read_file(file).get("server.port", (None, 0))
    assert value == (99 if change == "set" else None)


def test_what_a_crash_left_behind_is_no_obstacle(store: KeyStore, file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.with_suffix(".new").write_text("half a ta")
    file.with_suffix(".new").chmod(0o666)
    store.add(KeySpec(name="laptop"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert KeyStore(file).list()[0].name == "laptop"


WRITER = """
import sys
from pathlib import Path
from llmbox.app.security.key_store import KeyStore
from llmbox.app.security.keys import KeySpec
store = KeyStore(Path(sys.argv[1]))
print("begins", flush=True)
for count in range(9000):
    store.add(KeySpec(name=f"{sys.argv[2]}-{count}"))
"""


def test_a_kill_at_any_moment_leaves_old_or_new(store: KeyStore, file: Path) -> None:
    store.add(KeySpec(name="first"))
    for run, delay in enumerate((0.002, 0.005, 0.011, 0.023)):
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", WRITER, str(file), f"run{run}"], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(delay)
        child.kill()
        child.communicate()
        fresh = KeyStore(file)
        fresh.check()
        assert fresh.get("first")
    fresh.add(KeySpec(name="last"))  # the lock went with its holder
