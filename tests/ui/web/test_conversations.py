"""Conversations of the panel's chat: kept for their owner, checked, searched, deleted with their key."""

from collections.abc import Iterator

import httpx
import pytest

from support.cli_box import PATIENCE

PATH = "/admin/api/conversations"


def saying(*texts: str, **fields: object) -> dict[str, object]:
    messages = [
        {"id": f"m{number}", "parent": f"m{number - 1}" if number else "", "role": role, "content": text}
        for number, (role, text) in enumerate(zip(["user", "assistant"] * len(texts), texts, strict=False))
    ]
    body = {"title": texts[0], "model": "tiny", "messages": messages, "leaf": messages[-1]["id"]}
    return {**body, **fields}


class Caller:
    """Calls with one key."""

    def __init__(self, url: str, secret: str) -> None:
        headers = {"Authorization": f"Bearer {secret}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=PATIENCE)

    def put(self, id_: str, body: object) -> httpx.Response:
        return self.http.put(f"{PATH}/{id_}", json=body)

    def titles(self, text: str = "") -> list[str]:
        rows = self.http.get(PATH, params={"text": text}).json()["conversations"]
        return [row["title"] for row in rows]


@pytest.fixture
def callers(panel) -> Iterator[tuple[Caller, Caller]]:
    names = ("anna", "berta")
    made = [
        Caller(panel.url, panel.box.run("key", "add", name, "--scope", "admin", "--json").json["secret"])
        for name in names
    ]
    yield made[0], made[1]
    for name in names:
        panel.box.run("key", "rm", name, "--yes")


def test_a_conversation_is_kept_found_replaced_and_deleted(callers):
    anna, _ = callers
    assert anna.put("conversation-1", saying("Hello", 'Hi, I am "tiny"')).status_code == 200
    assert anna.put("conversation-2", saying("Other", "Nothing")).status_code == 200
    assert anna.titles() == ["Other", "Hello"]
    assert anna.titles('"tiny"') == ["Hello"]
    assert anna.titles("100%_") == []
    assert anna.put("conversation-1", saying("Hello again", "Yes")).status_code == 200
    assert anna.titles() == ["Hello again", "Other"]
    read = anna.http.get(f"{PATH}/conversation-1").json()
    assert [message["content"] for message in read["messages"]] == ["Hello again", "Yes"]
    assert anna.http.delete(f"{PATH}/conversation-1").status_code == 200
    pictured = saying("Look", "A cat")
    pictured["messages"][0]["images"] = [
        "data:image/jpeg;base64," + "A" * 400_000
    ] * 6  # over limits.body_bytes
    assert anna.put("conversation-3", pictured).status_code == 200
    kept = anna.http.get(f"{PATH}/conversation-3").json()["messages"][0]["images"]
    assert kept == pictured["messages"][0]["images"]
    pictured["messages"][0]["images"] = ["https://elsewhere.test/a.png"]
    assert anna.put("conversation-3", pictured).status_code == 400
    assert anna.http.delete(f"{PATH}/conversation-3").status_code == 200
    assert anna.http.delete(f"{PATH}/conversation-1").status_code == 404
    assert anna.http.get(f"{PATH}/conversation-1").status_code == 404


def test_nobody_else_sees_it_and_it_goes_with_its_key(panel, callers):
    anna, berta = callers
    assert anna.put("conversation-1", saying("mombasa", "zanzibar")).status_code == 200
    assert berta.titles() == []
    assert berta.http.get(f"{PATH}/conversation-1").status_code == 404
    assert berta.http.delete(f"{PATH}/conversation-1").status_code == 404
    local = panel.box.client.get(PATH)
    assert local["conversations"] == []
    files = list(panel.box.paths.data_dir.rglob("*.db*"))
    assert any(b"zanzibar" in file.read_bytes() for file in files)
    assert panel.box.run("key", "rm", "anna", "--yes").code == 0
    assert not any(b"zanzibar" in file.read_bytes() for file in files if file.exists())


@pytest.mark.parametrize(
    ("id_", "body", "status"),
    [
        ("short", saying("Hello"), 400),
        ("conversation-1", saying("Hello", title=""), 400),
        ("conversation-1", saying("Hello", title="x" * 201), 400),
        ("conversation-1", saying("Hello", messages=[{"id": "a"}]), 400),
        ("conversation-1", saying("Hello", unknown=1), 400),
        ("conversation-1", saying(*["Hello"] * 2001), 400),
        ("conversation-1", saying("a", "b", leaf="") | {"messages": saying("a")["messages"] * 2}, 400),
        (
            "conversation-1",
            saying("a", messages=[{"id": "a", "parent": "gone", "role": "user", "content": ""}]),
            400,
        ),
        ("conversation-1", [], 400),
    ],
)
def test_bad_ones_are_refused_with_a_reason(callers, id_, body, status):
    answer = callers[0].put(id_, body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert callers[0].titles() == []


def test_a_key_without_the_scope_admin_has_no_conversations(panel):
    made = panel.box.run("key", "add", "phone", "--json").json["secret"]
    phone = Caller(panel.url, made)
    assert phone.http.get(PATH).status_code == 403
    assert phone.put("conversation-1", saying("Hello")).status_code == 403
    assert httpx.get(panel.url + PATH, timeout=PATIENCE).status_code == 401
