"""Data in the pictures of the panel's pages: written through the store's own functions."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from llmbox.app.lifecycle.program import Program
from llmbox.app.store.database import open_database

PACKAGING = Path(__file__).parents[2] / "packaging"


def load_pictures():
    spec = importlib.util.spec_from_file_location("panel_pictures", PACKAGING / "panel_pictures.py")
    module = sys.modules["panel_pictures"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_week_of_requests_and_telemetry_is_seeded(tmp_path):
    load_pictures().seed(tmp_path, time.time())
    database = open_database(Program(data_dir=tmp_path).paths.request_db)
    with database.connect() as connection:
        rows, statuses = connection.execute(
            text("select count(*), count(distinct http_status) from request")
        ).one()
        points = connection.execute(text("select count(*) from telemetry")).scalar_one()
    database.dispose()
    assert rows == 1500
    assert statuses > 2
    assert points > 1000
