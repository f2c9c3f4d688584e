import socket
from pathlib import Path

import pytest

from llmbox.app.daemon.serve import format_status, notify
from llmbox.app.engines.loaded_model import ModelReadiness, Readiness


def test_the_service_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        notify("READY=1")
        assert receiver.recv(100) == b"READY=1"


def test_nobody_listening_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "absent"))
    notify("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")


def test_the_status_line_names_each_model_that_does_not_answer():
    url = "http://127.0.0.1:7411"
    good = ModelReadiness("good", "ready", "")
    bad = ModelReadiness("bad", "failed", "the engine died\n5 times; it is started again in 30 s")
    assert format_status(url, Readiness(ready=True, cause="", models=[good]), 0.0) == f"Serving on {url}"
    text = format_status(url, Readiness(ready=True, cause="x", models=[good, bad]), 0.0)
    assert text.startswith(f"Serving on {url}; bad failed (")
    assert text.endswith("): the engine died 5 times; it is started again in 30 s")
