"""Prompt and answer of one request, where the caller's key lets us keep them: cut to a cap, which is told."""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentDraft:
    """What the gateway hands over. The writer thread makes `Content` of it, since ids to text takes time."""

    owner: str
    """Id of the key, which stays through rotation and is never given again; empty for callers without one."""
    body: str
    """The request's JSON as it was sent."""
    prompts: Callable[[], list[str]]
    """The rendered prompts, one for each of the request."""
    outputs: list[str]
    """One text a choice, cut already where it is longer than anybody keeps."""
    output_bytes: int
    size: int
    """Bytes, roughly, that this takes while it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The `*_bytes` are what there was, in UTF-8; a text that is shorter has been cut."""

    owner: str
    body: str
    body_bytes: int
    prompts: list[str]
    prompt_bytes: int
    outputs: list[str]
    output_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether the request can be sent again from it."""
        return len(self.body.encode()) == self.body_bytes

    def cut_parts(self) -> list[tuple[str, int, int]]:
        """(name, bytes kept, bytes there were) of each part that was cut."""
        parts = (
            ("request", size_of([self.body]), self.body_bytes),
            ("prompt", size_of(self.prompts), self.prompt_bytes),
            ("output", size_of(self.outputs), self.output_bytes),
        )
        return [part for part in parts if part[1] < part[2]]

    def was_cut(self, part: str) -> bool:
        return any(name == part for name, _, _ in self.cut_parts())


class ContentBudget:
    """Bytes that may wait for the disk. For any thread."""

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


def settle(draft: ContentDraft, most: int) -> Content:
    """At most `most` bytes of each part."""
    prompts = draft.prompts()
    (body,) = cut([draft.body], most)
    return Content(
        owner=draft.owner,
        body=body,
        body_bytes=size_of([draft.body]),
        prompts=cut(prompts, most),
        prompt_bytes=size_of(prompts),
        outputs=cut(draft.outputs, most),
        output_bytes=draft.output_bytes,
    )


def cut(texts: Iterable[str], most: int) -> list[str]:
    """The texts, all together at most `most` bytes of UTF-8 long; no character is halved."""
    kept = []
    for text in texts:
        data = text.encode()
        kept.append(text if len(data) <= most else data[:most].decode(errors="ignore"))
        most -= min(most, len(data))
    return kept


def size_of(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def to_json(texts: list[str]) -> str:
    return json.dumps(texts, ensure_ascii=False)
