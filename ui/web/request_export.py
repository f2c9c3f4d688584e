"""The request log as a file: the rows that the page's filters show, newest first."""

import csv
import io
import json
from dataclasses import asdict, fields

from litestar import Response, get
from litestar.params import FromQuery

from llmbox.app.store.record import RequestRecord

from .render import PanelRequest, panel_of
from .requests import Filter, filter_of

MOST_ROWS = 10_000


@get("/requests.csv", name="panel_requests_csv")
async def export_csv(
    request: PanelRequest,
    model: FromQuery[str] = "",
    key: FromQuery[str] = "",
    status: FromQuery[str] = "",
    since: FromQuery[str] = "",
    before: FromQuery[str] = "",
) -> Response[str]:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(RequestRecord)])
    writer.writeheader()
    for record in await _records(request, filter_of(model, key, status, since, before)):
        writer.writerow({name: _plain(value) for name, value in asdict(record).items()})
    return _file(text.getvalue(), "csv", "text/csv")


@get("/requests.json", name="panel_requests_json")
async def export_json(
    request: PanelRequest,
    model: FromQuery[str] = "",
    key: FromQuery[str] = "",
    status: FromQuery[str] = "",
    since: FromQuery[str] = "",
    before: FromQuery[str] = "",
) -> Response[str]:
    records = await _records(request, filter_of(model, key, status, since, before))
    rows = [asdict(record) for record in records]
    return _file(json.dumps({"schema": "llmbox.requests/1", "requests": rows}), "json", "application/json")


async def _records(request: PanelRequest, chosen: Filter) -> list[RequestRecord]:
    wanted = chosen.wanted(MOST_ROWS)
    return [record for _, record in await panel_of(request).services.request_log.query(wanted)]


def _plain(value: object) -> object:
    """Spreadsheets run what begins like a formula; names and ids come from clients."""
    return f"'{value}" if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t"} else value


def _file(text: str, ending: str, media_type: str) -> Response[str]:
    disposition = f'attachment; filename="llmbox-requests.{ending}"'
    return Response(text, media_type=media_type, headers={"Content-Disposition": disposition})
