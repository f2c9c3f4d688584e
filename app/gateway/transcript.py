"""The answer's text while it is made, where it may be kept: no more of it than anybody keeps."""

from .generation import Delta


class Transcript:
    def __init__(self, choices: int, most_bytes: int) -> None:
        self._pieces: list[list[str]] = [[] for _ in range(choices)]
        self._room = most_bytes
        self.size = 0
        """Bytes of UTF-8 that there were, kept or not."""

    def add(self, delta: Delta) -> None:
        size = len(delta.text.encode())
        self.size += size
        if self._room > 0:  # the piece that crosses the limit is whole: the writer cuts it
            self._room -= size
            self._pieces[delta.index].append(delta.text)

    @property
    def texts(self) -> list[str]:
        return ["".join(pieces) for pieces in self._pieces]
