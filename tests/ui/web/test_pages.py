"""Every page of the panel, as a browser without scripts sees it."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from support.panel_box import panel, signed_in

__all__ = ["panel", "signed_in"]

ROOT = Path(__file__).parents[3]
PAGES = [
    "/admin",
    "/admin/first-run",
    "/admin/models",
    "/admin/models/discover",
    "/admin/models/activity",
    "/admin/models/show?ref=builtin",
    "/admin/models/show?ref=builtin&ctx=999999999",
    "/admin/requests",
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


def test_every_link_of_every_page_leads_somewhere(panel, signed_in):
    panel.complete()
    time.sleep(0.5)
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
    with httpx.Client(base_url=panel.url) as stranger:
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
        "/admin/models/pull",
    ],
)
def test_changes_need_the_token_of_the_page(signed_in, path):
    answer = signed_in.post(path, data={"name": "x"})
    assert answer.status_code == 403
    assert "out of date" in answer.text


def test_filters_stand_in_the_address_and_rows_can_be_exported(panel, signed_in):
    panel.complete()
    with panel.client() as anyone:
        anyone.post("/v1/completions", json={"model": "<b>none</b>", "prompt": "x"})
    time.sleep(0.5)
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
    time.sleep(0.5)
    row = signed_in.get("/admin/requests.json?model=tiny").json()["requests"][0]
    page = signed_in.get(f"/admin/requests/{row['id']}").text
    for words in ("Timeline", "From the prefix cache", "curl ", "client.completions.create"):
        assert words in page
    assert signed_in.get("/admin/requests/none").status_code == 404


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
    assert "app" not in re.findall(r'<th scope="row">(\w+)', revoke(signed_in, token, "app"))


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
