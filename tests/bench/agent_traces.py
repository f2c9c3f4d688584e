"""Recorded traffic of agents for `draft_cost.py`: prompts and the answers given to them, as token ids.

tools    a loop of tool calls: records come as JSON and go back with a field changed, between short notes
edits    a file of this repository is written again with some lines changed
quotes   an answer about a page of docs/ that quotes paragraphs of it among other sentences
forms    fields that a JSON schema names are filled in from a letter, under its grammar
adverse  the worst text for lookups: the last tokens stood before, and what followed them never follows

The texts are those of this repository and of seeded scripts. A token is a word with the space before it, six
letters of a long one, or a sign: about as much as a token of a published vocabulary.

A random model does not write such answers, so `follow` makes an engine draw the recorded token where it would
have drawn another one. Every row is computed, sampled and verified as always; only the result is replaced, in
the engine with drafts and in the one without.
"""

import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

from llmbox.engine.core.engine import Engine
from llmbox.engine.ipc.messages import Vocabulary

ROOT = Path(__file__).parents[2]
FIRST_ID = 1000
PIECE = re.compile(r" ?\w{1,6}|\s+| ?[^\w\s]")
NOTES = "docs/operations.md", "docs/security.md", "docs/reliability.md", "docs/models.md"


JSON_PIECE = re.compile(r" ?\w{1,6}| ?[^\w\s]{1,3}|\s+")
"""Signs of JSON stand together, as in published vocabularies."""


class TracedAnswer(NamedTuple):
    prompt: list[int]
    answer: list[int]
    grammar: str | None = None
    vocabulary: Vocabulary | None = None
    """Of the engine, for the grammar."""


class Tokens:
    """Ids of pieces of text, in the order of their first appearance."""

    def __init__(self, piece: re.Pattern[str] = PIECE) -> None:
        self._piece = piece
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._ids.setdefault(piece, FIRST_ID + len(self._ids)) for piece in self._piece.findall(text)]

    def vocabulary(self) -> Vocabulary:
        """Return these and, as the first ids, single bytes."""
        texts = (
            [bytes([byte]) for byte in range(256)]
            + [b""] * (FIRST_ID - 256)
            + [i.encode() for i in self._ids]
        )
        return Vocabulary(data=b"".join(texts), sizes=list(map(len, texts)), special=[])


def follow(engine: Engine, scripts: dict[str, list[int]]) -> None:
    """Make the engine draw the tokens of `scripts`, by request id. A request without one is left alone."""
    sampler: Any = engine.executor.runner._sampler  # type: ignore[attr-defined]
    sample = sampler.sample

    def recorded(logits: Any, requests: Any) -> Any:
        picks = sample(logits, requests)
        for pick, request in zip(picks, requests, strict=True):
            if request.request_id in scripts:
                pick.token_id = scripts[request.request_id][request.num_output]
        return picks

    sampler.sample = recorded


def make_traces(kind: str, count: int, seed: str) -> list[TracedAnswer]:
    """Return `count` answers of one kind, other ones for each seed."""
    rng, tokens = random.Random(f"{kind} {seed}"), Tokens()
    if kind == "adverse":
        return _adverse(count, rng)
    if kind == "forms":
        tokens = Tokens(JSON_PIECE)
        pairs = [[tokens.encode(text) for text in _form(rng)] for _ in range(count)]
        return [TracedAnswer(*pair, _schema_grammar(), tokens.vocabulary()) for pair in pairs]
    make = {"tools": _tool_turn, "edits": _edit, "quotes": _quote}[kind]
    return [TracedAnswer(*map(tokens.encode, make(rng))) for _ in range(count)]


def _sentences(rng: random.Random, count: int) -> str:
    text = (ROOT / rng.choice(NOTES)).read_text()
    found = [each.strip() for each in re.findall(r"[A-Z][^.|`]{40,200}\.", text)]
    return " ".join(rng.sample(found, min(count, len(found)))).replace("\n", " ")


def _record(rng: random.Random) -> dict[str, Any]:
    return {
        "order_id": f"ord_{rng.randrange(16**10):010x}",
        "customer": {
            "name": rng.choice(["Ada", "Grace", "Edsger", "Barbara"]),
            "account": rng.randrange(10**6),
        },
        "status": rng.choice(["open", "packed", "shipped", "returned"]),
        "items": [
            {
                "sku": f"{rng.choice('ABCD')}-{rng.randrange(10**5)}",
                "quantity": rng.randrange(1, 9),
                "price": rng.randrange(9999),
            }
            for _ in range(rng.randrange(2, 5))
        ],
        "updated_at": f"2026-0{rng.randrange(1, 9)}-1{rng.randrange(9)}T08:{rng.randrange(10, 60)}:00Z",
    }


