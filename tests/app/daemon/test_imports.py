"""The collector rests while a daemon and its engines import, and works afterwards."""

import gc
from types import SimpleNamespace

import pytest

from llmbox.app.daemon import run
from llmbox.engine import process
from llmbox.engine.channel import DaemonGone


@pytest.fixture
def collecting():
    assert gc.isenabled()
    yield
    gc.unfreeze()
    gc.enable()


class Created(Exception):  # noqa: N818
    pass


def test_a_daemon_begins_without(collecting):
    def create():
        raise Created

    with pytest.raises(Created):
        run.run_daemon(SimpleNamespace(paths=SimpleNamespace(create=create)))
    assert not gc.isenabled()


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
