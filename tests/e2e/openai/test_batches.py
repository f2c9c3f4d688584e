"""Files and batches as OpenAI's client makes them, on an engine whose tokens are known."""

import io
import json

import httpx
import pytest

from llmbox.app.security.keys import KeySpec
from llmbox.app.store import RecordFilter
from support.cli_box import PATIENCE, until
from support.deferred_module import DeferredModule
from support.fake_engine import write_model
from support.openai_server import serving
from support.tokenizers_zoo import CHATML, byte_level, drawn_ids, write_text_files

openai = DeferredModule("openai")

CHAT = "/v1/chat/completions"
HELLO = {"model": "plain", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with serving(tmp_path_factory.mktemp("data"), file_bytes=100_000, body_bytes=50_000) as server:
        server.load_scripted(root, {"plain": "one two three"}, CHATML)
        tokenizer = byte_level()
        held = write_text_files(root / "held", tokenizer, CHATML)
        write_model(held, **drawn_ids(tokenizer), context=1024, script=[72, 73], hold_at=2)
        server.load(held, "held")
        yield server


@pytest.fixture(scope="module")
def client(server):
    with server.client(timeout=PATIENCE) as client:
        yield client


def line(custom_id: str, body: dict, url: str = CHAT, **more) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}


def upload(client, lines: list[dict] | bytes, name: str = "input.jsonl"):
    text = lines if isinstance(lines, bytes) else b"\n".join(json.dumps(each).encode() for each in lines)
    return client.files.create(file=(name, io.BytesIO(text)), purpose="batch")


def begin(client, lines, endpoint: str = CHAT, **more):
    file = upload(client, lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def ended(client, batch):
    until(lambda: client.batches.retrieve(batch.id).status not in {"in_progress", "cancelling"})
    return client.batches.retrieve(batch.id)


def content(client, file_id: str) -> dict[str, dict]:
    lines = client.files.content(file_id).text.splitlines()
    return {each["custom_id"]: each for each in map(json.loads, lines)}


def test_a_batch_from_its_file_to_its_results(server, client):
    batch = begin(
        client,
        [line("good", HELLO), line("nobody", HELLO | {"model": "nobody"}), line("bad", HELLO | {"n": 99})],
        metadata={"run": "1"},
    )
    assert batch.object == "batch"
    assert (batch.endpoint, batch.completion_window, batch.metadata) == (CHAT, "24h", {"run": "1"})
    assert batch.request_counts.total == 3
    assert batch.expires_at == pytest.approx(batch.created_at + 86_400, abs=1)
    done = ended(client, batch)
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 2)
    assert done.completed_at >= done.created_at
    (good,) = content(client, done.output_file_id).values()
    assert good["custom_id"] == "good"
    assert good["error"] is None
    assert good["response"]["status_code"] == 200
    assert good["response"]["request_id"].startswith("req_")
    assert good["response"]["body"]["choices"][0]["message"]["content"] == "one two three"
    failed = content(client, done.error_file_id)
    assert failed["nobody"]["response"]["status_code"] == 404
    assert failed["nobody"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert failed["bad"]["response"]["body"]["error"]["param"] == "n"
    server.services.request_log.flush()
    rows = server.call(server.services.request_log.query(RecordFilter()))
    assert any(record.endpoint == CHAT and record.client == "batch" for _, record in rows)


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"model": "plain", "prompt": "x"}, "text_completion"),
        ("/v1/embeddings", {"model": "plain", "input": "x"}, "list"),
        ("/v1/responses", {"model": "plain", "input": "x"}, "response"),
    ],
)
def test_every_endpoint(client, endpoint, body, kind):
    done = ended(client, begin(client, [line("one", body, endpoint)], endpoint))
    (told,) = content(client, done.output_file_id).values()
    assert told["response"]["body"]["object"] == kind
    assert done.error_file_id is None


def test_files_are_listed_read_and_deleted(client):
    text = json.dumps(line("one", HELLO)).encode()
    file = upload(client, text, "mine.jsonl")
    assert (file.filename, file.bytes, file.purpose, file.object) == (
        "mine.jsonl",
        len(text),
        "batch",
        "file",
    )
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == text
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    done = ended(client, batch)
    output = client.files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output"
    assert output.bytes == len(client.files.content(output.id).read())
    assert output in list(client.files.list())
    listed = [each.id for each in client.files.list()]
    assert {file.id, output.id} <= set(listed)
    assert listed == [each.id for each in client.files.list(limit=1)]  # page after page
    assert [each.id for each in client.files.list(order="asc")] == listed[::-1]
    assert output.id not in [each.id for each in client.files.list(purpose="batch")]
    assert file.id not in [each.id for each in client.files.list(purpose="batch_output")]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    assert client.files.delete(output.id).deleted
    for gone in (lambda: client.files.retrieve(output.id), lambda: client.batches.retrieve(batch.id)):
        with pytest.raises(openai.NotFoundError):
            gone()


def test_a_file_may_expire(client):
    expires = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("a", b"x"), purpose="batch", expires_after=expires)
    assert file.expires_at == pytest.approx(file.created_at + 3600, abs=1)


def test_batches_are_listed_newest_first(client):
    made = [begin(client, [line("one", HELLO)]).id for _ in range(3)]
    assert [each.id for each in client.batches.list(limit=2)][:3] == made[::-1]
    page = client.batches.list(limit=2)
    assert page.has_more
    with pytest.raises(openai.NotFoundError):
        client.batches.list(after="batch_absent")


