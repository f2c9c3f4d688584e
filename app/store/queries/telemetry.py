"""SQL of the telemetry history and its annotations."""

from collections.abc import Mapping, Sequence

from sqlalchemy import Engine, delete
from sqlalchemy.dialects.sqlite import insert
from sqlmodel import Session, col, select

from ..tables import MarkRow, TelemetryRow

Row = tuple[int, int, str]
"""(step, time, JSON of the series)."""


def add_telemetry(engine: Engine, rows: Sequence[Row], keep: Mapping[int, int], now: int) -> None:
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


def find_telemetry(engine: Engine, step: int, since: int) -> list[tuple[int, str]]:
    """Return (time, JSON of the series), oldest first."""
    statement = (
        select(TelemetryRow.time, TelemetryRow.series)
        .where(TelemetryRow.step == step, col(TelemetryRow.time) >= since)
        .order_by(col(TelemetryRow.time))
    )
    with Session(engine) as session:
        return [(time, series) for time, series in session.exec(statement)]


def add_annotation(engine: Engine, time: float, kind: str, model: str, text: str, oldest: float) -> None:
    """Write one row and drop rows older than `oldest` (Unix seconds), in one transaction."""
    with Session(engine) as session:
        session.add(MarkRow(time=time, kind=kind, model=model, text=text))
        session.exec(delete(MarkRow).where(col(MarkRow.time) < oldest))
        session.commit()


def find_annotations(engine: Engine, since: float, most: int) -> list[tuple[float, str, str, str]]:
    """Return (time, kind, model, text), newest first."""
    statement = (
        select(MarkRow.time, MarkRow.kind, MarkRow.model, MarkRow.text)
        .where(MarkRow.time >= since)
        .order_by(col(MarkRow.time).desc(), col(MarkRow.seq).desc())
        .limit(most)
    )
    with Session(engine) as session:
        return [(time, kind, model, text) for time, kind, model, text in session.exec(statement)]
