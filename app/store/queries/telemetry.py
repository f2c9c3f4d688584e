"""SQL of the telemetry history."""

from collections.abc import Mapping, Sequence

from sqlalchemy import Engine, delete
from sqlalchemy.dialects.sqlite import insert
from sqlmodel import Session, col, select

from ..tables import TelemetryRow

Row = tuple[int, int, str]
"""(step, time, JSON of the series)."""


def add(engine: Engine, rows: Sequence[Row], keep: Mapping[int, int], now: int) -> None:
    """Write the rows and drop those older than `keep` seconds (by step), in one transaction."""
    values = [{"step": step, "time": time, "series": series} for step, time, series in rows]
    statement = insert(TelemetryRow)
    with engine.begin() as connection:
        # After the clock was set back the same second is written twice: the newer row counts.
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["step", "time"], set_={"series": statement.excluded.series}
            ),
            values,
        )
        for step, seconds in keep.items():
            connection.execute(
                delete(TelemetryRow).where(
                    col(TelemetryRow.step) == step, col(TelemetryRow.time) < now - seconds
                )
            )


def find(engine: Engine, step: int, since: int) -> list[tuple[int, str]]:
    """Return (time, JSON of the series), oldest first."""
    statement = (
        select(TelemetryRow.time, TelemetryRow.series)
        .where(TelemetryRow.step == step, col(TelemetryRow.time) >= since)
        .order_by(col(TelemetryRow.time))
    )
    with Session(engine) as session:
        return [(time, series) for time, series in session.exec(statement)]
