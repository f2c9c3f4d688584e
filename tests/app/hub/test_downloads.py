"""Downloads against a hub on loopback, in good and bad weather."""

import asyncio
import hashlib
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.events import Events
from llmbox.app.hub import download as fetching
from llmbox.app.hub import download_queue, transfer
from llmbox.app.hub.cache_layout import Repo
from llmbox.app.hub.download import Download, DownloadSettings
from llmbox.app.hub.download_queue import Downloads
from llmbox.app.hub.errors import HubError
from llmbox.app.hub.http import HubHttpClient
from llmbox.app.hub.repo_files import Hub
from llmbox.app.hub.transfer import Retries
from llmbox.app.models.catalog import describe, resolve
from llmbox.engine.model_config.draft_heads import read_draft_head
from support.draft_heads import make_eagle3, make_medusa, make_target
from support.hub_models import model_files
from support.hub_stub import Handler, StubHub, StubRepo, stub_hub, times

NAME = "org/little"
QUICK = Retries(tries=4, first=0.01, longest=0.02)


class Place:
    """A cache of its own and what downloads into it."""

    def __init__(self, folder: Path, hub: StubHub) -> None:
        self.cache, self.hub, self.token = folder / "hub", hub, None
        self.state_file = folder / "downloads.json"
        self.options: dict[str, Any] = {}

    @asynccontextmanager
    async def downloads(self) -> AsyncIterator[Downloads]:
        setup = DownloadSettings(
            **{
                "cache": self.cache,
                "state_file": self.state_file,
                "fit": lambda _: "",
                "hub": lambda: Hub(self.hub.url, self.token),
                "retries": QUICK,
                **self.options,
            }
        )
        subject = Downloads(setup, Events())
        subject.restore()
        try:
            yield subject
        finally:
            await subject.close()

    async def pull(self, name: str = NAME, **options: Any) -> Download:
        async with self.downloads() as downloads:
            return await ended(downloads.start(name, **options))

    @property
    def weights(self) -> bytes:
        return self.hub.repos[NAME].files["model.safetensors"]

    @property
    def partial(self) -> Path:
        return Repo(self.cache, NAME).partial(hashlib.sha256(self.weights).hexdigest())

    def assert_ready(self, name: str = NAME) -> None:
        ref = resolve(name, {"HF_HUB_CACHE": str(self.cache)})
        assert describe(ref).servable
        for file in ("model.safetensors", "config.json", "tokenizer.json"):
            assert (ref.path / file).read_bytes() == self.hub.repos[ref.name.partition("@")[0]].files[file]
        assert not list(self.cache.rglob("*.incomplete"))

    def assert_absent(self) -> None:
        assert not (Repo(self.cache, NAME).folder / "snapshots").exists()
        assert not (Repo(self.cache, NAME).folder / "refs").exists()


async def ended(download: Download) -> Download:
    async with asyncio.timeout(60):
        while download.active:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return download


@pytest.fixture
def hub() -> Iterator[StubHub]:
    with stub_hub() as stub:
        stub.repos[NAME] = StubRepo(model_files())
        yield stub


@pytest.fixture
def place(tmp_path: Path, hub: StubHub) -> Place:
    return Place(tmp_path, hub)


async def test_only_what_is_needed_and_huggingface_hub_finds_it(place: Place, hub: StubHub):
    done = await place.pull()
    assert done.state == "ready", done.error
    place.assert_ready()
    assert not hub.requests("hub", "README")
    assert not hub.requests("hub", "pytorch_model")
    assert not place.state_file.exists()
    from huggingface_hub import scan_cache_dir, snapshot_download

    path = snapshot_download(NAME, cache_dir=place.cache, local_files_only=True)
    assert Path(path, "model.safetensors").read_bytes() == place.weights  # noqa: ASYNC240
    (repo,) = scan_cache_dir(place.cache).repos
    assert repo.repo_id == NAME
    assert not scan_cache_dir(place.cache).warnings


