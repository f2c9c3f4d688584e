"""Prompt and answer of one request, kept where the caller's key allows it. Long texts are cut, and marked as
cut.
"""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentDraft:
    """Draft from the gateway. The writer thread makes `Content` of it, since detokenizing takes time."""

    owner: str
    """Id of the key. It survives rotation and is never reused; empty for callers without one."""
    body: str
    """JSON body of the request as it was sent."""
    prompts: Callable[[], list[str]]
    """Returns the rendered prompts, one for each of the request."""
    outputs: list[str]
    """One text per choice, already cut to the largest size that may be kept."""
    output_bytes: int
    size: int
    """Approximate bytes that the draft takes in memory while it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Kept texts. The `*_bytes` are the original sizes in UTF-8; a shorter text has been cut."""

    owner: str
    body: str
    body_bytes: int
    prompts: list[str]
    prompt_bytes: int
    outputs: list[str]
    output_bytes: int

    @property
    def is_whole(self) -> bool:
        """Return whether the content suffices to send the request again."""
        return len(self.body.encode()) == self.body_bytes

    def cut_parts(self) -> list[tuple[str, int, int]]:
        """Return (name, bytes kept, original bytes) of each part that was cut."""
        parts = (
            ("request", size_of([self.body]), self.body_bytes),
            ("prompt", size_of(self.prompts), self.prompt_bytes),
            ("output", size_of(self.outputs), self.output_bytes),
        )
        return [part for part in parts if part[1] < part[2]]

    def was_cut(self, part: str) -> bool:
        return any(name == part for name, _, _ in self.cut_parts())


class ContentBudget:
    """Limit on the bytes that wait for the disk. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        with self._lock:
            fits = size <= self._left
            self._left -= size if fits else 0
            return fits

    def give_back(self, size: int) -> None:
        with self._lock:
            self._left += size


def make_content(draft: ContentDraft, most: int) -> Content:
    """Make the content, with at most `most` bytes of each part."""
    prompts = draft.prompts()
    (body,) = cut_texts([draft.body], most)
    return Content(
        owner=draft.owner,
        body=body,
        body_bytes=size_of([draft.body]),
        prompts=cut_texts(prompts, most),
        prompt_bytes=size_of(prompts),
        outputs=cut_texts(draft.outputs, most),
        output_bytes=draft.output_bytes,
    )


def cut_texts(texts: Iterable[str], most: int) -> list[str]:
    """Cut texts to at most `most` bytes of UTF-8 in total. No character is split."""
    kept = []
    for text in texts:
        data = text.encode()
        kept.append(text if len(data) <= most else data[:most].decode(errors="ignore"))
        most -= min(most, len(data))
    return kept


def size_of(texts: Iterable[str]) -> int:
    """Bytes of texts in UTF-8."""
    return sum(len(text.encode()) for text in texts)


def to_json(texts: list[str]) -> str:
    return json.dumps(texts, ensure_ascii=False)
