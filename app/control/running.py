"""Who a running daemon is: what its pid file says of it."""

from dataclasses import dataclass

_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - names that nobody connects to


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What the pid file says of a daemon. `started_at` is Unix time."""

    pid: int
    host: str
    port: int
    socket: str
    started_at: float
    version: str

    @property
    def url(self) -> str:
        host = _REACHED_AT.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}"