async def test_shards_and_revisions(place: Place, hub: StubHub):
    hub.repos["org/shards"] = StubRepo(model_files(shards=True))
    done = await place.pull("org/shards@v1")
    assert done.state == "ready", done.error
    ref = resolve("org/shards@v1", {"HF_HUB_CACHE": str(place.cache)})
    assert len(list(ref.path.glob("*.safetensors"))) == 2
    assert Repo(place.cache, "org/shards").refs() == {"v1": "c" * 40}


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
async def test_draft_heads_are_fetched(place: Place, hub: StubHub, tmp_path: Path, kind: str):
    target = make_target(tmp_path / "target")
    folder = (make_eagle3 if kind == "eagle3" else make_medusa)(tmp_path / kind, target)
    hub.repos["org/head"] = StubRepo({file.name: file.read_bytes() for file in folder.iterdir()})
    done = await place.pull("org/head")
    assert done.state == "ready", done.error
    ref = resolve("org/head", {"HF_HUB_CACHE": str(place.cache)})
    assert read_draft_head(ref.path) is not None


async def test_how_texts_are_pooled_comes_along(place: Place, hub: StubHub):
    told = {"modules.json": b"[]", "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}'}
    hub.repos[NAME].files |= told | {"onnx/config.json": b"{}"}
    done = await place.pull()
    assert done.state == "ready", done.error
    folder = resolve(NAME, {"HF_HUB_CACHE": str(place.cache)}).path
    assert {name: (folder / name).read_bytes() for name in told} == told
    assert not (folder / "onnx").exists()


async def test_the_token_goes_to_the_hub_only(place: Place, hub: StubHub):
    hub.repos[NAME].token = place.token = "hf_secret"
    assert (await place.pull()).state == "ready"
    assert all(seen.headers.get("Authorization") == "Bearer hf_secret" for seen in hub.requests("hub"))
    assert hub.requests("cdn")
    assert not any("hf_secret" in str(seen.headers) for seen in hub.requests("cdn"))


async def test_a_listing_redirected_elsewhere_takes_no_token_along(place: Place, hub: StubHub):
    place.token = "hf_secret"
    hub.faults.append(
        times(1, "/api/models/", lambda h: h.answer(307, b"", {"Location": f"{hub.cdn_url}/api{h.path}"}))
    )
    hub.faults.append(times(9, "/api", lambda h: h.fail(500), "cdn"))
    await place.pull()
    assert hub.requests("cdn", "/api")
    assert not any("hf_secret" in str(seen.headers) for seen in hub.requests("cdn"))


@pytest.mark.parametrize(
    ("act", "server"),
    [
        (lambda h: h.fail(500), "hub"),
        (lambda h: h.fail(503, Retry_After="0"), "hub"),
        (lambda h: h.fail(429, Retry_After="0"), "hub"),
        (lambda h: h.fail(502), "cdn"),
        (lambda h: h.connection.close(), "cdn"),
        (lambda h: cut(h, 3000), "cdn"),
        (lambda h: cut(h, 0), "cdn"),
        (lambda h: wrong(h, b"much longer" * 10_000), "cdn"),
        (lambda h: wrong(h, b"short"), "cdn"),
    ],
    ids=["500", "503", "429", "502", "reset", "truncated", "empty", "too long", "too short"],
)
async def test_bad_weather_passes(place: Place, hub: StubHub, act: Any, server: str):
    hub.faults.append(times(2, "model.safetensors", act, server))
    done = await place.pull()
    assert done.state == "ready", done.error
    assert done.as_dict()["retries"] == 2
    assert done.message
    place.assert_ready()


@pytest.mark.parametrize("status", [500, 429])
async def test_listings_are_tried_again_too(place: Place, hub: StubHub, status: int):
    hub.faults.append(times(2, "/api/models/", lambda h: h.fail(status, Retry_After="0")))
    assert (await place.pull()).state == "ready"


def cut(handler: Handler, count: int) -> None:
    data = handler.hub.repos[NAME].files["model.safetensors"]
    handler.bytes_of(data, {}, cut=count)


def wrong(handler: Handler, data: bytes) -> None:
    handler.answer(200, data)


async def test_truncated_answers_go_on_by_range(place: Place, hub: StubHub):
    hub.faults.append(times(1, "model.safetensors", lambda h: cut(h, 5000), "cdn"))
    assert (await place.pull()).state == "ready"
    ranges = [seen.headers.get("Range") for seen in hub.requests("cdn", "model.safetensors")]
    assert ranges == [None, "bytes=5000-"]


def begins(handler: Handler, count: int) -> None:
    """Some bytes of the file, and no end."""
    data = handler.hub.repos[NAME].files["model.safetensors"]
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[:count])
    handler.wfile.flush()
    handler.close_connection = True


