"""KV cache on disk as the daemon starts with it."""

import errno

from llmbox.app.config.model_settings import CacheSettings
from llmbox.app.config.paths import find_paths
from llmbox.app.control.kv_cache import claim_kv_cache
from llmbox.engine.kv_store import environment


def test_a_disk_that_tells_nothing_keeps_no_daemon_from_starting(monkeypatch, tmp_path, caplog):
    def fail(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(environment, "default_bytes", fail)
    with claim_kv_cache(find_paths(tmp_path), CacheSettings()) as variables:
        assert variables == {}
    assert "Stale file handle" in caplog.text
