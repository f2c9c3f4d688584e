"""Every page of the panel, as a browser without scripts sees it."""

import gzip
import io
import json
import re
import sqlite3
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from llmbox.app.diagnostics.updates import Update
from llmbox.app.models.catalog import BUILTIN_DIR
from llmbox.app.models.registry import Alias, Registry
from llmbox.ui.web.pages.model_detail import DIVERGENCE
from llmbox.ui.web.render import environment
from support.adapters import plain_tensors, write_adapter
from support.cli_box import PATIENCE, until
from support.hub_stub import StubRepo

ROOT = Path(__file__).parents[3]
PAGES = [
    "/admin",
    "/admin/first-run",
    "/admin/models",
    "/admin/models/discover",
    "/admin/models/activity",
    "/admin/models/adapters",
    "/admin/models/show?ref=builtin",
    "/admin/models/show?ref=builtin&ctx=999999999",
    "/admin/models/template?ref=builtin",
    "/admin/requests",
    "/admin/chat",
    "/admin/playground",
    "/admin/telemetry",
    "/admin/memory",
    "/admin/keys",
    "/admin/settings",
    "/admin/system",
    "/admin/system?checks=1",
]
VOID = {"meta", "link", "img", "input", "br", "hr"}


class Page(HTMLParser):
    """What a validator would look at first."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.problems: list[str] = []
        self.feed(text)
        self.problems += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            self.problems.append(f"</{tag}> closes {self.open[-1:]}")
        else:
            self.open.pop()

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_sound_html_without_inline_code(signed_in, path):
    answer = signed_in.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    page = Page(answer.text)
    assert page.problems == []
    assert len(page.all("h1")) == 1
    assert page.all("html") == [{"lang": "en"}]
    for tag, attrs in page.tags:
        assert "style" not in attrs, tag
        assert not [name for name in attrs if name.startswith("on")], tag
    assert all(script.get("src", "").startswith("/admin/static/") for script in page.all("script"))
    assert not page.all("style")
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    forms = [form for form in page.all("form") if form.get("method") == "post"]
    tokens = [field for field in page.all("input") if field.get("name") == "csrf_token"]
    assert len(tokens) == len(forms)


def wire(client: httpx.Client, path: str) -> tuple[str, int]:
    """A file or page as text, and its bytes on the wire."""
    with client.stream("GET", path, headers={"accept-encoding": "gzip"}) as answer:
        assert answer.status_code == 200, path
        raw = b"".join(answer.iter_raw())
        packed = answer.headers.get("content-encoding") == "gzip"
    return (gzip.decompress(raw) if packed else raw).decode(), len(raw)


def test_pages_are_light(signed_in):
    """With styles, scripts, what scripts import, and icons a page is at most 60 kB, as browsers get it."""
    sizes: dict[str, tuple[str, int]] = {}

    def size_of(path: str) -> set[str]:
        """The files that a file needs, itself among them."""
        if path not in sizes:
            sizes[path] = wire(signed_in, path)
        found = {path}
        for name in re.findall(r"""(?:from|import) ?["'](\.[^"']+\.js)["']""", sizes[path][0]):
            found |= size_of(str((Path(path).parent / name).resolve()))
        return found

    for path in {*PAGES, "/admin/chat"} - {"/admin/models/template?ref=builtin"}:
        page = Page(wire(signed_in, path)[0])
        links = [each.get("href") or "" for tag in ("link", "use") for each in page.all(tag)]
        links += [each.get("src") or "" for tag in ("script", "img") for each in page.all(tag)]
        files = set().union(*(size_of(each.partition("#")[0]) for each in links))
        size = wire(signed_in, path)[1] + sum(sizes[file][1] for file in files)
        assert size <= 60_000, (path, size, {file: sizes[file][1] for file in files})


def test_a_chat_begins_with_the_model_of_its_link(signed_in):
    page = signed_in.get("/admin/chat?model=builtin").text
    assert "builtin is on this disk and not in memory yet: the first message loads it." in page
    assert re.search(r"<option[^>]* selected>builtin</option>", page)
    assert re.search(r"<option[^>]* selected>tiny</option>", signed_in.get("/admin/chat?model=tiny").text)
    unknown = signed_in.get("/admin/chat?model=nobody%22%3E").text
    assert "nobody" not in unknown
    assert "not in memory yet" not in unknown


def test_answers_of_the_panel_are_compressed_and_the_same(signed_in):
    for path in ("/admin/settings", "/admin/api/config"):
        plain = signed_in.get(path, headers={"accept-encoding": "identity"})
        packed = signed_in.get(path)
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.headers["vary"] == "Accept-Encoding"
        assert "content-encoding" not in plain.headers
        assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 3
        assert packed.text.partition("csrf")[0] == plain.text.partition("csrf")[0]
        head = signed_in.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert "content-encoding" not in signed_in.get("/v1/models").headers
    with signed_in.stream("GET", "/admin/live/overview") as stream:
        assert "content-encoding" not in stream.headers


def test_every_link_of_every_page_leads_somewhere(panel, signed_in):
    panel.complete()
    found = set()
    for path in PAGES:
        links = [link.get("href") or "" for link in Page(signed_in.get(path).text).all("a")]
        found |= {link for link in links if not link.startswith("#")}
    assert any(link.startswith("/admin/requests/cmpl") for link in found)
    for link in found:
        assert link.startswith("/admin"), link
        assert signed_in.get(link).status_code == 200, link


@pytest.mark.parametrize("path", [*PAGES, "/admin/live/overview", "/admin/requests.csv"])
def test_without_a_sign_in_there_is_only_the_way_in(panel, path):
    with httpx.Client(base_url=panel.url, timeout=PATIENCE) as stranger:
        answer = stranger.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/admin/signin")
        fragment = stranger.get(path, headers={"HX-Request": "true"})
        assert (fragment.status_code, fragment.headers["hx-redirect"]) == (401, "/admin/signin")


@pytest.mark.parametrize(
    "path",
    [
        "/admin/keys",
        "/admin/models/load",
        "/admin/settings/save",
        "/admin/system/purge",
        "/admin/system/update",
        "/admin/models/pull",
    ],
)
def test_changes_need_the_token_of_the_page(signed_in, path):
    answer = signed_in.post(path, data={"name": "x"})
    assert answer.status_code == 403
    assert "has expired" in answer.text


def test_filters_stand_in_the_address_and_rows_can_be_exported(panel, signed_in):
    panel.complete()
    with panel.client() as anyone:
        anyone.post("/v1/completions", json={"model": "<b>none</b>", "prompt": "x"})
    until(lambda: panel.box.api("requests?errors=true")["requests"])
    page = signed_in.get("/admin/requests", params={"status": "errors"}).text
    assert "&lt;b&gt;none&lt;/b&gt;" in page
    assert "<b>none" not in page
    assert "No request matches" in signed_in.get("/admin/requests?model=nobody").text
    rows = signed_in.get("/admin/requests.json?status=errors").json()["requests"]
    assert {row["error_code"] for row in rows} == {"model_not_found"}
    csv = signed_in.get("/admin/requests.csv?model=tiny")
    assert csv.text.startswith("id,created,model")
    assert "attachment" in csv.headers["content-disposition"]
    assert signed_in.get("/admin/requests?before=x").status_code == 400


def test_a_request_in_detail_can_be_made_again(panel, signed_in):
    panel.complete()
    row = signed_in.get("/admin/requests.json?model=tiny").json()["requests"][0]
    page = signed_in.get(f"/admin/requests/{row['id']}").text
    for words in ("Where its time went", "Found there", "curl ", "client.completions.create"):
        assert words in page
    assert signed_in.get("/admin/requests/none").status_code == 404


def test_weight_formats_stand_beside_each_other(signed_in):
    page = signed_in.get("/admin/models/show?ref=builtin").text
    table = page.partition('id="formats-title"')[2].partition("</table>")[0]
    text = re.sub(r"<[^>]+>|\s+", " ", table)
    assert re.findall(r" (none|int8|int4-mix|int4|int4-g128)  ", text) == [*DIVERGENCE]
    speeds = [float(each) for each in re.findall(r"([\d.]+) \u00d7", text)]
    assert speeds[0] == 1.0
    assert speeds[1] > 1.2
    assert text.count("fits") == 5


def test_a_plan_is_computed_anew_for_what_is_chosen(signed_in):
    plain = signed_in.get("/admin/models/plan?ref=builtin").text
    halved = signed_in.get("/admin/models/plan?ref=builtin&quant=int8&kv_dtype=int8&ctx=512").text
    assert plain != halved
    assert "as int8" in halved
    assert "a context of 512 tokens" in halved
    assert 'name="quant" value="int8"' in halved  # what the button loads
    assert "each of 2 ranks" in signed_in.get("/admin/models/plan?ref=builtin&tp=2").text
    assert "must be" in signed_in.get("/admin/models/plan?ref=builtin&ctx=many").text
    assert signed_in.get("/admin/models/plan?ref=nobody/none").status_code == 404


def test_how_a_model_in_memory_is_cut_is_told_with_the_reason(panel, signed_in):
    folder = panel.box.model("cut", vocab_size=480)
    assert panel.box.run("load", folder, "--tp", 2).code == 0
    page = signed_in.get("/admin/models/show", params={"ref": str(folder)}).text
    assert "2 <small>tensor parallel 2, stages 1</small>" in page
    assert "every layer shared, as asked" in page
    panel.box.run("unload", "cut")


def test_a_template_is_tried_with_messages_that_stay_text(signed_in):
    page = signed_in.get("/admin/models/template", params={"ref": "builtin", "user": "<b>hi</b><|im_end|>"})
    assert "&lt;b&gt;hi&lt;/b&gt;&lt;|im_end|&gt;" in page.text
    assert "&lt;|im_start|&gt;assistant" in page.text
    piece = signed_in.get("/admin/models/template?ref=builtin", headers={"HX-Request": "true"}).text
    assert "<html" not in piece
    assert re.search(r"\d+ tokens", piece)


def test_an_alias_is_set_changed_and_removed(panel, signed_in):
    address = "/admin/models/show?ref=builtin"
    token = csrf(signed_in.get(address).text)
    form = {
        "csrf_token": token,
        "ref": "builtin",
        "name": "terse",
        "temperature": "0.2",
        "system": "Be brief.",
    }
    assert "Be brief." in signed_in.post("/admin/models/alias", data=form).text
    form["temperature"] = "9"
    refused = signed_in.post("/admin/models/alias", data=form)
    assert (refused.status_code, "from 0 to 2" in refused.text) == (400, True)
    assert panel.box.run("alias", "ls", "-q").out.split() == ["terse"]
    gone = signed_in.post("/admin/models/alias/remove", data=form).text
    assert "This model has no alias." in gone


def test_a_key_is_made_shown_once_and_revoked(signed_in):
    token = csrf(signed_in.get("/admin/keys").text)
    made = signed_in.post("/admin/keys", data={"csrf_token": token, "name": "app", "scope_infer": "1"})
    secret = re.search(r"sk-llmbox-[\w-]{30,}", made.text)
    assert secret is not None
    assert secret.group() not in signed_in.get("/admin/keys").text
    refused = signed_in.post("/admin/keys", data={"csrf_token": token, "name": "no one", "scope_infer": "1"})
    assert refused.status_code == 400
    assert 'value="no one"' in refused.text
    twice = signed_in.post("/admin/keys", data={"csrf_token": token, "name": "app", "scope_infer": "1"})
    assert twice.status_code == 409
    assert "app" not in re.findall(r"<h2>(\w+)</h2>", revoke(signed_in, token, "app"))


def test_what_a_key_used_is_told(panel, signed_in):
    secret = panel.box.run("key", "add", "worker").out.strip()
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 5}
    asked = httpx.post(
        f"{panel.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {secret}"}, timeout=60
    )
    panel.logged(asked.json()["id"])
    used = asked.json()["usage"]
    page = signed_in.get("/admin/keys").text
    assert f"{used['prompt_tokens']} <small>tokens in</small>, 5 <small>out" in page
    assert "only times, counts and parameters" in page
    token = csrf(page)
    limits = {"csrf_token": token, "tokens_day": "1,000", "budget_month": "2.5"}
    changed = signed_in.post("/admin/keys/worker/limits", data=limits).text
    assert f"{sum((used['prompt_tokens'], 5))} of 1,000 tokens this day" in changed
    assert "0 of 2.50 USD this month" in changed.replace("0.00", "0")
    assert (
        "must be a whole number"
        in signed_in.post("/admin/keys/worker/limits", data=limits | {"rpm": "few"}).text
    )
    cleared = signed_in.post("/admin/keys/worker/limits", data={"csrf_token": token}).text
    assert "this day" not in cleared
    (row,) = [row for row in panel.box.run("key", "ls", "--json").json["keys"] if row["name"] == "worker"]
    assert (row["usage"]["requests"], row["usage"]["tokens_out"]) == (1, 5)
    panel.box.run("key", "rm", "worker", "--yes")


def test_a_backup_and_a_bundle_can_be_taken_away(panel, signed_in, tmp_path):
    panel.complete()
    token = {"csrf_token": csrf(signed_in.get("/admin/system").text)}
    backup = signed_in.post("/admin/system/backup", data=token)
    assert "llmbox-backup-" in backup.headers["content-disposition"]
    (tmp_path / "copy.db").write_bytes(backup.content)
    with sqlite3.connect(tmp_path / "copy.db") as copy:
        assert copy.execute("SELECT count(*) FROM request").fetchone()[0] > 0
    bundle = signed_in.post("/admin/system/bundle", data=token)
    with zipfile.ZipFile(io.BytesIO(bundle.content)) as parts:
        assert {"findings.json", "settings.json", "daemon.log"} <= set(parts.namelist())
    assert list(panel.box.paths.state_dir.glob(".*-llmbox-*")) == []
    assert signed_in.post("/admin/system/backup").status_code == 403


def test_updates_are_asked_for_by_a_button_alone(panel, signed_in):
    page = signed_in.get("/admin/system").text
    assert not [each for each in panel.hub.seen if each.path.startswith("/simple")]
    token = {"csrf_token": csrf(page)}
    whole = signed_in.post("/admin/system/update", data=token)
    part = signed_in.post("/admin/system/update", data=token, headers={"HX-Request": "true"})
    for answer in (whole, part):
        assert answer.status_code == 200
        assert "it answers 401" in answer.text  # the stub of the hub stands for an index
    assert "<html" in whole.text
    assert "<html" not in part.text
    update = Update("0.1.0", "9.0", is_newer=True, command="pipx upgrade llmbox", index="http://127.0.0.1")
    shown = environment().get_template("live/update.html").render(update=update, problem=None)
    assert "llmbox 9.0 is available" in shown
    assert "pipx upgrade llmbox" in shown


def revoke(client: httpx.Client, token: str, name: str) -> str:
    return client.post(f"/admin/keys/{name}/revoke", data={"csrf_token": token}).text


def test_settings_are_shown_as_a_difference_and_then_written(panel, signed_in):
    page = signed_in.get("/admin/settings").text
    token = csrf(page)
    port = next(field for field in Page(page).all("input") if field.get("name") == "server.port")
    assert "disabled" in port  # LLMBOX_SERVER_PORT is set
    wrong = signed_in.post("/admin/settings", data={"csrf_token": token, "limits.queue": "many"})
    assert wrong.status_code == 400
    assert "whole number" in wrong.text
    wanted = {"csrf_token": token, "log.level": "debug", "limits.queue": "77", "server.port": "1"}
    review = signed_in.post("/admin/settings", data=wanted).text
    assert re.findall(r"<ins>(.*?)</ins>", review) == ["debug", "77"]
    assert not panel.box.paths.config_file.exists()
    signed_in.post("/admin/settings/save", data=wanted)
    written = panel.box.paths.config_file.read_text()
    assert "queue = 77" in written
    assert "port" not in written
    assert "After a restart: limits.queue" in signed_in.get("/admin/settings").text


def test_the_overview_counts_usage_cost_and_goodput(panel, signed_in):
    panel.complete()
    assert "Set prices to see costs" in signed_in.get("/admin").text
    token = csrf(signed_in.get("/admin/settings").text)
    rules = {"usage.prices": "tiny=1000000/0, *=0/0", "usage.targets": "tiny=100000/100000"}
    signed_in.post("/admin/settings/save", data={"csrf_token": token, **rules})
    table = signed_in.get("/admin/usage?range=600").text.partition("By model")[2].partition("</table>")[0]
    row = re.sub(r"<[^>]+>|\s+", " ", table.partition("tiny")[2])
    rows = panel.box.api("usage?since=0")["usage"]
    assert "100 %" in row
    assert f"{sum(each['tokens_in'] for each in rows if each['model'] == 'tiny'):,.2f}" in row
    assert "target of tiny" in signed_in.get("/admin").text
    bad = signed_in.post("/admin/settings", data={"csrf_token": token, "usage.prices": "tiny=cheap"})
    assert "prices such as" in bad.text
    signed_in.post("/admin/settings/save", data={"csrf_token": token, **dict.fromkeys(rules, "")})
    assert "Goodput" not in signed_in.get("/admin").text


def test_live_pieces_come_over_one_stream(signed_in):
    with signed_in.stream("GET", "/admin/live/overview") as stream:
        names = set()
        for line in stream.iter_lines():
            if line.startswith("event: "):
                names.add(line.removeprefix("event: "))
            if names == {"attention", "now", "boxes", "loaded"}:
                break
    assert signed_in.get("/admin/live/nothing").status_code == 404


def test_files_are_packed_and_checked_by_their_hash(signed_in):
    plain = signed_in.get("/admin/static/panel.css", headers={"accept-encoding": "identity"})
    packed = signed_in.get("/admin/static/panel.css")
    assert packed.headers["content-encoding"] == "gzip"
    assert plain.text == packed.text
    again = signed_in.get("/admin/static/panel.css", headers={"if-none-match": plain.headers["etag"]})
    assert again.status_code == 304
    for name in ("../render.py", "vendor/manifest.json", "nothing.css"):
        assert signed_in.get(f"/admin/static/{name}").status_code == 404


def test_the_lock_file_pins_by_hash_and_names_no_host():
    text = (ROOT / "ui/web/package-lock.json").read_text()
    packages = json.loads(text)["packages"]
    assert all(entry["integrity"].startswith("sha512-") for name, entry in packages.items() if name)
    assert "resolved" not in text
    assert "://" not in text


def csrf(text: str) -> str:
    return next(f["value"] for f in Page(text).all("input") if f.get("name") == "csrf_token") or ""


def test_a_failed_download_is_dismissed(panel, signed_in):
    token = csrf(signed_in.get("/admin/models/activity").text)
    signed_in.post("/admin/models/pull", data={"model": "org/typo", "csrf_token": token})
    until(lambda: "Dismiss" in signed_in.get("/admin/models/activity").text)
    assert "org/typo was not found" in signed_in.get("/admin/models/activity").text
    done = signed_in.post("/admin/models/download/dismiss", data={"model": "org/typo", "csrf_token": token})
    assert done.status_code == 200
    assert "org/typo was not found" not in signed_in.get("/admin/models/activity").text


def test_discover_and_first_run_offer_models_that_fit_without_asking_the_hub(panel, signed_in):
    before = len(panel.hub.seen)
    page = signed_in.get("/admin/models/discover").text
    assert "qwen3:0.6b" in page
    assert "Embeddings" in page
    assert page.count("/admin/models/pull") > 3
    assert re.search(r"<summary>\d+ do not fit here as published</summary>", page)
    first = signed_in.get("/admin/first-run").text
    assert re.search(r"<h3>(Quick|Balanced|Best|Smallest): ", first)
    rows = signed_in.get("/admin/api/recommended").json()["models"]
    assert {row["purpose"] for row in rows} >= {"chat", "code", "vision", "embedding"}
    assert len(panel.hub.seen) == before
    asked = signed_in.post("/admin/models/refresh-recommended", data={"csrf_token": csrf(page)})
    assert asked.status_code == 502  # this hub describes none of them
    assert len(panel.hub.seen) > before


def test_an_adapter_without_its_base_is_not_offered_in_the_chat(panel, signed_in):
    registry = Registry(panel.box.paths.registry_file)
    registry.set_alias("pirate", Alias("builtin", adapter="0" * 32))
    registry.set_alias("orphan", Alias("org/deleted", adapter="1" * 32))
    try:
        offered = re.findall(r"<option[^>]*>(\w+)</option>", signed_in.get("/admin/chat").text)
        assert "pirate" in offered
        assert "orphan" not in offered
        assert signed_in.get("/admin/models/adapters").text.count("org/deleted is not on this disk") == 1
    finally:
        registry.remove_alias("pirate")
        registry.remove_alias("orphan")


def test_adapters_are_shown_beside_a_broken_list_of_models(panel, signed_in):
    file = panel.box.paths.registry_file
    before = file.read_bytes() if file.exists() else None
    file.write_text("{")
    try:
        assert signed_in.get("/admin/models/adapters").status_code == 200
    finally:
        file.unlink() if before is None else file.write_bytes(before)


def test_an_adapter_on_its_way_from_the_hub_shows_its_progress_and_is_cancelled(panel, signed_in, tmp_path):
    config = json.loads((BUILTIN_DIR / "config.json").read_text())
    shapes = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    folder = write_adapter(tmp_path / "a", plain_tensors(*shapes, rank=64), r=64)
    panel.hub.repos["org/pirate"] = StubRepo({path.name: path.read_bytes() for path in folder.iterdir()})
    address = "/admin/models/adapters"
    form = {"csrf_token": csrf(signed_in.get(address).text), "name": "pirate", "base": "builtin"}
    form["source"] = "org/pirate"

    def shown(*texts: str) -> bool:
        page = signed_in.get(address).text
        return all(text in page for text in texts)

    panel.hub.hold_after = 16_384
    fragment = {"HX-Request": "true"}
    try:
        with ThreadPoolExecutor(1) as pool:
            adding = pool.submit(signed_in.post, f"{address}/add", data=form, headers=fragment)
            until(lambda: shown("from org/pirate", " kB of 131.4 kB", "downloading", "Cancel"))
            again = signed_in.post(f"{address}/add", data=form, headers=fragment)
            assert (again.status_code, "being downloaded from the hub" in again.text) == (409, True)
            ended = signed_in.post(f"{address}/cancel", data=form, headers=fragment)
            assert ended.status_code == 200
            told = adding.result(PATIENCE)
            assert (told.status_code, "was not added: its download was cancelled" in told.text) == (200, True)
            assert not shown("from org/pirate")
            assert signed_in.post(f"{address}/cancel", data=form, headers=fragment).status_code == 404
        panel.hub.hold_after = None
        told = signed_in.post(f"{address}/add", data=form, headers=fragment)
        assert "pirate is builtin with an adapter of rank 64." in told.text
        assert not shown("from org/pirate")
        assert shown("pirate")
    finally:
        panel.hub.hold_after = None
        panel.hub.go_on.set()
        signed_in.post(f"{address}/remove", data=form)


def test_fifty_tabs_are_served_by_one_poller_and_leave_nothing(panel, signed_in):
    """Each has the fragments of its page; ticks come as to one reader; no descriptor stays open."""
    views = ["overview", "models", "activity", "memory", "requests"]
    pid = panel.box.running.pid
    cookie = "; ".join(f"{name}={value}" for name, value in signed_in.cookies.items())
    before = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    limits = httpx.Limits(max_connections=None)
    with ExitStack() as tabs:
        browser = tabs.enter_context(
            httpx.Client(base_url=panel.url, limits=limits, timeout=PATIENCE, headers={"Cookie": cookie})
        )
        paths = [f"/admin/live/{views[number % len(views)]}" for number in range(50)]
        opening = [browser.stream("GET", path) for path in paths]
        with ThreadPoolExecutor(len(paths)) as pool:  # headers come with the first event
            opened = list(pool.map(tabs.enter_context, opening))
        assert {tab.status_code for tab in opened} == {200}
        streams = [tab.iter_lines() for tab in opened]
        for lines in streams:
            assert any(line.startswith("event: ") for line in lines)
        with signed_in.stream("GET", "/admin/api/events") as feed:
            lines = feed.iter_lines()
            times = []
            while len(times) < 3:
                if next(lines) == "event: tick":
                    times.append(json.loads(next(lines).removeprefix("data: "))["time"])
        assert len(set(times)) == 3
        panel.complete()  # requests are answered beside them
    until(lambda: len(list(Path(f"/proc/{pid}/fd").iterdir())) <= before + 4)
    assert panel.box.running.pid == pid
    assert signed_in.get("/admin").status_code == 200