class Silence:
    """The hub is silent in so many answers with the weights, and those alone are given up soon.

    Any other request has all the time it needs: a busy machine is no silent hub.
    """

    def __init__(self, place: Place, tries: int, after: int) -> None:
        self._url, self._left, self._asked = place.hub.url, tries, 0
        self._tries, self._after = tries, after
        place.hub.faults.append(self._fault)
        place.options["hub"] = self._hub

    def _fault(self, handler: Handler) -> bool:
        if handler.name != "cdn" or "model.safetensors" not in handler.path or self._asked > self._tries:
            return False
        begins(handler, self._after)
        handler.hub.go_on.wait(60)
        return True

    def _hub(self) -> Hub:
        hub = Hub(self._url, None)
        patient, quick = hub.web.get, HubHttpClient(self._url, None, timeout=0.2).get

        def get(url: str, *rest: Any, **options: Any) -> Any:
            if not url.endswith("/model.safetensors") or options.get("end") is not None:
                return patient(url, *rest, **options)
            self._asked += 1
            return (quick if self._asked <= self._tries else patient)(url, *rest, **options)

        hub.web.get = get
        return hub


async def test_a_connection_that_falls_silent_is_left_and_the_rest_fetched(place: Place, hub: StubHub):
    Silence(place, tries=2, after=5000)
    done = await place.pull()
    assert done.state == "ready", done.error
    assert done.as_dict()["retries"] == 2
    place.assert_ready()


async def test_a_hub_that_never_speaks_again_is_a_failure_that_can_be_tried_again(place: Place, hub: StubHub):
    Silence(place, tries=4, after=0)
    async with place.downloads() as downloads:
        done = await ended(downloads.start(NAME))
        assert done.error is not None
        assert done.error.code == "hub_unreachable"
        place.assert_absent()
        assert (await ended(downloads.start(NAME))).state == "ready"
    place.assert_ready()


class Held:
    """A hub silent to the first request for `part`, before or after the first bytes of an answer.

    For longer than any test waits, and its client is as patient.
    """

    def __init__(self, place: Place, part: str, server: str, after: int | None) -> None:
        self.reached, self.release = threading.Event(), threading.Event()
        self._place = place
        place.options["hub"] = self._patient
        place.hub.faults.append(times(1, part, lambda handler: self._hold(handler, after), server))

    def _hold(self, handler: Handler, after: int | None) -> None:
        if after is not None:
            begins(handler, after)
        self.reached.set()
        self.release.wait(300)

    def _patient(self) -> Hub:
        hub = Hub(self._place.hub.url, None)
        hub.web = HubHttpClient(self._place.hub.url, None, timeout=300)
        return hub


SILENT = [
    ("model.safetensors", "cdn", None),
    ("model.safetensors", "cdn", 20_000),
    ("/api/models/", "hub", None),
]


