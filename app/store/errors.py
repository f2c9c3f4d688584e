"""Raised to whoever asks something of the log. Those who are served never see it."""


class StoreError(Exception):
    """The request log cannot be used now, with the reason; serving goes on without it."""
