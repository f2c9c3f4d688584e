"""Chat templates: messages to prompt ids, such that only the template writes control tokens.

Control-token literals in a client's text are wrapped in marker characters before rendering. Afterwards the
tokenizer is shown a text in which the marked literals are broken apart: it finds the template's own control
tokens, and every span between two of them that held a marked literal is encoded again by a tokenizer
without added tokens. Spans without marks keep the ids of the first pass, so ordinary messages give exactly
what the tokenizer gives for the rendered text.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tokenizers import Tokenizer

from llmbox.engine.errors import ModelError

from ..errors import ApiError
from ..images.source import ImageSource
from ..sandbox.pool import TemplatePool, job
from ..util.threads import off_loop
from .tokenizer.text_encoder import SpecialTokenMarkers
from .tokenizer.tokenizer_safety import MOST_ADDED

_RESERVED: Final = frozenset(
    {
        *(
            "messages",
            "tools",
            "documents",
            "chat_template",
            "add_generation_prompt",
            "continue_final_message",
        ),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("additional_special_tokens", "raise_exception", "strftime_now", "namespace", "self"),
    }
)
"""Template variables that the server sets; a request cannot override them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Input of a template. Message contents are strings, with `image_mark` where an image stands."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    images: tuple[ImageSource, ...] = ()
    image_mark: str = ""
    """Text that no message has by itself; empty without images."""


_IMAGE_PART: Final = re.compile(r"""['"]image(?:_url)?['"]""")
"""Type of a part in a template that reads content in parts."""
_LONGEST = 1024
"""Longest added token, in characters."""
_Trie = dict[str, "_Trie"]
"""Children by the next character; the empty text marks an end."""


class ControlTokens:
    """Literals that a client's text must not turn into tokens."""

    def __init__(self, tokenizer: Tokenizer, named: frozenset[str]) -> None:
        """`named` are tokens that the model's files call special. Raises ModelError for too many."""
        added = tokenizer.get_added_tokens_decoder()
        if len(added) > MOST_ADDED or any(len(t.content) > _LONGEST for t in added.values()):
            problem = f"more than {MOST_ADDED} added tokens, or one of more than {_LONGEST} characters"
            raise ModelError(f"tokenizer.json: {problem}")
        special = [t.content for t in added.values() if t.special or t.content in named]
        self._special = _any_of(special)
        self._all = _any_of([t.content for t in added.values()])

    def mark(self, value: Any, markers: SpecialTokenMarkers, *, every: bool) -> Any:
        """Wrap literals in all strings inside `value`; `every` takes those that are not special as well."""
        if isinstance(value, str):
            pattern = self._all if every else self._special
            return pattern.sub(f"{markers.start}\\g<0>{markers.end}", value)
        if isinstance(value, dict):
            return {key: self.mark(item, markers, every=every) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item, markers, every=every) for item in value]
        return value