@pytest.mark.parametrize("silent", SILENT, ids=["no answer", "no more bytes", "no listing"])
async def test_pause_and_resume_do_not_wait_for_a_silent_hub(place: Place, hub: StubHub, silent: Any):
    held = Held(place, *silent)
    async with place.downloads() as downloads:
        downloads.start(NAME)
        await until(held.reached.is_set)
        assert downloads.pause(NAME).state == "paused"
        assert (await ended(downloads.resume(NAME))).state == "ready"
        # A listing comes by another library, which cannot be cut off: its thread is not waited for.
        waiting = [thread for thread in threading.enumerate() if thread.name == "llmbox-hub"]
        assert waiting or "/api/" not in silent[0]
    held.release.set()
    assert not downloads.get(NAME).as_dict()["retries"]
    assert not downloads.get(NAME).message, "what was stopped did not fail"
    place.assert_ready()


@pytest.mark.parametrize("silent", SILENT, ids=["no answer", "no more bytes", "no listing"])
async def test_cancel_leaves_nothing_even_of_a_silent_hub(place: Place, hub: StubHub, silent: Any):
    held = Held(place, *silent)
    async with place.downloads() as downloads:
        downloads.start(NAME)
        await until(held.reached.is_set)
        assert (await downloads.cancel(NAME)).state == "cancelled"
        await until(lambda: not list(place.cache.rglob("*.incomplete")))
        assert (await ended(downloads.start(NAME))).state == "ready"
    held.release.set()
    place.assert_ready()


async def test_cancel_does_not_wait_for_a_thread_that_cannot_be_ended(
    place: Place, hub: StubHub, monkeypatch
):
    """Such as one that still connects."""
    monkeypatch.setattr("llmbox.app.hub.download_queue.PATIENCE", 0.05)
    monkeypatch.setattr(HubHttpClient, "cut", lambda _: None)
    held = Held(place, "model.safetensors", "cdn", None)
    async with place.downloads() as downloads:
        downloads.start(NAME)
        await until(held.reached.is_set)
        assert (await downloads.cancel(NAME)).state == "cancelled"
        assert list(place.cache.rglob("*.incomplete"))
        again = downloads.start(NAME)  # must not meet the cleaning of the one before
        held.release.set()
        assert (await ended(again)).state == "ready"
    place.assert_ready()


async def test_the_hubs_own_pace_is_kept(place: Place, hub: StubHub):
    hub.faults.append(times(1, "model.safetensors", lambda h: h.fail(429, Retry_After="1")))
    began = time.monotonic()
    assert (await place.pull()).state == "ready"
    assert time.monotonic() - began >= 1.0


async def test_files_come_side_by_side_up_to_the_bound(place: Place, hub: StubHub, monkeypatch):
    hub.repos[NAME] = StubRepo(model_files(shards=True))
    hub.chunk_pause = 0.005
    place.options["files_at_once"] = 2
    lock, both, at_once = threading.Lock(), threading.Event(), [0]
    real = fetching.fetch

    def fetch(*arguments: Any) -> None:
        with lock:
            at_once.append(at_once[-1] + 1)
            if at_once[-1] == 2:
                both.set()
        assert both.wait(60)
        try:
            real(*arguments)
        finally:
            with lock:
                at_once.append(at_once[-1] - 1)

    monkeypatch.setattr(fetching, "fetch", fetch)
    assert (await place.pull()).state == "ready"
    assert max(at_once) == 2


async def test_what_was_cancelled_stays_so_over_a_restart(place: Place, hub: StubHub):
    hub.hold_after = 32_768
    async with place.downloads() as downloads:
        download = downloads.start(NAME)
        await until(lambda: download.done > 30_000)
        await downloads.cancel(NAME)
        await until(lambda: not list(place.cache.rglob("*.incomplete")))
    async with place.downloads() as downloads:
        assert downloads.all() == []
    assert not list(place.cache.rglob("*.incomplete"))


async def test_a_note_that_cannot_be_written_stops_no_download(place: Place):
    place.state_file = place.cache.parent / "absent" / "downloads.json"
    assert (await place.pull()).state == "ready"
    place.assert_ready()


