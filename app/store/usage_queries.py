"""The SQL of what each key used."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, text

_BY_KEY = text(
    "SELECT key, count(*), sum(error_code != ''), sum(prompt_tokens), sum(output_tokens),"
    " min(created), max(created) FROM request GROUP BY key"
)


def by_key(engine: Engine) -> Sequence[Any]:
    """(key, requests, errors, prompt tokens, output tokens, oldest, newest). Reads the whole table."""
    with engine.connect() as connection:
        return connection.execute(_BY_KEY).all()
