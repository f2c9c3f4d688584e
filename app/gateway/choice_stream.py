"""Outputs of one choice: token ids to text deltas, hashes of outputs, embeddings of length 1."""

import base64
import hashlib
import hmac
import logging
import math
import secrets
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from llmbox.engine.ipc.messages import RequestOutput, TokenLogprobs

from ..engines.request_journal import TokenStream
from ..text.stop_strings import RepeatedCalls, StopStrings
from ..text.tokenizer.detokenizer import Detokenizer
from ..util.atomic_file import write_whole
from .generation import Delta, Generation, TokenEntry

REPEATS_CALLS = "The answer was ended: it repeated the same tool calls (thinking_loop_detection)."


class ChoiceStream:
    """Converts the outputs of one token stream into deltas, with constant work per token."""

    def __init__(self, index: int, generation: Generation, stream: TokenStream) -> None:
        self.index = index
        self.stream = stream
        self.output_tokens = 0
        self.finish_reason: str | None = None
        self._text = generation.model.text
        self._detokenizer: Detokenizer = self._text.detokenizer(
            begins=generation.starts_new_text, skip_special=generation.skip_special
        )
        self._stops = StopStrings(generation.stop, keep=generation.keep_stop) if generation.stop else None
        self._calls = RepeatedCalls(generation.call_mark) if generation.call_mark else None
        self._remarks = generation.remarks
        self._keep_stop = generation.keep_stop
        self._min_tokens = generation.params.min_tokens
        self._silent = generation.max_tokens == 0
        self._push = self._detokenizer.push
        self._entries: deque[TokenEntry] | None = (
            deque() if generation.params.logprobs is not None and not self._silent else None
        )
        self._plain = not (generation.stop or generation.call_mark or self._silent) and self._entries is None
        """Text alone is wanted, and the engine ends the answer."""
        self._decoded = 0
        self._given = 0

    @property
    def output_ids(self) -> list[int]:
        """Token ids fed so far, up to a stop string: the engine may have generated a few more."""
        return self.stream.output_ids[: self.output_tokens]

    @property
    def stop_string(self) -> str | None:
        """Stop string that ended the answer, or None."""
        return None if self._stops is None else self._stops.matched

    def feed(self, output: RequestOutput) -> Delta:
        """Convert one output that is no `error` and no `abort`. A complete stop string aborts the engine's
        work.
        """
        if self._plain and output.finish_reason is None:
            ids = output.token_ids
            self.output_tokens += len(ids)
            text = self._push(ids[0]) if len(ids) == 1 else "".join(map(self._push, ids))
            return Delta(self.index, text, ids, [], None, output.prompt_logprobs)
        if self._silent:
            self.finish_reason = output.finish_reason and "length"
            return Delta(self.index, "", [], [], self.finish_reason, output.prompt_logprobs)
        if output.vector is not None:
            self.finish_reason = output.finish_reason
            return Delta(self.index, "", [], [], self.finish_reason, vector=output.vector)
        ids = output.token_ids
        self.output_tokens += len(ids)
        spoken = ids[:-1] if output.stop_token_id is not None and not self._keep_stop else ids
        text = self._decode(spoken, output.logprobs)
        reason = output.finish_reason
        if reason is not None and not self._stopped:
            text += self._rest()
        if (self._stops is not None or self._calls is not None) and self._stopped:
            reason = "stop"
            self.stream.cancel()
            if self._repeats_calls and REPEATS_CALLS not in self._remarks:
                self._remarks.append(REPEATS_CALLS)
        self._given += len(text)
        self.finish_reason = reason
        entries = self._release(reason) if self._entries else []
        return Delta(self.index, text, ids, entries, reason, output.prompt_logprobs)

    @property
    def _stopped(self) -> bool:
        return self.stop_string is not None or self._repeats_calls

    @property
    def _repeats_calls(self) -> bool:
        return self._calls is not None and self._calls.matched

    def _decode(self, ids: list[int], logprobs: list[TokenLogprobs] | None) -> str:
        given = []
        before = self.output_tokens - len(ids)
        for i, token_id in enumerate(ids):
            if self._entries is not None and logprobs is not None:
                data = self._text.tokens[token_id]
                self._entries.append(TokenEntry(self._decoded, data, logprobs[i]))
            piece = self._push(token_id)
            self._decoded += len(piece)
            if self._stops is not None and before + i >= self._min_tokens:
                piece = self._stops.push(piece)
            if self._calls is not None:
                piece = self._calls.push(piece)
            given.append(piece)
            if self._stopped:
                break
        return "".join(given)

    def _rest(self) -> str:
        """Flush the held-back text at an end without a stop string. It may still complete one."""
        text = self._detokenizer.finish()
        if self._stops is not None:
            text = self._stops.push(text)
            text += "" if self._stopped else self._stops.finish()
        return text if self._calls is None else self._calls.push(text) + self._calls.finish()

    def _release(self, reason: str | None) -> list[TokenEntry]:
        """Entries of the tokens that begin inside the text given so far; at the end, all that were not cut
        off.
        """
        assert self._entries is not None
        everything = reason is not None and not self._stopped
        released = []
        while self._entries and (everything or self._entries[0].start < self._given):
            released.append(self._entries.popleft())
        return released