async def test_a_server_without_ranges_begins_again(place: Place, hub: StubHub):
    hub.faults.append(times(1, "model.safetensors", lambda h: cut(h, 5000), "cdn"))
    hub.faults.append(times(1, "model.safetensors", lambda h: h.answer(200, place.weights), "cdn"))
    assert (await place.pull()).state == "ready"
    place.assert_ready()


async def test_wrong_bytes_once_are_fetched_again(place: Place, hub: StubHub):
    garbled = bytes(len(place.weights))
    hub.faults.append(times(1, "model.safetensors", lambda h: h.answer(200, garbled), "cdn"))
    done = await place.pull()
    assert done.state == "ready", done.error
    assert "wrong hash" in done.message
    place.assert_ready()


async def test_wrong_bytes_twice_are_a_failure_that_can_be_tried_again(place: Place, hub: StubHub):
    garbled = bytes(len(place.weights))
    hub.faults.append(times(2, "model.safetensors", lambda h: h.answer(200, garbled), "cdn"))
    async with place.downloads() as downloads:
        failed = await ended(downloads.start(NAME))
        assert failed.state == "failed"
        assert failed.error is not None
        assert failed.error.code == "integrity"
        assert not place.partial.exists()
        place.assert_absent()
        assert (await ended(downloads.start(NAME))).state == "ready"
    place.assert_ready()


async def test_small_files_are_checked_as_well(place: Place, hub: StubHub):
    data = hub.repos[NAME].files["config.json"]
    assert len(data) < 1000
    bad = data.replace(b"0", b"1")
    place.options["fit"] = lambda _: ""
    hub.faults.append(times(3, "resolve/" + "c" * 40 + "/config.json", lambda h: h.answer(200, bad)))
    done = await place.pull()
    assert done.state == "failed"
    assert done.error is not None
    assert done.error.code == "integrity"
    place.assert_absent()


async def test_a_changed_etag_is_not_taken(place: Place, hub: StubHub):
    def changed(handler: Handler) -> None:
        handler.answer(302, b"", {"X-Linked-Etag": '"' + "0" * 64 + '"', "Location": f"{hub.cdn_url}/x"})

    other = "/model.safetensors"
    hub.faults.append(times(99, other, changed))
    hub.faults.append(times(99, "/x", lambda h: h.answer(200, place.weights), "cdn"))
    done = await place.pull()
    assert done.state == "failed"
    assert done.error is not None
    assert "other content than it listed" in str(done.error)
    place.assert_absent()


@pytest.mark.parametrize(
    ("prepare", "code", "words"),
    [
        (lambda repo: setattr(repo, "gated", True), "repo_gated", "accept its terms"),
        (lambda repo: setattr(repo, "token", "other"), "repo_not_found", "private"),
        (lambda repo: repo.files.pop("config.json"), "no_weights", "config.json"),
        (lambda repo: repo.files.pop("model.safetensors"), "no_weights", "pickle"),
        (
            lambda repo: repo.files.update({"config.json": b"[]"}),
            "unsupported_model",
            "does not contain a JSON object",
        ),
    ],
)
async def test_what_cannot_be_had_is_said(place: Place, hub: StubHub, prepare: Any, code: str, words: str):
    prepare(hub.repos[NAME])
    done = await place.pull()
    assert done.state == "failed"
    assert done.error is not None
    assert done.error.code == code
    assert words in f"{done.error} {done.error.fix}"
    assert not (place.cache / "models--org--little").exists()


async def test_a_refused_token_is_told_apart(place: Place, hub: StubHub):
    place.token = "hf_old"
    hub.faults.append(times(9, "/api/models/", lambda h: h.fail(401)))
    done = await place.pull()
    assert done.error is not None
    assert done.error.code == "bad_token"