def test_what_has_no_answer_yet_can_be_cancelled(client):
    batch = begin(client, [line('ä"\x01', HELLO | {"model": "held"}), line("b", HELLO | {"model": "held"})])
    assert batch.status == "in_progress"
    assert client.batches.cancel(batch.id).status == "cancelled"
    done = client.batches.retrieve(batch.id)
    assert done.output_file_id is None
    assert done.cancelled_at is not None
    told = content(client, done.error_file_id)
    size = len(client.files.content(done.error_file_id).read())
    assert client.files.retrieve(done.error_file_id).bytes == size
    assert {each["error"]["code"] for each in told.values()} == {"batch_cancelled"}
    assert all(each["response"] is None for each in told.values())
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


GOOD = line("one", HELLO)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "the file holds no request"),
        (b"\n\n", "the file holds no request"),
        (b"{", "Line 1 .*not valid JSON"),
        (b"[1]", "Line 1 .*not a JSON object"),
        (b"\xff", "Line 1 .*not UTF-8"),
        (json.dumps(GOOD).encode() + b"\n" + json.dumps(GOOD).encode(), "Line 2 .*'one' occurs twice"),
        (json.dumps(GOOD | {"custom_id": 5}).encode(), "'custom_id' must be a text"),
        (json.dumps(GOOD | {"custom_id": "x" * 513}).encode(), "'custom_id' must be a text"),
        (json.dumps(GOOD | {"method": "GET"}).encode(), "'method' must be 'POST'"),
        (json.dumps(GOOD | {"url": "/v1/models"}).encode(), "'url' must be the batch's endpoint"),
        (json.dumps(GOOD | {"body": [1]}).encode(), "'body' must be an object"),
        (json.dumps(line("one", HELLO | {"stream": True})).encode(), "'body.stream' is not for"),
        (
            json.dumps(line("one", HELLO | {"user": "u" * 50_000})).encode(),
            "Line 1 .*longer than 50000 bytes",
        ),
        (b'{"custom_id": "a", "custom_id": "b"}', "the key 'custom_id' twice"),
        (b'{"custom_id": "\\ud800"}', "half a surrogate pair[.]($|')"),
    ],
)
def test_a_file_that_holds_no_requests_says_where(client, text, why):
    file = upload(client, text)
    with pytest.raises(openai.BadRequestError, match=why) as refused:
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert (refused.value.code, refused.value.param) == ("invalid_batch_file", "input_file_id")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-absent"}, "input_file_id"),
        ({"input_file_id": "../../keys.json"}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1 day"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ],
)
def test_bad_batches(client, fields, param):
    file = upload(client, [GOOD])
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**{**good, **fields})
    assert refused.value.param == param


def test_bad_uploads(server):
    def post(status: int, **options) -> dict:
        answer = httpx.post(server.url + "/v1/files", timeout=PATIENCE, **options)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]

    file = {"file": ("a", b"x")}
    assert post(400, files=file)["param"] == "purpose"
    assert post(400, files=file, data={"purpose": "fine-tune"})["param"] == "purpose"
    assert post(400, files={"other": ("a", b"x")}, data={"purpose": "batch"})["param"] == "file"
    assert post(400, files={"file": (None, b"x")}, data={"purpose": "batch"})["param"] == "file"
    expires = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}
    assert post(400, files=file, data=expires)["param"] == "expires_after.seconds"
    for seconds in ("000003600" + "1" * 400, "000003600" + "1" * 5000, "-3600", "3600.0"):
        refused = post(400, files=file, data={**expires, "expires_after[seconds]": seconds})
        assert refused["param"] == "expires_after.seconds"
    assert post(400, files=[("file", ("a", b"x")), ("file", ("b", b"x"))], data={"purpose": "batch"})
    assert post(415, json={"purpose": "batch"})["code"] == "unsupported_media_type"
    broken = {"Content-Type": "multipart/form-data; boundary=x"}
    assert post(400, content=b"--x\r\nnonsense", headers=broken)["code"] == "invalid_form"
    head = b'--x\r\nContent-Disposition: form-data; name="a"\r\nContent-Type: text/plain; charset=no\r\n\r\n'
    odd = head + b"1\r\n--x--\r\n"
    assert post(400, content=odd, headers=broken)["code"] == "invalid_form"
    assert post(400, content=b"x", headers={"Content-Type": "multipart/form-data"})
    assert post(413, files={"file": ("a", b"x" * 100_001)}, data={"purpose": "batch"})
    elsewhere = httpx.post(server.url + "/v1/completions", files=file, timeout=PATIENCE)
    assert elsewhere.status_code == 415
    foreign = {"Origin": "https://evil.example"}
    assert post(403, files=file, data={"purpose": "batch"}, headers=foreign)["code"] == "cross_site_request"


def test_files_and_batches_belong_to_their_key(server, client):
    keys = server.services.security.keys
    _, mine = keys.add(KeySpec(name="batches-mine"))
    _, other = keys.add(KeySpec(name="batches-other"))
    _, reader = keys.add(KeySpec(name="batches-reader", scopes=("read",)))
    owner, stranger = (server.client(timeout=PATIENCE).with_options(api_key=key) for key in (mine, other))
    batch = begin(owner, [line("one", HELLO)])
    done = ended(owner, batch)
    for who in (stranger, client):
        for ask in (
            lambda who=who: who.batches.retrieve(batch.id),
            lambda who=who: who.batches.cancel(batch.id),
            lambda who=who: who.files.retrieve(batch.input_file_id),
            lambda who=who: who.files.content(done.output_file_id),
            lambda who=who: who.files.delete(done.output_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert batch.id not in [each.id for each in who.batches.list()]
        assert batch.input_file_id not in [each.id for each in who.files.list()]
    with pytest.raises(openai.PermissionDeniedError):
        upload(server.client().with_options(api_key=reader), [GOOD])
    keys.remove("batches-mine")
    keys.remove("batches-other")
    keys.remove("batches-reader")
