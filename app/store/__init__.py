"""Request log in SQLite behind one writer thread. Serving never waits for it."""

from .record import RecordFilter, RequestRecord
from .trimming import Retention
from .writer import RequestLog

__all__ = ["RecordFilter", "RequestLog", "RequestRecord", "Retention"]