def _tool_turn(rng: random.Random) -> tuple[str, str]:
    records = [_record(rng) for _ in range(4)]
    tool = {"name": "update_order", "parameters": {"order": {"type": "object"}, "reason": {"type": "string"}}}
    prompt = f"You are an agent with tools.\n{json.dumps(tool)}\n{_sentences(rng, 3)}\nTool result:\n"
    prompt += "\n".join(json.dumps(record) for record in records)
    answer = f"I found {len(records)} orders. {_sentences(rng, 1)}\n"
    for record in rng.sample(records, 2):
        record["status"] = "cancelled"
        call = {"name": "update_order", "arguments": {"order": record, "reason": _sentences(rng, 1)[:40]}}
        answer += f"<tool_call>\n{json.dumps(call)}\n</tool_call>\n"
    return prompt, answer


def _form(rng: random.Random) -> tuple[str, str]:
    """Return a letter, and its order as JSON: numbers and names stand in both, the fields in the answer."""
    order = _record(rng)
    ids = f"{order['order_id']} of {order['customer']['name']}, account {order['customer']['account']}"
    items = "; ".join(f"{i['quantity']} times {i['sku']} at {i['price']} each" for i in order["items"])
    letter = (
        f"{_sentences(rng, 2)} Order {ids}, last changed {order['updated_at']}: {items}. {_sentences(rng, 2)}"
    )
    return f"{letter}\nIt is {order['status']}. Fill in the form.\n", json.dumps(order)


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema_grammar() -> str:
    """Return the grammar of `_record`, as the daemon writes it for a request with this JSON schema."""
    text, number = {"type": "string"}, {"type": "integer"}
    items = {"type": "array", "items": _closed({"sku": text, "quantity": number, "price": number})}
    fields = {"order_id": text, "customer": _closed({"name": text, "account": number})}
    fields |= {
        "status": {"enum": ["open", "packed", "shipped", "returned"]},
        "items": items,
        "updated_at": text,
    }
    schema = {**_closed(fields), "x-guidance": {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?"}}
    top = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @answer'}
    return json.dumps({"grammars": [top, {"name": "answer", "json_schema": schema}]})


def _edit(rng: random.Random) -> tuple[str, str]:
    files = sorted(
        path
        for folder in ("engine/core", "engine/planning", "app/text")
        for path in (ROOT / folder).glob("*.py")
    )
    lines: list[str] = []
    while len(lines) < 45:
        lines = rng.choice(files).read_text().splitlines()
    start = rng.randrange(0, len(lines) - 40)
    lines = lines[start : start + 40]
    changed = list(lines)
    for place in sorted(rng.sample(range(len(changed)), 3), reverse=True):
        changed[place] = changed[place].replace("self", "this").replace("return", "yield")
        changed.insert(place, f"    # {_sentences(rng, 1)[:60]}")
    prompt = f"Change this file as the review says. {_sentences(rng, 2)}\n```python\n" + "\n".join(lines)
    return prompt + "\n```\n", "Here is the changed file:\n```python\n" + "\n".join(changed) + "\n```\n"


def _quote(rng: random.Random) -> tuple[str, str]:
    text = (
        ROOT / rng.choice(["docs/kv-cache.md", "docs/speculation.md", "docs/architecture.md"])
    ).read_text()
    paragraphs = [each for each in text.split("\n\n") if 200 < len(each) < 700 and "|" not in each]
    page = rng.sample(paragraphs, 4)
    answer = f"{_sentences(rng, 1)}\n\n"
    for paragraph in rng.sample(page, 2):
        answer += f"> {paragraph}\n\n{_sentences(rng, 1)}\n\n"
    return f"Answer with quotes from this page.\n\n{_sentences(rng, 1)}\n\n" + "\n\n".join(page), answer


def _adverse(count: int, rng: random.Random) -> list[TracedAnswer]:
    """Return texts of few ids in which no token is the one that followed the last four or two before."""
    found = []
    followers: dict[tuple[int, ...], int] = {}  # of all texts: answers are kept
    for _ in range(count):
        own: dict[tuple[int, ...], int] = {}
        text = [rng.randrange(FIRST_ID, FIRST_ID + 10) for _ in range(4)]
        while len(text) < 4 + 96 + 160:
            endings = [tuple(text[-size:]) for size in (4, 2)]
            wrong = {known[ending] for known in (own, followers) for ending in endings if ending in known}
            token = rng.choice([each for each in range(FIRST_ID, FIRST_ID + 10) if each not in wrong])
            for ending in endings:
                own[ending] = followers[ending] = token
            text.append(token)
        found.append(TracedAnswer(text[:100], text[100:]))
    return found