def _any_of(literals: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern for the longest of these, as a trie: its time does not grow with their number.

    Raises ModelError if hundreds of them are prefixes of each other.
    """
    trie: _Trie = {}
    for literal in literals:
        node = trie
        for char in literal:
            node = node.setdefault(char, {})
        node[""] = {}
    try:
        return re.compile(_trie_regex(trie) if trie.keys() - {""} else r"(?!)")
    except (RecursionError, re.error, OverflowError):
        raise ModelError("tokenizer.json: too many of its added tokens are prefixes of each other") from None


def _trie_regex(trie: "_Trie") -> str:
    prefix = ""
    while len(trie) == 1 and "" not in trie:  # no branch: no group, of which regexes may not nest many
        ((char, trie),) = trie.items()
        prefix += re.escape(char)
    branches = [re.escape(char) + _trie_regex(node) for char, node in trie.items() if char]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in trie else ''}"


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Prompt as text; `ids` tokenizes it (which takes time where it is long)."""

    marked: str
    markers: SpecialTokenMarkers
    encode: Callable[[str, SpecialTokenMarkers], list[int]]

    def with_images(self, placeholder: str, texts: Sequence[str]) -> "RenderedChat":
        """Return the prompt with its placeholders replaced by the texts of images. Raises ApiError where
        the template has written another number of them. A client's own literals stand behind a marker.
        """
        pieces = re.split(f"(?<!{re.escape(self.markers.start)}){re.escape(placeholder)}", self.marked)
        if len(pieces) != len(texts) + 1:
            raise ApiError(
                400,
                f"The model's chat template has {len(pieces) - 1} places for {len(texts)} images.",
                code="chat_template_error",
                param="messages",
            )
        marked = "".join(piece + text for piece, text in zip(pieces, (*texts, ""), strict=True))
        return replace(self, marked=marked)

    @property
    def text(self) -> str:
        return self.marked.replace(self.markers.start, "").replace(self.markers.end, "")

    def ids(self) -> list[int]:
        return self.encode(self.marked, self.markers)


def number_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have Kimi K2's ids: its template writes ids where others write names."""
    names: dict[str, str] = {}
    made: list[dict[str, Any]] = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            number = f"functions.{call['function']['name']}:{len(names)}"
            names[call["id"] or number] = number
            calls.append({**call, "id": number})
        changed: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if message.get("tool_call_id") in names:
            changed["tool_call_id"] = names[message["tool_call_id"]]
        made.append({**message, **changed})
    return made


async def render_chat(
    pool: TemplatePool,
    template: str,
    special_tokens: dict[str, str],
    control: ControlTokens,
    chat: Chat,
    encode: Callable[[str, SpecialTokenMarkers], list[int]],
    placeholder: str = "",
) -> RenderedChat:
    """Render a chat. `encode` turns the text with its marks into ids. `placeholder`: text of an image's
    place, for models that read images.
    """
    _check_kwargs(chat.template_kwargs, special_tokens)
    size = sum(len(message["content"]) for message in chat.messages)
    markers, work = await off_loop(size, lambda: _job(template, special_tokens, control, chat, placeholder))
    text = await pool.render(work)
    if chat.continue_final_message:
        text = _cut(text, markers.tail)
    return RenderedChat(text, markers, encode)


def _check_kwargs(kwargs: dict[str, Any], special_tokens: dict[str, str]) -> None:
    reserved = kwargs.keys() & (_RESERVED | special_tokens.keys())
    if reserved:
        raise ApiError(
            400,
            f"Invalid value for 'chat_template_kwargs': {min(reserved)!r} belongs to the model and its chat "
            "template and cannot be set by a request.",
            code="invalid_value",
            param="chat_template_kwargs",
        )


def _job(
    template: str, special_tokens: dict[str, str], control: ControlTokens, chat: Chat, placeholder: str
) -> tuple[SpecialTokenMarkers, bytes]:
    spoken = json.dumps([chat.messages, chat.tools, chat.template_kwargs], ensure_ascii=False)
    markers = SpecialTokenMarkers.absent_from(template + spoken)
    # Earlier answers of the model may hold tokens such as </think>, which templates look for.
    messages = [control.mark(m, markers, every=m["role"] != "assistant") for m in chat.messages]
    if chat.continue_final_message:
        messages[-1]["content"] += markers.tail + " "
    if placeholder:
        messages = [with_parts(message, chat.image_mark, template, placeholder) for message in messages]
    tools = control.mark(chat.tools, markers, every=True)
    variables: dict[str, Any] = special_tokens | {"tools": tools, "documents": None}
    variables |= control.mark(chat.template_kwargs, markers, every=True)
    variables |= {"messages": messages, "add_generation_prompt": chat.add_generation_prompt}
    return markers, job(template, variables)


def with_parts(message: dict[str, Any], mark: str, template: str, placeholder: str) -> dict[str, Any]:
    """Return a message in the form that a template of a model with images reads: content in parts where the
    template knows parts of images, else the placeholder in the text.
    """
    pieces = message["content"].split(mark) if mark else [message["content"]]
    if not _IMAGE_PART.search(template):
        return {**message, "content": placeholder.join(pieces)}
    if len(pieces) == 1 and "is string" in template:
        return message
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(pieces):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return {**message, "content": parts}


def _cut(text: str, tail: str) -> str:
    """Cut the text after the last message; spaces at its end go where the template trims them."""
    at = text.rfind(tail)
    if at < 0:
        raise ApiError(
            400,
            "The model's chat template does not render the last message as it is, so it cannot be continued.",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(tail + " ", at) else text[:at].rstrip()


def named_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token`, … of tokenizer_config.json or special_tokens_map.json as plain
    strings.
    """
    named = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            named[key] = content
    return named


def pick_template(value: Any, name: str = "default") -> str | None:
    """Return the template of this name: the files hold one, the default, or a list of named ones."""
    if value is None or isinstance(value, str):
        return value if name == "default" else None
    try:
        by_name = value if isinstance(value, dict) else {each["name"]: each["template"] for each in value}
        found = by_name.get(name)
    except (TypeError, KeyError, AttributeError):
        found = 0
    if found is not None and not isinstance(found, str):
        raise ModelError("tokenizer_config.json: chat_template is neither a text nor a list of templates")
    return found
