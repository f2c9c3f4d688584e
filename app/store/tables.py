"""Tables of the request log. A change here needs a migration in `migrations/versions`."""

from sqlmodel import Field, SQLModel


class RequestRow(SQLModel, table=True):
    """`RequestRecord` with a growing number, which gives a stable order and pages."""

    __tablename__ = "request"

    seq: int | None = Field(default=None, primary_key=True)
    id: str = Field(index=True)
    created: float = Field(index=True)
    model: str
    endpoint: str
    http_status: int
    key: str
    stream: bool
    finish_reasons: str
    error_code: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    n: int
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    resumes: int
    seed: int | None = None
    params: str
    client: str


class TelemetryRow(SQLModel, table=True):
    """Means over the `step` seconds from `time` (Unix) on. `series` is a JSON object, name to number."""

    __tablename__ = "telemetry"

    step: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    time: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    series: str
