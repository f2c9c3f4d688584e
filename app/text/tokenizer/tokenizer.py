"""Text side of a model: prompts to token ids, token ids to text. `text_loader.py` makes it of files."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from tokenizers import Tokenizer

from llmbox.engine.model_config.vision.config import VisionConfig

from ...errors import ApiError
from ...sandbox.pool import TemplatePool
from ...util.threads import SMALL, FairSlots
from ..chat_template import Chat, ControlTokens, RenderedChat, number_calls, render_chat
from ..output.format_table import recognize_format
from ..output.output_formats import OutputFormat
from .detokenizer import Detokenizer, TokenBytes, decode
from .sandboxed_encoder import SandboxedEncoder, as_api_error
from .text_encoder import SpecialTokenMarkers, TextEncoder, TokenizeError

T = TypeVar("T")
_THREADS: Final = max(2, min(8, os.cpu_count() or 1))
_ENCODING: Final = FairSlots(_THREADS + 1, most_per_caller=_THREADS)
"""Threads that encode, of all models: one more than a caller may have, which is left to others while it sends
long texts. Each takes up to 200 bytes per token.
"""
_SHORT: Final = 1 << 16
"""Characters of a text that waits for no long one, of its own caller either: it takes a tenth of a second."""
_ENCODING_SHORT: Final = FairSlots(2, most_per_caller=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """Tokenizer, template and defaults of one model. Methods work in the calling thread; large texts belong
    in one of their own.
    """

    tokenizer: Tokenizer
    """Vocabulary of the model. Texts are encoded by `encoder`."""
    encoder: TextEncoder | SandboxedEncoder
    tokens: TokenBytes
    control: ControlTokens
    special_tokens: dict[str, str]
    chat_template: str | None
    tool_template: str | None = None
    """Template of conversations with tools, where the model has a separate one (`tool_use`)."""
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]
    """Sampling values used where a request leaves a field absent."""
    warnings: tuple[str, ...] = ()
    """Ignored declarations in the model's files, and features that will not work."""
    vision: VisionConfig | None = None
    """Vision part of the model."""
    system: str | None = None
    """System prompt of an alias, used where a conversation has no system message."""

    @property
    def vocab_size(self) -> int:
        size: int = self.tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def output_format(self) -> OutputFormat:
        """Form of thoughts and tool calls in answers."""
        return recognize_format(self.tool_template or self.chat_template)

    def beside_embedding(self, rows: int) -> "TextModel":
        """Return a copy with warnings of tokens that an embedding of `rows` rows has no row for."""
        return replace(self, warnings=(*self.warnings, *vocabulary_warnings(self, rows)))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a raw prompt: here the caller writes the template, so special-token literals are tokens."""
        try:
            return self.encoder.encode(text, special=add_special_tokens)
        except TokenizeError as error:
            raise as_api_error(error) from None

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[int | None]]:
        """Encode pairs of texts for a reranker. Returns ids, and where the token types change in each."""
        try:
            made = [self.encoder.encode_pair(first, second) for first, second in pairs]
        except TokenizeError as error:
            raise as_api_error(error) from None
        return [ids for ids, _ in made], [start for _, start in made]

    def encode_marked(self, rendered: str, markers: SpecialTokenMarkers) -> list[int]:
        """Encode a rendered chat (`chat_template.py`)."""
        try:
            return self.encoder.encode_marked(rendered, markers)
        except TokenizeError as error:
            raise as_api_error(error, "messages") from None

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run `work`, which encodes `size` characters, where it cannot hold up the event loop."""
        if isinstance(self.encoder, SandboxedEncoder):
            return await self.encoder.run(work, size)
        if size <= SMALL:
            return work()
        async with (_ENCODING_SHORT if size <= _SHORT else _ENCODING).hold(size):
            return await asyncio.to_thread(work)

    def close(self) -> None:
        """End the process that encodes, if there is one."""
        if isinstance(self.encoder, SandboxedEncoder):
            self.encoder.close()

    def encode_start(self, text: str, most: int) -> list[int]:
        """Encode the beginning of a text as `most` ids. Tokens that the tokenizer adds around a text stay."""
        whole, inner = self.encode(text), self.encode(text, add_special_tokens=False)
        cut = len(whole) - most
        if cut <= 0:
            return whole
        added = len(whole) - len(inner)
        before = next((n for n in range(added + 1) if whole[n : n + len(inner)] == inner), None)
        if before is None or cut > len(inner):
            return whole[:most]
        end = before + len(inner)
        return whole[: end - cut] + whole[end:]

    def beginning(self, text: str, most: int) -> str:
        """Return the text of the first `most` tokens of `text`."""
        ids = self.encode(text, add_special_tokens=False)
        return text if len(ids) <= most else self.decode(ids[:most], skip_special=False)

    def decode(self, ids: Sequence[int], *, begins: bool = True, skip_special: bool = True) -> str:
        return decode(self.tokens, ids, begins=begins, skip_special=skip_special)

    def detokenizer(self, *, begins: bool = True, skip_special: bool = True) -> Detokenizer:
        return Detokenizer(self.tokens, begins=begins, skip_special=skip_special)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, for people: special tokens by name, broken UTF-8 replaced."""
        return self.tokens[token_id].decode("utf-8", "replace")

    async def render_chat(self, pool: TemplatePool, chat: Chat) -> RenderedChat:
        if self.chat_template is None:
            raise ApiError(
                400,
                "This model has no chat template. Send the prompt to /v1/completions instead.",
                code="no_chat_template",
                param="messages",
            )
        self._check_tools(chat)
        if self.system is not None and all(message["role"] != "system" for message in chat.messages):
            chat = replace(chat, messages=[{"role": "system", "content": self.system}, *chat.messages])
        template = (chat.tools and self.tool_template) or self.chat_template
        if self.output_format.name == "kimi_k2":
            chat = replace(chat, messages=number_calls(chat.messages))
        placeholder = "" if self.vision is None else self.vision.placeholder
        return await render_chat(
            pool, template, self.special_tokens, self.control, chat, self.encode_marked, placeholder
        )

    async def renders_late_system(self, pool: TemplatePool) -> bool:
        """Return True if the template renders system messages after a conversation has begun: some refuse
        them or leave them out. It is found by rendering a short conversation. False without a template.
        """
        # At odd and even places: templates that check alternation look at one kind of them only.
        roles = ("user", "system", "user", "assistant", "system", "user")
        mark = "llmbox-late-system"
        messages = [{"role": role, "content": mark if role == "system" else "a"} for role in roles]
        try:
            rendered = await self.render_chat(pool, Chat(messages=messages))
        except ApiError:
            return False
        return rendered.text.count(mark) == roles.count("system")

    def _check_tools(self, chat: Chat) -> None:
        """Refuse tools that the template would leave out."""
        if self.output_format.tools is not None:
            return
        if chat.tools:
            raise _no_tools("tools")
        for i, message in enumerate(chat.messages):
            if message["role"] == "tool" or message.get("tool_calls"):
                raise _no_tools(f"messages[{i}].{'role' if message['role'] == 'tool' else 'tool_calls'}")


def _no_tools(param: str) -> ApiError:
    return ApiError(
        400,
        "This model cannot call tools: its chat template has no place for them, or a format that is not "
        "supported. docs/api.md lists the supported ones under 'Output formats'.",
        code="tools_not_supported",
        param=param,
    )


def vocabulary_warnings(text: TextModel, rows: int) -> list[str]:
    """Return warnings of tokens without an embedding row. `rows`: of the embedding.

    Embeddings are often padded to more rows than there are tokens, which is harmless. The other way round a
    token has no row, and prompts that hold it are refused.
    """
    warnings = [
        f"the end token {id_} is not in the model's vocabulary of {rows} and is ignored"
        for id_ in text.eos_token_ids
        if id_ >= rows
    ]
    tokens = text.tokenizer.get_vocab_size(with_added_tokens=False)
    added = text.tokenizer.get_added_tokens_decoder()
    missing = {id_: token.content for id_, token in sorted(added.items()) if id_ >= rows}
    if tokens > rows:
        warnings.append(
            f"the tokenizer has {tokens} tokens and the embedding {rows} rows: they may not belong together, "
            "and prompts with tokens beyond are refused"
        )
    elif missing:
        first = next(iter(missing))
        warnings.append(
            f"added tokens of the tokenizer have no row in the embedding of {rows} rows: {len(missing)} from "
            f"{first} ({missing[first]}) on; prompts with one are refused"
        )
    template = text.chat_template or ""
    if written := [content for content in missing.values() if content in template]:
        warnings.append(f"the chat template writes {written[0]}, which has no row: chats are refused")
    return warnings
