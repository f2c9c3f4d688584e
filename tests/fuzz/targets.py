"""Every parser that reads what others wrote: strategies of input, and what must hold whatever comes.

A check may raise only for a bug: each parser's own refusal is caught here by its type.
"""

import contextlib
import json
import struct
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from llmbox.app.config.loader import parse
from llmbox.app.config.settings import SECTIONS
from llmbox.app.errors import ApiError, CliError
from llmbox.app.http.server.request import load
from llmbox.app.sandbox import grammar_worker, template_worker
from llmbox.app.text.output.call_parsers import parse_calls
from llmbox.app.text.output.format_table import OUTPUT_FORMATS
from llmbox.app.text.tokenizer.detokenizer import TokenBytes, decode
from llmbox.app.text.tokenizer.text_encoder import TextEncoder, TokenizeError, load_tokenizer
from llmbox.app.text.tokenizer.tokenizer_safety import find_unsafe_step
from llmbox.engine.checkpoint.safetensors import read_header
from llmbox.engine.errors import ModelError
from llmbox.engine.gguf.reader import read_gguf
from llmbox.engine.ipc import messages
from llmbox.engine.ipc.channel import FrameReader, TransportError
from llmbox.engine.kv_store.block_file import BlockAddress, DamagedBlock, read_block, write_block
from llmbox.engine.model_config.config import parse_config
from support.tiny_models import tiny_config
from support.tokenizers_zoo import byte_level

from .http_bytes import HTTP, check_http
from .strategies import JSON, pieces


class Target(NamedTuple):
    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], None]


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="llmbox-fuzz-"))


# ---- JSON, settings, calls


def check_json(data: bytes) -> None:
    refused: ApiError | None = None
    try:
        told: Any = load(data)
    except ApiError as error:
        refused, told = error, error.body()
    assert refused is None or refused.status == 400
    msgspec.json.encode(told)


def check_settings(text: str) -> None:
    with contextlib.suppress(CliError):
        parse(text, Path("config.toml"))


def check_calls(text: str) -> None:
    for format_ in OUTPUT_FORMATS:
        assert format_.tools is not None
        for call in parse_calls(format_.tools, text) or ():
            msgspec.json.encode([call.name, call.arguments])
            assert isinstance(msgspec.json.decode(call.arguments), dict)


# ---- files of models


def check_config(content: bytes) -> None:
    (folder() / "config.json").write_bytes(content)
    with contextlib.suppress(ModelError):
        assert parse_config(folder()).shape().params > 0


def check_safetensors(content: bytes) -> None:
    (file := folder() / "x.safetensors").write_bytes(content)
    with contextlib.suppress(ModelError):
        for entry in read_header(file).values():
            assert 0 <= entry.offset <= entry.offset + entry.nbytes <= len(content)


def check_gguf(content: bytes) -> None:
    (file := folder() / "x.gguf").write_bytes(content)
    with contextlib.suppress(ModelError):
        read_gguf(file)


KV_MODEL, KV_BLOCK = bytes(range(16)), bytes(number * 7 % 251 for number in range(4096))


@cache
def kv_file(number: int) -> bytes:
    """A block's file; that of another block for each number but 0."""
    where = BlockAddress("owner", bytes([number]) * 20, "kv")
    payload = memoryview(bytes(byte ^ number for byte in KV_BLOCK))
    write_block(folder() / "made.kv", folder() / "made.part", where, KV_MODEL, payload)
    return (folder() / "made.kv").read_bytes()


def check_kv_block(damages: list[tuple[str, int, int]]) -> None:
    """Damage a block's file step by step: it is refused, or it has the content that was written."""
    content = bytearray(kv_file(0))
    for how, place, value in damages:
        at = place % (len(content) + 1)
        match how:
            case "flip" if content:
                content[at - 1] ^= 1 << value % 8
            case "cut":
                del content[at:]
            case "insert":
                content[at:at] = bytes([value])
            case "zero":
                content[at : at + 16 * value] = bytes(len(content[at : at + 16 * value]))
            case "move":
                content[at:] = content[at + value :] + content[at : at + value]
            case "mix":  # a write of another block that was torn
                content[at:] = kv_file(value % 3)[at:]
    (file := folder() / "x.kv").write_bytes(content)
    found = bytearray(len(KV_BLOCK))
    with contextlib.suppress(DamagedBlock):
        read_block(file, BlockAddress("owner", bytes(20), "kv"), KV_MODEL, memoryview(found))
        assert found == KV_BLOCK, "wrong keys and values would be served"


