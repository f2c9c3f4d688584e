"""SQL of the annotations beside the telemetry history."""

from sqlalchemy import Engine, delete
from sqlmodel import Session, col, select

from ..tables import MarkRow


def add(engine: Engine, time: float, kind: str, model: str, text: str, oldest: float) -> None:
    """Write one row and drop rows older than `oldest` (Unix seconds), in one transaction."""
    with Session(engine) as session:
        session.add(MarkRow(time=time, kind=kind, model=model, text=text))
        session.exec(delete(MarkRow).where(col(MarkRow.time) < oldest))
        session.commit()


def find(engine: Engine, since: float, most: int) -> list[tuple[float, str, str, str]]:
    """Return (time, kind, model, text), newest first."""
    statement = (
        select(MarkRow.time, MarkRow.kind, MarkRow.model, MarkRow.text)
        .where(MarkRow.time >= since)
        .order_by(col(MarkRow.time).desc(), col(MarkRow.seq).desc())
        .limit(most)
    )
    with Session(engine) as session:
        return [(time, kind, model, text) for time, kind, model, text in session.exec(statement)]
