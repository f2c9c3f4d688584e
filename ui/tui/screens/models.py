"""Screen 3: models in memory, being downloaded and on disk, in one list."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.widget import Widget

from llmbox.app.telemetry.snapshot import FAILING, ErrorRate

from ..messages import DashboardState, FetchData, PromptUser, RunAction, count_requests
from ..rendering import DASH, Glyphs, Line, clean, count, duration, fit, heading, percent, size, wrap
from ..widgets.lines import Column, FixedTable, Lines, Row
from .base import DashboardScreen

COLUMNS = (
    Column("MODEL", 0, middle=True, least=24),
    Column("STATE", 22),
    Column("DEVICE", 7, rank=4),
    Column("WEIGHTS", 8, right=True, rank=1),
    Column("KV", 8, right=True, rank=2),
    Column("CONTEXT", 9, right=True, rank=3),
    Column("REQS", 5, right=True, rank=5),
    Column("TTL", 10, right=True, rank=6),
    Column("PIN", 4, rank=7),
    Column("ON DISK", 8, right=True, rank=8),
)
NAMES = ("device", "weights", "KV cache", "context", "requests", "unloads in", "pinned", "on disk")
"""Names of the columns behind the state, where one model is described."""
FACT = 26
"""Cells of one fact."""
LEAST_ROWS = 6
"""Rows of the list that the lines about one model leave."""
TONES = {"ready": "good", "loading": "warn", "restarting": "bad", "failed": "bad"}


class ModelsScreen(DashboardScreen):
    TITLE = "Models"
    FILTERS = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "load", "Load"),
        Binding("u", "unload", "Unload"),
        Binding("P", "pin", "Pin"),
        Binding("f", "fit", "Fit"),
        Binding("p", "pull", "Pull"),
        Binding("d", "delete", "Delete"),
    ]

    def body(self) -> Iterable[Widget]:
        yield Lines(id="title", classes="line")
        yield FixedTable(COLUMNS, "")
        yield Lines(id="about")

    def wants(self) -> Iterable[FetchData]:
        yield FetchData("models", "models")
        yield FetchData("disk", "disk")
        yield FetchData("downloads", "downloads")

    def draw(self) -> None:
        # Downloads are known before the models: alone in the table, they would take the cursor.
        known = model_rows(self.state) if "models" in self.state.answers else []
        rows = [row for row in known if self.matches(*(text for text, _ in row.cells))]
        number = len(_items(self.state, "models", "models"))
        title = heading(" Models", self.size.width - 1, self.glyphs, f"{number} in memory, {len(rows)} shown")
        self.query_one("#title", Lines).show([title])
        empty = "No model is on this disk. Press p to pull one, such as Qwen/Qwen3-0.6B"
        self.query_one(FixedTable).show(
            rows, empty="Nothing matches the filter." if self.filter_text else empty
        )
        self._describe(rows)

    def _describe(self, rows: Sequence[Row]) -> None:
        """Show the model under the cursor below the list, with the columns that have no room in it."""
        row = next((each for each in rows if each.key == self._chosen), None)
        lines = about_lines(row, find_model(self.state, row.key), self.size.width, self.glyphs) if row else []
        room = self.size.height - len(lines) - (6 if self.size.height >= 32 else 5)
        about = self.query_one("#about", Lines)
        about.styles.height = len(lines) if room >= min(len(rows), LEAST_ROWS) else 0
        about.show(lines)

    @on(FixedTable.Moved)
    def _moved(self) -> None:
        self.redraw()

    # ------------------------------------------------------------------ keys

    @property
    def _chosen(self) -> str | None:
        return self.query_one(FixedTable).selected

    @on(FixedTable.Chosen)
    def _detail(self, event: FixedTable.Chosen) -> None:
        self.dashboard.show_facts(event.key, find_model(self.state, event.key))

    def action_load(self) -> None:
        if (name := self._chosen) is not None:
            found = find_model(self.state, name)
            self.post_message(
                RunAction("models/load", {"model": found.get("ref", name)}, f"{name} is being loaded.")
            )

    def action_unload(self) -> None:
        if (name := self._chosen) is None:
            return
        busy = count_requests(self.state.tick, name).in_flight
        hurt = f" {busy} requests in flight end with an error." if busy else ""
        self.post_message(
            RunAction("models/unload", {"model": name}, f"{name} is unloaded.", f"Unload {name}?{hurt}")
        )

    def action_pin(self) -> None:
        if (name := self._chosen) is not None:
            pinned = bool(find_model(self.state, name).get("pinned"))
            done = f"{name} is {'no longer ' if pinned else ''}pinned."
            self.post_message(RunAction("models/pin", {"model": name, "pinned": not pinned}, done))

    def action_fit(self) -> None:
        if (name := self._chosen) is not None:
            self.dashboard.show_fit(str(find_model(self.state, name).get("ref", name)))

    def action_pull(self) -> None:
        hint = "a Hub id, such as Qwen/Qwen3-0.6B"
        self.post_message(PromptUser("Pull a model", hint, "downloads", "model", "The download has started."))

    def action_delete(self) -> None:
        if (name := self._chosen) is None:
            return
        if find_model(self.state, name).get("state") in {"failed", "cancelled"} and not _is_known(
            self.state, name
        ):
            question = f"Dismiss the download of {name}? Its fetched files are deleted."
            self.post_message(
                RunAction(
                    "downloads/dismiss", {"model": name}, f"{name} was removed from the list.", question
                )
            )
        else:
            self.post_message(
                RunAction(
                    "models/delete",
                    {"models": [name]},
                    f"{name} is deleted.",
                    f"Delete {name} from the disk?",
                )
            )


def model_rows(state: DashboardState) -> list[Row]:
    loaded = _items(state, "models", "models")
    disk = {str(each["name"]): each for each in _items(state, "disk", "models")}
    downloads = _items(state, "downloads", "downloads")
    seen = {str(model["name"]) for model in loaded}
    rates = {each.model: each for each in state.tick.error_rates} if state.tick else {}
    rows = []
    for model in loaded:
        name = str(model["name"])
        in_flight = count_requests(state.tick, name).in_flight
        rows.append(_loaded(model, disk.get(name), rates.get(name), in_flight))
    for download in downloads:
        name = str(download.get("model") or download.get("name") or "")
        if name not in seen and str(download.get("state")) not in {"ready", "cancelled"}:
            seen.add(name)
            rows.append(_download(name, download))
    rows += [_on_disk(name, each) for name, each in disk.items() if name not in seen]
    return rows


def about_lines(row: Row, model: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[Line]:
    """Describe one model: its whole name and state, why it failed and what to do, and its other columns."""
    (name, _), (state, tone) = row.cells[:2]
    error = model.get("error") or {}
    said = f"{error['what']}: {error['why']}" if error.get("why") else state
    fix = f"To do: {error['fix']}" if error.get("fix") else ""
    lines: list[Line] = [heading(f" {name}", width - 1, glyphs)]
    for text, color in ((said, tone), (fix, "")):
        lines += [((f" {piece}", color),) for ((piece, _),) in wrap(text, width - 2)]
    facts = [
        ((f" {label:<11}", "muted"), (fit(text, FACT - 12, glyphs), ""))
        for label, (text, _) in zip(NAMES, row.cells[2:], strict=True)
        if text != DASH
    ]
    a_line = max(1, (width - 1) // FACT)
    lines += [tuple(chain.from_iterable(facts[at : at + a_line])) for at in range(0, len(facts), a_line)]
    return lines


def find_model(state: DashboardState, name: str) -> Mapping[str, Any]:
    for answer in ("models", "disk"):
        for each in _items(state, answer, "models"):
            if each["name"] == name:
                return each
    return next((each for each in _items(state, "downloads", "downloads") if each.get("model") == name), {})


def _is_known(state: DashboardState, name: str) -> bool:
    """Return whether the model is in memory or on disk, rather than only a download."""
    return any(
        each["name"] == name for answer in ("models", "disk") for each in _items(state, answer, "models")
    )


def _items(state: DashboardState, answer: str, name: str) -> list[Mapping[str, Any]]:
    return list(state.answers.get(answer, {}).get(name, []))


def _loaded(
    model: Mapping[str, Any], disk: Mapping[str, Any] | None, rate: ErrorRate | None, in_flight: int
) -> Row:
    info, progress = model.get("info") or {}, model.get("progress")
    state = str(model["state"])
    status = state
    if progress and progress["total"]:
        what = "compiling" if progress["phase"] == "kernels" else state
        status = f"{what} {100 * progress['done'] // progress['total']} %"
    if state == "failed":
        status = f"failed: {model['cause']}"
    failing = rate is not None and rate.failed > 0
    if state == "ready" and rate is not None and failing:
        status = f"ready, {percent(rate.rate)} fail"
    ttl = model.get("expires_s")
    adapters = model.get("adapters")
    shown = f"{model['name']} + {', '.join(adapters)}" if adapters else str(model["name"])
    return Row(
        str(model["name"]),
        (
            (clean(shown), "strong"),
            (clean(status), fail_tone(rate) if rate is not None and failing else TONES.get(state, "")),
            (clean(_place(info)), ""),
            (size(info["weights_bytes"]) if info else DASH, ""),
            (size(info["kv_bytes"]) if info else DASH, ""),
            (count(info.get("context_window")), ""),
            (count(in_flight), ""),
            (DASH if ttl is None else duration(ttl), "muted"),
            ("yes" if model.get("pinned") else DASH, "accent" if model.get("pinned") else "muted"),
            (size(disk["size"]) if disk else DASH, "muted"),
        ),
        (str(model["name"]), status, _place(info), info.get("weights_bytes"), info.get("kv_bytes"),
         info.get("context_window"), in_flight, ttl, bool(model.get("pinned")),
         disk["size"] if disk else None),
    )  # fmt: skip


def fail_tone(rate: ErrorRate) -> str:
    return "bad" if rate.rate >= FAILING else "warn"


def _place(info: Mapping[str, Any]) -> str:
    """Format the model's device and its number of ranks."""
    ranks = int(info.get("tp", 1)) * int(info.get("pp", 1))
    return str(info.get("device", DASH)) + (f" x{ranks}" if ranks > 1 else "")


