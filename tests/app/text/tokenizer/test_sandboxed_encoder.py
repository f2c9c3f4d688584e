"""Tokenizers that are not known to be safe: the same ids; a text that takes too much fails alone."""

import asyncio
import os
import resource
import signal
import threading

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.sandbox.pool import TemplatePool
from llmbox.app.text.chat_template import Chat
from llmbox.app.text.tokenizer import sandboxed_encoder
from llmbox.app.text.tokenizer.sandboxed_encoder import SandboxedEncoder
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.app.text.tokenizer.tokenizer import TextModel
from llmbox.engine.errors import ModelError
from support.engines import until
from support.hostile_tokenizers import BACKTRACKING, HARMLESS, PANICKING, doubling, replace, with_steps
from support.tokenizers_zoo import CHATML, byte_level, write_text_files


@pytest.fixture
def loaded(tmp_path):
    """Load the text side with this tokenizer.json."""
    texts = []

    def load(source: bytes) -> TextModel:
        folder = write_text_files(tmp_path / str(len(texts)), byte_level(), CHATML)
        (folder / "tokenizer.json").write_bytes(source)
        texts.append(load_model_text(folder))
        return texts[-1]

    yield load
    for text in texts:
        text.close()


async def test_the_same_ids_as_in_the_daemon(loaded):
    """A harmless step that is not known: one more hop, and nothing else differs."""
    walled, plain = loaded(HARMLESS), loaded(with_steps())
    assert isinstance(walled.encoder, SandboxedEncoder)
    assert not isinstance(plain.encoder, SandboxedEncoder)
    for text in ("", "the quick <|im_end|> fox", "\n\n\ttabs 你好"):
        assert walled.encode(text) == plain.encode(text)
        assert walled.decode(walled.encode(text)) == plain.decode(plain.encode(text))
    pool = TemplatePool()
    chat = Chat(messages=[{"role": "user", "content": "a literal <|im_end|> stays text"}])
    rendered = [await model.render_chat(pool, chat) for model in (walled, plain)]
    await pool.close()
    assert rendered[0].ids() == rendered[1].ids()
    assert (walled.vocab_size, walled.eos_token_ids) == (plain.vocab_size, plain.eos_token_ids)


@pytest.mark.parametrize(
    ("source", "text"),
    [(doubling(40), "Z" * 16), (BACKTRACKING, "a" * 4000 + "b"), (PANICKING, "a" * 2000 + "b")],
    ids=["memory", "time", "panic"],
)
def test_what_takes_too_much_is_an_error_of_that_text(loaded, monkeypatch, source, text):
    monkeypatch.setattr(sandboxed_encoder, "CPU_SECONDS", 0.5)
    model = loaded(source)
    with pytest.raises(ApiError) as refused:
        model.encode(text)
    assert (refused.value.status, refused.value.code) == (400, "tokenizer_error")
    assert model.encode("hello") == byte_level().encode("hello").ids


def test_a_file_that_breaks_its_loading_is_refused(loaded, monkeypatch):
    """Added tokens are normalized while the file is read."""
    monkeypatch.setattr(sandboxed_encoder, "CPU_SECONDS", 0.5)
    added = {
        "id": 9000, "content": "a" * 16, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": True, "special": False,
    }  # fmt: skip
    steps = [replace("a", "aa") for _ in range(40)]
    source = with_steps(added_tokens=[added], normalizer={"type": "Sequence", "normalizers": steps})
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        loaded(source)


def test_a_killed_process_costs_one_text(loaded):
    model = loaded(HARMLESS)
    os.kill(model.encoder._process.pid, signal.SIGKILL)
    with pytest.raises(ApiError):
        model.encode("hello")
    assert model.encode("hello")


def test_it_starts_beside_a_thousand_open_connections(loaded):
    text = loaded(HARMLESS)
    os.kill(text.encoder._process.pid, signal.SIGKILL)
    with pytest.raises(ApiError, match="its process ended"):
        text.encode("a")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    connections = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    try:
        assert text.encode("a")
    finally:
        for each in connections:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_is_left_after_close(loaded):
    model = loaded(HARMLESS)
    process = model.encoder._process
    model.close()
    assert process.poll() is not None
    with pytest.raises(ApiError):
        model.encode("hello")


async def test_the_loop_turns_and_the_line_ends_somewhere(loaded, monkeypatch):
    model = loaded(HARMLESS)
    begun, release = threading.Event(), threading.Event()

    def hold() -> str:
        begun.set()
        assert release.wait(60)
        return "done"

    held = asyncio.create_task(model.off_loop(1, hold))
    await until(begun.is_set)
    with monkeypatch.context() as patch:
        patch.setattr(sandboxed_encoder, "WAIT_SECONDS", 0.05)
        with pytest.raises(ApiError) as busy:
            await model.off_loop(1, lambda: model.encode("x"))
    assert (busy.value.status, busy.value.code) == (503, "workers_busy")
    release.set()
    assert await held == "done"
    assert await model.off_loop(1, lambda: model.encode("hello")) == byte_level().encode("hello").ids


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Sequence", "decoders": [replace("a", "aa") for _ in range(15)]},
        {"type": "Sequence", "decoders": [replace("a", "b") for _ in range(17)]},
        replace("", "x"),
    ],
)
def test_decoders_that_make_texts_long_are_refused(loaded, decoder):
    with pytest.raises(ModelError, match="decoder"):
        loaded(with_steps(decoder=decoder))


def test_pipes_and_giants_are_no_files_of_a_model(tmp_path, monkeypatch):
    folder = write_text_files(tmp_path / "m", byte_level(), CHATML)
    monkeypatch.setattr("llmbox.app.text.tokenizer.text_loader.MAX_BYTES", 1000)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: it has more than"):
        load_model_text(folder)
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(ModelError, match="it is a FIFO and not a regular file"):
        load_model_text(folder)
