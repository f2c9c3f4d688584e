"""Grammars for engines of tiny models: a vocabulary of 320 ids, and what answers must follow."""

import json
from typing import Any

from llmbox.engine.core.engine import Engine
from llmbox.engine.ipc.messages import Vocabulary
from llmbox.engine.sampling_params import ThinkingParams
from support.real_engines import ask

EOS = 2
_SPECIAL = [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]
_LONGER = [
    b"<think>",
    b"</think>",
    b"\n\n",
    b'{"',
    b'": ',
    b'"name',
    b"true",
    b"false",
    b" \n",
    b"12",
    b'"}',
    b">x",
]
TEXTS = [*_SPECIAL, *(bytes([byte]) for byte in range(256)), *_LONGER]
THINK, THOUGHT, BREAK = (TEXTS.index(text) for text in (b"<think>", b"</think>", b"\n\n"))
VOCABULARY = Vocabulary(data=b"".join(TEXTS), sizes=list(map(len, TEXTS)), special=[0, 1, 2])

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "bé"]}, "maxItems": 3},
    },
    "required": ["name", "age", "ok", "tags"],
    "additionalProperties": False,
}


def wrapped(body: dict[str, Any]) -> str:
    top = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @body'}
    return json.dumps({"grammars": [top, {"name": "body", **body}]})


JSON = wrapped({"json_schema": {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}})
REGEX = wrapped({"lark_grammar": "start: /[a-c]{2,4}-[0-9]{1,9}x/"})
CHOICE = wrapped({"lark_grammar": 'start: "red" | "green" | "great"'})


def text_of(ids: list[int]) -> bytes:
    return b"".join(TEXTS[i] for i in ids if i != EOS)


def learned(engine: Engine) -> Engine:
    engine.set_vocabulary(VOCABULARY)
    return engine


def constrained(name: str, grammar: str, max_tokens: int = 90, prompt=(5, 6, 7), **params: Any):
    settings = {"temperature": 1.0, "stop_token_ids": (EOS,), **params}
    if isinstance(begins := settings.get("thinking"), str):
        settings["thinking"] = ThinkingParams(begins=begins)
    return ask(name, prompt, max_tokens, grammar=grammar, **settings)