async def test_unknown_names_and_nonsense(place: Place, hub: StubHub):
    done = await place.pull("org/absent")
    assert done.error is not None
    assert done.error.code == "repo_not_found"
    hub.faults.append(times(99, "/api/models/", lambda h: h.answer(200, b'{"id": 1}')))
    done = await place.pull()
    assert done.error is not None
    assert done.error.code == "hub_error"
    async with place.downloads() as downloads:
        for bad in (
            "",
            "one",
            "org/name.git",
            "../x/y",
            "org/../x",
            "/etc/passwd",
            "a/b/c",
            "org/na--me",
            "o/n@../x",
        ):
            with pytest.raises(ApiError, match="not a model of the hub"):
                downloads.start(bad)


async def test_a_hub_that_is_down_or_switched_off(place: Place):
    place.options["hub"] = lambda: Hub("http://127.0.0.1:9", None)
    done = await place.pull()
    assert done.error is not None
    assert done.error.code == "hub_unreachable"
    place.options["hub"] = lambda: Hub("http://127.0.0.1:9", None, offline=True)
    done = await place.pull()
    assert done.error is not None
    assert done.error.code == "hub_offline"


async def test_too_large_is_refused_unless_asked(place: Place):
    place.options["fit"] = lambda config: f"{config.num_layers} layers are too many"
    done = await place.pull()
    assert done.error is not None
    assert done.error.code == "does_not_fit"
    assert "2 layers" in done.error.why
    assert (await place.pull(anyway=True)).state == "ready"


async def test_a_disk_too_small_is_known_before_a_byte(place: Place, hub: StubHub):
    place.options["free"] = lambda _: 1000
    done = await place.pull()
    assert done.error is not None
    assert done.error.code == "disk_full"
    assert "has 0.0 MB free" in done.error.why
    assert "needs 512." in done.error.why
    assert not hub.requests("cdn")
    place.options["free"] = lambda _: 10**12
    assert (await place.pull()).state == "ready"


async def test_a_disk_that_fills_up_on_the_way(place: Place, monkeypatch: pytest.MonkeyPatch):
    real = transfer._write
    with Path("/dev/full").open("wb", buffering=0) as full, monkeypatch.context() as patch:  # noqa: ASYNC230
        patch.setattr(transfer, "_write", lambda _out, *rest: real(full, *rest))
        async with place.downloads() as downloads:
            done = await ended(downloads.start(NAME))
            assert done.error is not None
            assert done.error.code == "disk_full", done.error
            assert "more and has" in done.error.why
            place.assert_absent()
            patch.undo()
            assert (await ended(downloads.start(NAME))).state == "ready"
    place.assert_ready()


async def test_pause_resume_and_restart_fetch_no_byte_twice(place: Place, hub: StubHub):
    hub.hold_after = 32_768
    async with place.downloads() as downloads:
        download = downloads.start(NAME)
        await until(
            lambda: any(
                each.done > 16_384
                for file, each in download.files.items()
                if file.name == "model.safetensors"
            )
        )
        assert downloads.pause(NAME).state == "paused"
        with pytest.raises(ApiError, match="is paused"):
            downloads.pause(NAME)
    assert json.loads(place.state_file.read_text())["downloads"][0]["state"] == "paused"
    place.assert_absent()
    hub.go_on.set()
    async with place.downloads() as downloads:
        (again,) = downloads.all()
        assert again.state == "paused"
        assert (await ended(downloads.resume(NAME))).state == "ready"
    place.assert_ready()
    resumed = hub.requests("cdn", "model.safetensors")[-1].headers["Range"]
    assert int(resumed.removeprefix("bytes=").rstrip("-")) >= 16_384


async def test_a_daemon_that_ends_goes_on_at_its_next_start(place: Place, hub: StubHub):
    hub.hold_after = 32_768
    async with place.downloads() as downloads:
        download = downloads.start(NAME)
        await until(lambda: download.done > 30_000)
    hub.go_on.set()
    async with place.downloads() as downloads:
        (again,) = downloads.all()
        assert (await ended(again)).state == "ready"
    place.assert_ready()


