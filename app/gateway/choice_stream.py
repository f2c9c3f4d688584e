"""Stream of one choice: token ids in, text deltas out."""

from collections import deque

from llmbox.engine.ipc.messages import RequestOutput, TokenLogprobs

from ..engines.token_stream import TokenStream
from ..text.stop_strings import StopStrings
from ..text.tokenizer.detokenizer import Detokenizer
from .generation import Delta, Generation, TokenEntry


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
        self._keep_stop = generation.keep_stop
        self._min_tokens = generation.params.min_tokens
        self._silent = generation.max_tokens == 0
        self._entries: deque[TokenEntry] | None = (
            deque() if generation.params.logprobs is not None and not self._silent else None
        )
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
        if self._stopped:
            reason = "stop"
            self.stream.cancel()
        self._given += len(text)
        self.finish_reason = reason
        return Delta(self.index, text, ids, self._release(reason), reason, output.prompt_logprobs)

    @property
    def _stopped(self) -> bool:
        return self._stops is not None and self._stops.matched is not None

    def _decode(self, ids: list[int], logprobs: list[TokenLogprobs] | None) -> str:
        if self._stops is None and self._entries is None and len(ids) == 1:
            return self._detokenizer.push(ids[0])
        given = []
        before = self.output_tokens - len(ids)
        for i, token_id in enumerate(ids):
            if self._entries is not None and logprobs is not None:
                data = self._text.tokens.inner(token_id)
                self._entries.append(TokenEntry(self._decoded, data, logprobs[i]))
            piece = self._detokenizer.push(token_id)
            self._decoded += len(piece)
            if self._stops is not None and before + i >= self._min_tokens:
                piece = self._stops.push(piece)
            given.append(piece)
            if self._stopped:
                break
        return "".join(given)

    def _rest(self) -> str:
        """Flush the held-back text at an end without a stop string. It may still complete one."""
        text = self._detokenizer.finish()
        if self._stops is None:
            return text
        text = self._stops.push(text)
        return text if self._stopped else text + self._stops.finish()

    def _release(self, reason: str | None) -> list[TokenEntry]:
        """Entries of the tokens that begin inside the text given so far; at the end, all that were not cut
        off.
        """
        if not self._entries:
            return []
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
