"""The request log: what happened, kept in SQLite behind one writer thread. Serving never waits on it."""

from .record import RecordFilter, RequestRecord
from .request_log import RequestLog
from .trimming import Retention

__all__ = ["RecordFilter", "RequestLog", "RequestRecord", "Retention"]