async def test_cancel_leaves_nothing(place: Place, hub: StubHub):
    hub.hold_after = 32_768
    async with place.downloads() as downloads:
        download = downloads.start(NAME)
        await until(lambda: download.done > 30_000)
        assert (await downloads.cancel(NAME)).state == "cancelled"
        await until(lambda: not list(place.cache.rglob("*.incomplete")))
        with pytest.raises(ApiError, match="is cancelled"):
            await downloads.cancel(NAME)
        assert not place.state_file.exists()


async def test_short_names_cancel_and_dismiss_as_full_ones(place: Place, hub: StubHub, monkeypatch):
    monkeypatch.setattr(download_queue, "full_name", lambda text: NAME if text == "short:1b" else text)
    hub.hold_after = 32_768
    async with place.downloads() as downloads:
        download = downloads.start("short:1b")
        await until(lambda: download.done > 30_000)
        assert (await downloads.cancel("short:1b")).state == "cancelled"
        await until(lambda: not list(place.cache.rglob("*.incomplete")))
        await downloads.dismiss("short:1b")
        assert downloads.all() == []


async def test_two_pulls_are_one_download(place: Place, hub: StubHub):
    async with place.downloads() as downloads:
        first, second = downloads.start(NAME), downloads.start(NAME)
        assert first is second
        await ended(first)
    assert len(hub.requests("cdn", "model.safetensors")) == 1


async def test_another_writer_is_waited_for(place: Place, hub: StubHub):
    """As `hf download` beside us would: it holds the blob's lock, then the blob is there."""
    repo = Repo(place.cache, NAME)
    etag = hashlib.sha256(place.weights).hexdigest()
    async with place.downloads() as downloads:
        with repo.locked(etag, threading.Event()):
            download = downloads.start(NAME)
            await until(lambda: download.files and download.done >= download.total - len(place.weights))
            repo.blob(etag).write_bytes(place.weights)
        assert (await ended(download)).state == "ready"
    assert not hub.requests("cdn", "model.safetensors")


async def test_a_blob_that_rotted_is_replaced(place: Place):
    await place.pull()
    blob = Repo(place.cache, NAME).blob(hashlib.sha256(place.weights).hexdigest())
    blob.write_bytes(bytes(len(place.weights)))
    done = await place.pull()
    assert done.state == "ready"
    assert "differs from the hub" in done.message
    place.assert_ready()


async def test_the_bandwidth_cap_counts_over_all_files(place: Place):
    size = sum(len(data) for data in place.hub.repos[NAME].files.values())
    place.options["bandwidth"] = lambda: 10.0 * size
    began = time.monotonic()
    done = await place.pull()
    assert done.state == "ready"
    assert time.monotonic() - began > 0.5 * done.total / (10.0 * size)


async def test_events_tell_the_story(place: Place):
    async with place.downloads() as downloads:
        await ended(downloads.start(NAME))
        kinds = [event.type for event in downloads._events._recent]
    assert [kind for kind in kinds if kind != "download.progress"] == [
        "download.checking",
        "download.downloading",
        "download.ready",
    ]


async def test_a_broken_state_file_costs_only_the_resumption(place: Place):
    for text in ("", "{", "[]", '{"downloads": [{"model": "../../x"}]}', '{"downloads": [3]}'):
        place.state_file.write_text(text)
        async with place.downloads() as downloads:
            assert downloads.all() == []


async def test_leftovers_of_a_crash_while_publishing_are_cleaned(place: Place):
    await place.pull()
    repo = Repo(place.cache, NAME)
    final = repo.snapshot("c" * 40)
    shutil.copytree(final, final.with_name(".llmbox-0000"), symlinks=True)
    (place.cache / ".llmbox-1111").mkdir()
    async with place.downloads():
        assert repo.revisions() == ("c" * 40,)
        assert not list(place.cache.rglob(".llmbox-*"))


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# ------------------------------------------------------------------ reasons, and lists that stay short


