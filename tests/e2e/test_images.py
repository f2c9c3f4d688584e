"""Pictures in each dialect, with its official client, on a tiny model that sees; pictures that are none."""

import base64
import io
import os
import signal
import struct
import zlib

import httpx
import ollama
import pytest
from PIL import Image

from llmbox.app.images import reader
from llmbox.engine.ipc.spawn import Launch
from support.cli_box import PATIENCE
from support.deferred_module import DeferredModule
from support.openai_server import serving
from support.tiny_models import make_tiny_model
from support.vision_models import draw_picture, make_seeing_chat_model

anthropic = DeferredModule("anthropic")
openai = DeferredModule("openai")

MODEL = "seeing"
QUESTION = "the quick brown fox"


def encoded(picture: Image.Image, form: str = "PNG", **options) -> str:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return base64.b64encode(file.getvalue()).decode()


RED = encoded(draw_picture(60, 50))
OTHER = encoded(draw_picture(50, 60))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    limits = {"image_bytes": 300_000, "image_body_bytes": 900_000, "image_pixels": 1_000_000, "images": 4}
    with serving(tmp_path_factory.mktemp("data"), Launch(), controlled=True, **limits) as server:
        options = {"device": "cpu", "threads": 1, "memory_bytes": 512 << 20, "context": 2048}
        server.load(make_seeing_chat_model(root / MODEL), MODEL, dtype="float32", **options)
        server.load(make_tiny_model(root / "blind"), "blind", device="cpu", threads=1, memory_bytes=256 << 20)
        yield server


@pytest.fixture(scope="module")
def client(server):
    with server.client(timeout=PATIENCE) as client:
        yield client


def parts(*images: str, text: str = QUESTION, **fields):
    pictures = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}", **fields}}
        for image in images
    ]
    return [*pictures, {"type": "text", "text": text}]


def ask(client, content, model: str = MODEL, **options):
    fixed = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], **{**fixed, **options}
    )


def refusal(client, content, model: str = MODEL) -> dict:
    answer = httpx.post(
        f"{client.base_url}chat/completions",
        json={"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 2},
        timeout=PATIENCE,
    )
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_a_picture_changes_the_answer_and_is_counted(client):
    seen = ask(client, parts(RED))
    blind = ask(client, QUESTION)
    assert seen.choices[0].message.content != blind.choices[0].message.content
    assert seen.choices[0].message.content != ask(client, parts(OTHER)).choices[0].message.content
    assert seen.usage.prompt_tokens > blind.usage.prompt_tokens + 10


@pytest.mark.parametrize(
    ("kind", "size", "more"),
    [
        ("internvl", (90, 60), 7 * 9 + 3),  # six tiles and the whole; a newline after the marks
        ("glm4v", (60, 50), 20 + 2),
        ("llama4", (60, 50), 5 * 9 + 3 + 4),  # separators behind tiles
        ("llava_clip", (60, 50), 36),
        ("llava_next", (60, 50), 36 + 10 * 13),  # the whole; ten lines of two by two tiles
        ("minicpmv4_6", (120, 60), 3 + 2 * 4 + 2 + 4 + 3),  # two slices, marks around them and a number
    ],
)
def test_other_families_see_a_picture(server, client, tmp_path, kind, size, more):
    options = {"device": "cpu", "threads": 1, "memory_bytes": 256 << 20, "context": 512}
    server.load(make_seeing_chat_model(tmp_path, kind), kind, dtype="float32", **options)
    seen, blind = ask(client, parts(encoded(draw_picture(*size))), kind), ask(client, QUESTION, kind)
    assert seen.choices[0].message.content != blind.choices[0].message.content
    assert seen.usage.prompt_tokens == blind.usage.prompt_tokens + more
    again = ask(client, parts(encoded(draw_picture(*size))), kind)
    assert again.choices[0].message.content == seen.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= 16


def test_a_second_question_about_a_picture_finds_it_in_the_cache(client):
    image = encoded(draw_picture(90, 90))
    first = ask(client, parts(image))
    second = ask(client, parts(image, text="and the other thing"))
    assert second.usage.prompt_tokens_details.cached_tokens >= 16
    assert first.usage.prompt_tokens_details.cached_tokens < 16


def test_low_detail_costs_no_more_tokens(client):
    image = encoded(draw_picture(200, 200))
    low = ask(client, parts(image, detail="low")).usage.prompt_tokens
    assert low <= ask(client, parts(image)).usage.prompt_tokens


def test_streams_and_choices_see_the_same_picture(client):
    whole = ask(client, parts(RED, OTHER)).choices[0].message.content
    stream = ask(client, parts(RED, OTHER), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
    both = ask(client, parts(RED, OTHER), n=2)
    assert [choice.message.content for choice in both.choices] == [whole, whole]


def test_responses_see_it(client):
    chat = ask(client, parts(RED))
    content = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{RED}"},
        {"type": "input_text", "text": QUESTION},
    ]
    answer = client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": content}],
        max_output_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.output_text == chat.choices[0].message.content


def test_messages_see_it(server, client):
    chat = ask(client, parts(RED))
    source = {"type": "base64", "media_type": "image/png", "data": RED}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE) as other:
        answer = other.messages.create(model=MODEL, max_tokens=4, messages=messages)
        counted = other.messages.count_tokens(model=MODEL, messages=messages)
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_ollama_sees_it(server, client):
    chat = ask(client, parts(RED))
    other = ollama.Client(server.url, timeout=PATIENCE)
    message = {"role": "user", "content": QUESTION, "images": [base64.b64decode(RED)]}
    answer = other.chat(MODEL, [message], options={"num_predict": 4, "temperature": 0})
    assert answer.prompt_eval_count == chat.usage.prompt_tokens
    made = other.generate(MODEL, QUESTION, images=[RED], options={"num_predict": 4, "temperature": 0})
    assert made.prompt_eval_count == chat.usage.prompt_tokens


