"""The collector rests while a daemon and its engines import, and works afterwards."""

import gc

import pytest

from llmbox.app.daemon import run
from llmbox.app.daemon import serve as serving
from llmbox.engine.ipc.channel import DaemonGone
from llmbox.engine.process import engine_main as process


@pytest.fixture
def collecting():
    assert gc.isenabled()
    yield
    gc.unfreeze()
    gc.enable()


def test_a_daemon_serves_with_it(collecting, monkeypatch):
    async def look(*_):
        seen.append((gc.isenabled(), gc.get_freeze_count() > 1000))

    seen = []
    monkeypatch.setattr(serving, "serve_until_stopped", look)
    gc.disable()
    run._serve(None, None, [], None, None)
    assert seen == [(True, True)]


def test_an_engine_waits_for_its_model_with_it(collecting):
    class Gone:
        def receive(self, *, block):
            assert gc.isenabled()
            assert gc.get_freeze_count() > 1000
            raise DaemonGone

    gc.disable()
    with pytest.raises(DaemonGone):
        process._run(Gone(), None)
    assert gc.isenabled()
