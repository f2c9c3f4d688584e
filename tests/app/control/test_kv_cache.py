"""KV cache on disk as the daemon starts with it."""

import errno
import os

import pytest

from llmbox.app.config.model_settings import CacheSettings
from llmbox.app.config.paths import find_paths
from llmbox.app.control.kv_cache import claim_kv_cache
from llmbox.engine.kv_store import folder, usage
from llmbox.engine.kv_store.usage import UsageFile


def test_a_disk_that_tells_nothing_keeps_no_daemon_from_starting(monkeypatch, tmp_path, caplog):
    def fail(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(usage, "default_bytes", fail)
    with claim_kv_cache(find_paths(tmp_path), CacheSettings()) as variables:
        assert variables == {}
    assert "Stale file handle" in caplog.text


def newer(root, _):
    (root / "format").write_text("99\n")


def on_a_network_disk(_, patch):
    patch.setattr(folder, "filesystem_of", lambda _: "nfs4")


def read_only(_, patch):
    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    patch.setattr(UsageFile, "locked", refuse)


def of_another_daemon(root, patch):
    other = folder.KVFolder(root, 1)
    other.open()
    other.claim()  # held until this process ends


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (newer, "of a newer llmbox (format 99, this one knows 1): upgrade, or remove it"),
        (on_a_network_disk, "on a network disk (nfs4): use a --data-dir on a local one"),
        (read_only, "(Read-only file system): use a --data-dir on a disk that can be written"),
        (of_another_daemon, "another daemon uses"),
    ],
)
def test_a_folder_that_cannot_be_used_is_left_out_in_a_clear_word(make, told, monkeypatch, tmp_path, caplog):
    paths = find_paths(tmp_path)
    paths.kv_cache.mkdir(mode=0o700, parents=True)
    make(paths.kv_cache, monkeypatch)
    before = sorted(path.name for path in paths.kv_cache.iterdir())
    with claim_kv_cache(paths, CacheSettings()) as variables:
        assert variables == {}
    assert told in caplog.text
    left = {path.name for path in paths.kv_cache.iterdir()}
    assert left - {"usage"} <= set(before), "nothing is made there"