def test_a_request_with_a_picture_outlives_its_engine(server, client):
    whole = ask(client, parts(RED), max_tokens=120).choices[0].message.content
    pieces: list[str] = []
    supervisor = server.services.engines.get(MODEL).supervisor
    for number, chunk in enumerate(ask(client, parts(RED), max_tokens=120, stream=True)):
        if number == 3:
            os.kill(supervisor.pid, signal.SIGKILL)
        pieces += [chunk.choices[0].delta.content or ""] if chunk.choices else []
    assert "".join(pieces) == whole


def bomb() -> str:
    """A PNG of 30,000 x 30,000 pixels in some hundred bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


HOSTILE = {
    "text": (base64.b64encode(b"hello").decode(), "not a PNG, JPEG, WebP or GIF"),
    "empty": ("", "empty"),
    "no base64": ("!!!", "base64"),
    "bomb": (bomb(), "30,000 x 30,000"),
    "truncated": (RED[: len(RED) // 2 // 4 * 4], "cannot be decoded"),
    "large": (base64.b64encode(bytes(300_001)).decode(), "300,001 bytes"),
    "thread": (encoded(Image.new("RGB", (1, 30_000))), "too long"),
    "svg": (base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode(), "not a PNG"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_picture_gets_a_reason(client, case):
    data, why = HOSTILE[case]
    error = refusal(client, parts(data))
    assert error["code"] == "invalid_image"
    assert error["param"] == "messages[0].content[0].image_url"
    assert why in error["message"]


FORMS = {
    "JPEG": {"form": "JPEG"},
    "WebP": {"form": "WEBP"},
    "GIF": {"form": "GIF"},
    "CMYK": {"form": "JPEG", "mode": "CMYK"},
    "gray": {"form": "PNG", "mode": "L"},
    "palette": {"form": "PNG", "mode": "P"},
    "transparent": {"form": "PNG", "mode": "RGBA"},
    "16 bit": {"form": "PNG", "mode": "I;16"},
}


@pytest.mark.parametrize("name", FORMS)
def test_all_kinds_of_files_are_read(client, name):
    kind = dict(FORMS[name])
    picture = draw_picture(60, 50)
    mode = kind.pop("mode", "RGB")
    picture = picture.convert("L").convert(mode) if mode == "I;16" else picture.convert(mode)
    assert ask(client, parts(encoded(picture, **kind)), max_tokens=1).usage.prompt_tokens > 10


def test_an_exif_turn_is_followed(client):
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = ask(client, parts(encoded(draw_picture(120, 48))), max_tokens=1).usage.prompt_tokens
    turned = draw_picture(120, 48).rotate(90, expand=True)
    assert turned.size == (48, 120)
    again = ask(client, parts(encoded(turned, exif=exif)), max_tokens=1)
    assert again.usage.prompt_tokens == upright


def test_what_is_no_picture_is_refused_by_name(client):
    for kind in ("input_audio", "video_url", "file"):
        error = refusal(client, [{"type": kind, kind: {}}, {"type": "text", "text": "hello"}])
        assert error["code"] == "unsupported_content"
    assert refusal(client, parts(RED), model="blind")["code"] == "images_not_supported"
    assert "at most 4 images" in refusal(client, parts(*[RED] * 5))["message"]
    assert "system" in refusal_of_role(client, "system")["message"]


@pytest.mark.parametrize(
    ("path", "block", "told"),
    [
        ("responses", {"type": "input_audio"}, "images of users"),
        ("responses", {"type": "input_image", "file_id": "f"}, "'image_url'"),
        ("messages", {"type": "document", "source": {"type": "file", "file_id": "f"}}, "images of users"),
    ],
)
def test_other_dialects_say_what_is_read(client, path, block, told):
    turns = [{"role": "user", "content": [block]}]
    body = {"input": turns} if path == "responses" else {"messages": turns, "max_tokens": 4}
    answer = httpx.post(f"{client.base_url}{path}", json={"model": MODEL, **body}, timeout=PATIENCE)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_content")
    assert told in error["message"]


def refusal_of_role(client, role: str) -> dict:
    messages = [{"role": role, "content": parts(RED)}, {"role": "user", "content": "hello"}]
    answer = httpx.post(
        f"{client.base_url}chat/completions", json={"model": MODEL, "messages": messages}, timeout=PATIENCE
    )
    assert answer.status_code == 400
    return answer.json()["error"]


def test_urls_are_not_fetched_unless_the_owner_says_so(client):
    content = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]
    assert "server.fetch_images" in refusal(client, content)["message"]


def test_a_body_over_the_limit_is_refused(client):
    answer = httpx.post(
        f"{client.base_url}chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": parts("A" * 2_100_000)}]},
        timeout=PATIENCE,
    )
    assert answer.status_code == 413


def test_placeholders_typed_by_a_user_are_text(client):
    typed = ask(client, [*parts(RED), {"type": "text", "text": "<|image_pad|><|vision_start|>"}])
    assert typed.usage.prompt_tokens > ask(client, parts(RED)).usage.prompt_tokens
    assert ask(client, "<|image_pad|>").choices[0].message.content is not None


def test_pictures_of_open_requests_have_a_limit(client, monkeypatch):
    monkeypatch.setattr(reader, "OPEN_IMAGE_BYTES", 100)
    with pytest.raises(openai.RateLimitError, match="images of open requests"):
        ask(client, parts(RED))
    assert ask(client, QUESTION, max_tokens=1).choices
