"""Raised to whoever asks something of the log. Those who are served never see it."""


class StoreError(Exception):
    """The request log cannot be used now, with the reason; serving goes on without it."""


def first_line(error: Exception) -> str:
    """What follows in SQLAlchemy's errors is the statement."""
    return (str(error).splitlines() or [type(error).__name__])[0]