async def test_a_failure_keeps_its_reason_when_the_daemon_is_killed(place: Place):
    async with place.downloads() as downloads:
        failed = await ended(downloads.start("org/typo"))
        assert failed.error is not None
        noted = place.state_file.read_bytes()
    place.state_file.write_bytes(noted)  # what a kill leaves
    async with place.downloads() as downloads:
        found = downloads.get("org/typo")
        assert found.state == "failed"
        assert found.error == failed.error
        assert found.error.code == "repo_not_found"
        assert (found.started_at, found.ended_at) == (failed.started_at, failed.ended_at)
        assert downloads.start("org/typo").active


async def test_a_state_file_of_the_first_version_is_read(place: Place):
    row = {"model": NAME, "repo": NAME, "revision": None, "anyway": False, "commit": None, "etags": []}
    rows = [row | {"state": "paused"}, row | {"model": "org/x", "repo": "org/x", "state": "failed"}]
    place.state_file.write_text(json.dumps({"schema": 1, "downloads": rows}))
    async with place.downloads() as downloads:
        paused, failed = downloads.all()
        assert (paused.state, failed.state) == ("paused", "failed")
        assert failed.error is not None


async def test_what_never_fetched_a_byte_leaves_the_list(place: Place, hub: StubHub):
    async with place.downloads() as downloads:
        typo = await ended(downloads.start("org/typo"))
        hub.faults.append(times(99, "model.safetensors", lambda handler: handler.fail(404, "EntryNotFound")))
        begun = await ended(downloads.start(NAME))
        assert [each.state for each in downloads.all()] == ["failed", "failed"]
        assert begun.etags
        for each in (typo, begun):
            assert each.ended_at is not None
            each.ended_at -= 3601
        assert downloads.all() == [begun], "files of it are on the disk"


async def test_dismiss(place: Place, hub: StubHub):
    async with place.downloads() as downloads:
        await ended(downloads.start("org/typo"))
        await downloads.dismiss("org/typo")
        assert downloads.all() == []
        assert not place.state_file.exists()
        await ended(downloads.start(NAME))
        await downloads.dismiss(NAME)
        place.assert_ready()
        hub.hold_after = 0
        hub.repos["org/slow"] = StubRepo(model_files(1))
        downloads.start("org/slow")
        with pytest.raises(ApiError, match="cannot be dismissed"):
            await downloads.dismiss("org/slow")


# ------------------------------------------------------------------ without a network


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("http://127.0.0.1:9", "nothing listens at 127.0.0.1 port 9"),
        ("http://no-such-host.invalid", "the name no-such-host.invalid cannot be resolved"),
    ],
)
async def test_no_network_is_said_at_once(place: Place, endpoint: str, says: str):
    place.options |= {"hub": lambda: Hub(endpoint, None), "retries": Retries(tries=8, first=60.0)}
    done = await place.pull()
    assert done.error is not None
    assert done.error.code == "hub_unreachable"
    assert says in done.error.why
    with pytest.raises(HubError, match=says):
        Hub(endpoint, None).search("x", 5)


async def test_what_had_begun_outlasts_a_network_that_is_down_and_says_so(place: Place, hub: StubHub):
    hub.faults.append(times(99, "model.safetensors", lambda handler: handler.fail(404, "EntryNotFound")))
    await place.pull()
    hub.faults.clear()
    place.options |= {"hub": lambda: Hub("http://127.0.0.1:9", None), "retries": Retries(tries=8, first=60.0)}
    async with place.downloads() as downloads:
        going = downloads.resume(NAME)
        async with asyncio.timeout(60):
            while not going.message:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert going.active
        assert "nothing listens" in going.message
        assert "(2 of 8)" in going.message


async def test_failed_listings_are_announced(place: Place, hub: StubHub):
    hub.faults.append(times(1, "/api/models/", lambda handler: handler.fail(503)))
    done = await place.pull()
    assert done.state == "ready"
    assert "HTTP 503" in done.message
    assert "next try in" in done.message
