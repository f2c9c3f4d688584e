"""Errors of the request log. Only its readers see them; serving goes on without it."""


class StoreError(Exception):
    """The request log cannot be used now; the message says why."""


def first_line(error: Exception) -> str:
    """First line of an error. The rest of SQLAlchemy's errors is the statement."""
    return (str(error).splitlines() or [type(error).__name__])[0]
