"""Every released schema, empty and with rows, becomes today's."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text
from sqlmodel import SQLModel

import llmbox.app.store.database
import llmbox.migrations
from llmbox.app.store.database import open_database, upgrade
from llmbox.app.store.database_file import newest_schema

RELEASED = ["001", "002", "003", "004", "005", "006", "007"]


def columns(engine):
    return {
        (table, column["name"], str(column["type"]), column["nullable"])
        for table in inspect(engine).get_table_names()
        if table != "alembic_version"
        for column in inspect(engine).get_columns(table)
    }


def test_migrations_make_the_tables_that_the_code_declares(tmp_path):
    declared = create_engine("sqlite://")
    SQLModel.metadata.create_all(declared)
    assert columns(open_database(tmp_path / "a.db")) == columns(declared)


def test_the_newest_schema_is_known_without_alembic():
    folder = Path(llmbox.migrations.__file__).parent
    assert newest_schema() == ScriptDirectory(str(folder)).get_current_head()


@pytest.mark.process
def test_a_file_of_this_schema_is_opened_without_alembic(tmp_path):
    opening = (
        "import sys; from pathlib import Path; from llmbox.app.store.database import open_database;"
        "open_database(Path(sys.argv[1])); print('alembic' in sys.modules)"
    )
    command = [sys.executable, "-P", "-c", opening, str(tmp_path / "a.db")]
    told = [subprocess.run(command, capture_output=True, text=True, timeout=60).stdout for _ in range(2)]
    assert told == ["True\n", "False\n"]


@pytest.mark.parametrize("revision", RELEASED)
def test_upgrade_keeps_rows(tmp_path, revision):
    path = tmp_path / "a.db"
    engine = create_engine(f"sqlite:///{path}")
    upgrade(engine, revision)
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO request (id, created, model, endpoint, http_status, key, stream, finish_reasons,"
                " error_code, prompt_tokens, cached_tokens, output_tokens, n, resumes, params, client)"
                " VALUES ('r', 1, 'm', 'chat', 200, '', 0, 'stop', '', 1, 0, 1, 1, 0, '{}', '')"
            )
        )
    engine.dispose()
    with open_database(path).connect() as connection:
        assert connection.execute(text("SELECT id FROM request")).all() == [("r",)]


def test_files_are_migrated_in_several_threads_at_once(tmp_path):
    """As where one daemon of a process opens its log while another still opens its own."""
    paths = [tmp_path / f"{name}.db" for name in "abcd"]
    with ThreadPoolExecutor(len(paths)) as pool:
        first, *others = [columns(engine) for engine in pool.map(open_database, paths)]
    assert first
    assert others == [first] * len(others)


def test_a_migration_that_fails_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.db"
    monkeypatch.setattr("alembic.op.create_index", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        open_database(path)
    monkeypatch.undo()
    assert ("request", "id", "VARCHAR", False) in columns(open_database(path))