def _safetensors(header: Any, data: int) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


NAMES = st.sampled_from(["a", "b.weight", "../c", "__metadata__"]) | st.text(max_size=4)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8"]) | JSON,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-4, 80), min_size=2, max_size=2) | JSON,
    }
)
CONFIG = tiny_config("qwen3")
CHANGED = st.dictionaries(st.sampled_from(sorted(CONFIG)), JSON, max_size=3)


def check_tokenizer(source: bytes) -> None:
    """What is called safe is: it loads or is refused, and a text becomes no more tokens than it can."""
    if find_unsafe_step(source):
        return
    try:
        tokenizer = load_tokenizer(source)
        decoder = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
        tokens = TokenBytes(tokenizer, decoder)
    except (ValueError, ModelError):
        return
    text = "aa aaa <|im_end|> 12\n\n  \u4f60" * 40
    with contextlib.suppress(TokenizeError):
        ids = TextEncoder(tokenizer).encode(text, special=True)
        assert len(ids) <= 64 * len(text)
        assert len(decode(tokens, ids)) <= 64 * len(text) * 64


TOKENIZER = json.loads(byte_level().to_str())
PATTERN = st.sampled_from(
    [
        {"String": "a"}, {"String": ""}, {"String": " "}, {"Regex": "(a+)+c"}, {"Regex": " {2,}"},
        {"Regex": "\\s+"}, {"Regex": "("}, {},
    ]
)  # fmt: skip
STEP = st.recursive(
    st.fixed_dictionaries(
        {
            "type": st.just("Replace"),
            "pattern": PATTERN,
            "content": st.sampled_from(["", "a", "aa", "a" * 99]),
        }
    )
    | st.fixed_dictionaries(
        {
            "type": st.just("Split"),
            "pattern": PATTERN,
            "behavior": st.just("Isolated"),
            "invert": st.booleans(),
        }
    )
    | st.fixed_dictionaries({"type": st.just("Prepend"), "prepend": st.sampled_from(["", "a", "a" * 500])})
    | st.fixed_dictionaries(
        {
            "type": st.just("Strip"),
            "content": st.sampled_from(["", "a"]),
            "start": st.integers(0, 2**63),
            "stop": st.just(0),
        }
    )
    | st.sampled_from(["NFKD", "Lowercase", "Fuse", "ByteFallback", "Whitespace", "Punctuation"]).map(
        lambda kind: {"type": kind}
    )
    | st.just(TOKENIZER["pre_tokenizer"])
    | JSON,
    lambda inner: st.sampled_from(["normalizers", "pretokenizers", "decoders", "processors"]).flatmap(
        lambda name: st.fixed_dictionaries({"type": st.just("Sequence"), name: st.lists(inner, max_size=20)})
    ),
    max_leaves=8,
)
STEPS = st.dictionaries(
    st.sampled_from(
        ["normalizer", "pre_tokenizer", "decoder", "post_processor", "added_tokens", "truncation"]
    ),
    STEP,
    max_size=3,
)

# ---- frames of the engine, templates, grammars


def check_frames(data: bytes) -> None:
    reader: FrameReader[messages.ToDaemon] = FrameReader(messages.ToDaemon)
    with contextlib.suppress(TransportError):
        list(reader.feed(data))
        reader.finish()


def _framed(bodies: list[bytes]) -> bytes:
    return b"".join(struct.pack("<II", len(body), zlib.crc32(body)) + body for body in bodies)


def check_template(job: dict[str, Any]) -> None:
    answer = template_worker.answer(job)
    assert set(answer) <= {"text", "error"}
    assert all(isinstance(value, str) for value in answer.values())


def check_grammar(grammar: dict[str, Any]) -> None:
    answer = grammar_worker.answer({"grammars": [grammar]})
    assert set(answer) in ({"grammar"}, {"error"})


MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name"]), JSON), max_size=3)
TEMPLATE = pieces(
    "{{ messages }}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ m.content }}",
    "{% if m %}",
    "{% endif %}",
    "{{ m['role'] | tojson }}",
    "{{ ''.__class__ }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{{",
    "}}",
    "{#",
    "{{ raise_exception('x') }}",
    "{{ strftime_now('%Y') }}",
    "{% set x = namespace() %}",
    "{{ x.y.z }}",
)
SCHEMA = st.recursive(
    st.sampled_from([{"type": "string"}, {"type": "integer", "minimum": 3}, {"$ref": "#"}, {"enum": [1]}, {}])
    | st.dictionaries(st.sampled_from(["type", "enum", "pattern", "maxLength", "anyOf", "const"]), JSON),
    lambda inner: (
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.text(max_size=3), inner, max_size=3)}
        )
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.integers(-1, 9)})
        | st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)})
    ),
    max_leaves=6,
)
GRAMMAR = (
    st.fixed_dictionaries({"json_schema": SCHEMA})
    | st.fixed_dictionaries(
        {"regex": pieces("[a-z]", "(", ")", "|", "*", "{1,3}", "\\d", "\\p{L}", "(?i)", "^")}
    )
    | st.fixed_dictionaries(
        {"gbnf": pieces("root ::= ", '"a"', "[a-z]+", " | ", "root", "\n", "x ::= ", "(", ")")}
    )
    | st.fixed_dictionaries(
        {"lark_grammar": pieces("start: ", '"a"', "/b+/", "\n", "%json {", "}", "x: ", "|")}
    )
)

TARGETS = {
    "http": Target(st.binary(max_size=300) | HTTP.map(str.encode), check_http),
    "kv_block": Target(
        st.lists(
            st.tuples(
                st.sampled_from(["flip", "cut", "insert", "zero", "move", "mix"]),
                st.integers(0, 5000),
                st.integers(0, 255),
            ),
            min_size=1,
            max_size=6,
        ),
        check_kv_block,
    ),
    "json": Target(
        st.binary(max_size=200)
        | pieces("{", "}", "[", "]", '"a"', ":", ",", "1", "1e999", "NaN", '"\\ud800"', "9" * 4400).map(
            str.encode
        ),
        check_json,
    ),
    "settings": Target(
        pieces(
            *(f"[{name}]\n" for name in SECTIONS),
            "server",
            ".",
            "port = ",
            "1",
            '"x"',
            "[" * 3000,
            "9" * 4400,
            " = ",
            "{",
            "}",
            "\n",
            "1979-05-27",
            "inf",
            "-",
            "'''",
            "\0",
        ),
        check_settings,
    ),
    "tool_calls": Target(
        pieces(
            '{"name": "f", ',
            '"arguments": {"a": ',
            "}}",
            "NaN",
            "1e999",
            '"\\ud800"',
            "[",
            "]",
            "9" * 4400,
            ",",
        ),
        check_calls,
    ),
    "config.json": Target(
        st.binary(max_size=100) | CHANGED.map(lambda changed: json.dumps({**CONFIG, **changed}).encode()),
        check_config,
    ),
    "tokenizer.json": Target(
        st.binary(max_size=100) | STEPS.map(lambda steps: json.dumps({**TOKENIZER, **steps}).encode()),
        check_tokenizer,
    ),
    "safetensors": Target(
        st.binary(max_size=200)
        | st.builds(_safetensors, st.dictionaries(NAMES, ENTRY | JSON, max_size=4), st.integers(0, 80)),
        check_safetensors,
    ),
    "gguf": Target(
        st.builds(
            lambda tensors, values, rest: struct.pack("<4sIQQ", b"GGUF", 3, tensors, values) + rest,
            st.integers(0, 3) | st.integers(0, 2**64 - 1),
            st.integers(0, 3) | st.integers(0, 2**64 - 1),
            st.lists(
                st.binary(max_size=20)
                | st.integers(0, 13).map(lambda kind: struct.pack("<Q1sI", 1, b"k", kind))
                | st.integers(0, 2**63).map(lambda size: struct.pack("<Q", size)),
                max_size=6,
            ).map(b"".join),
        ),
        check_gguf,
    ),
    "frames": Target(
        st.binary(max_size=300) | st.lists(st.binary(min_size=1, max_size=60), max_size=4).map(_framed),
        check_frames,
    ),
    "template": Target(
        st.fixed_dictionaries(
            {"template": TEMPLATE, "variables": st.fixed_dictionaries({"messages": MESSAGES})}
        ),
        check_template,
    ),
    "grammar": Target(GRAMMAR, check_grammar),
}