def _download(name: str, download: Mapping[str, Any]) -> Row:
    done, total = float(download.get("done") or 0), float(download.get("total") or 0)
    share = f" {100 * done / total:.0f} %" if total else ""
    state = str(download.get("state", "downloading"))
    tone = "bad" if state == "failed" else "warn"
    if state == "failed" and (error := download.get("error")):
        state, share = f"failed: {error['what']}", ""
    cells = [(DASH, "muted")] * (len(COLUMNS) - 3)
    return Row(
        name,
        ((clean(name), ""), (f"{clean(state)}{share}", tone), *cells, (size(total) if total else DASH, "")),
        _values(name, state, total or None),
        group=1,
    )


def _on_disk(name: str, model: Mapping[str, Any]) -> Row:
    cells = [(DASH, "rule")] * (len(COLUMNS) - 3)
    status = "on disk" if model.get("servable", True) else "no safetensors"
    shown = ((clean(name), ""), (status, "muted"), *cells, (size(model["size"]), "muted"))
    return Row(name, shown, _values(name, status, model["size"]), group=2)


def _values(name: str, state: str, on_disk: float | None) -> tuple[Any, ...]:
    """Return what a model that is not in memory is sorted by."""
    return name, state, *(None,) * (len(COLUMNS) - 3), on_disk
