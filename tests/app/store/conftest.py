import pytest

from llmbox.app.store.writer import RequestLog


@pytest.fixture
def log(tmp_path):
    log = RequestLog(tmp_path / "requests.db")
    log.start()
    yield log
    log.close()