class AnswerBuffer:
    """Collects the texts of a request's choices, up to a limit of bytes, for the request log."""

    def __init__(self, choices: int, most_bytes: int) -> None:
        self._pieces: list[list[str]] = [[] for _ in range(choices)]
        self._room = most_bytes
        self.size = 0
        """Bytes of UTF-8 added, kept or not."""

    def add(self, delta: Delta) -> None:
        size = len(delta.text.encode())
        self.size += size
        if self._room > 0:  # the piece that crosses the limit is kept whole: the writer cuts it
            self._room -= size
            self._pieces[delta.index].append(delta.text)

    @property
    def texts(self) -> list[str]:
        return ["".join(pieces) for pieces in self._pieces]


log = logging.getLogger(__name__)

_BYTES = 32


class OutputHasher:
    """Hasher of token ids, keyed by this installation's secret."""

    def __init__(self, file: Path) -> None:
        self._secret = _read(file)

    def of(self, outputs: Sequence[Sequence[int]]) -> str:
        """Hash the token ids of every choice. Empty where there are none, or where no secret can be kept."""
        if not self._secret or not any(outputs):
            return ""
        keyed = hmac.new(self._secret, digestmod="sha256")
        for output in outputs:
            keyed.update(len(output).to_bytes(8, "little"))
            keyed.update(array("I", output).tobytes())
        return f"{hashlib.sha256(self._secret).hexdigest()[:8]}:{keyed.hexdigest()}"


def _read(file: Path) -> bytes:
    """Read the secret, creating it at the first start. Empty while the disk cannot hold it."""
    try:
        if not file.exists():
            write_whole(file, secrets.token_bytes(_BYTES))
        secret = file.read_bytes()
    except OSError as error:
        log.warning("answers cannot be compared with later ones: %s: %s", file, error.strerror)
        return b""
    if len(secret) != _BYTES:
        log.warning("answers cannot be compared with later ones: %s is damaged; remove it", file)
        return b""
    return secret


def same(one: str, other: str) -> bool | None:
    """Compare two hashes. None when unknown: a hash is missing, or the secret has changed since."""
    if not one or not other or one.partition(":")[0] != other.partition(":")[0]:
        return None
    return hmac.compare_digest(one, other)


def unit_vector(pooled: bytes, dimensions: int | None) -> "array[float]":
    """Truncate and normalize a vector. `pooled`: little-endian float32 of any length. A vector of zeros stays
    zero.
    """
    numbers = array("f", pooled)
    if sys.byteorder == "big":
        numbers.byteswap()
    numbers = numbers[:dimensions]
    length = math.hypot(*numbers)
    return array("f", [number / length for number in numbers]) if length else numbers


def as_base64(vector: "array[float]") -> str:
    """Encode as base64 of little-endian float32, as OpenAI's library reads it."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64.b64encode(vector).decode()
