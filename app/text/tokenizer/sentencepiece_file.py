"""SentencePiece models: the fields of a `tokenizer.model` that say how texts are cut."""

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

SPACE: Final = "▁"
LONGEST_PIECE: Final = 512
UNKNOWN, CONTROL, USER, BYTE = 2, 3, 4, 6
"""Kinds of pieces; 1 is an ordinary one."""


class SentencePieceFile:
    """Fields of SentencePiece's ModelProto that say how texts are cut (`sentencepiece_model.proto`)."""

    def __init__(self, data: bytes) -> None:
        self.words: list[str] = []
        self.scores: list[float] = []
        self.kinds: list[int] = []
        self.is_bpe = False
        self.charsmap = b""
        self.add_prefix = self.strips = True
        for field, value in read_fields(data):
            if field == 1:
                self._add(_as_bytes(value))
            elif field == 2:
                self._read_trainer(_as_bytes(value))
            elif field == 3:
                self._read_normalizer(_as_bytes(value))
        if not self.words:
            raise ValueError("it holds no pieces")
        if len(set(self.words)) != len(self.words):
            raise ValueError("it holds a piece twice")

    def _add(self, data: bytes) -> None:
        fields: dict[int, Any] = dict(read_fields(data))
        word = _as_bytes(fields.get(1, b"")).decode("utf-8")
        if len(word) > LONGEST_PIECE:
            raise ValueError(f"a piece has more than {LONGEST_PIECE} characters")
        self.words.append(word)
        self.scores.append(_as_float(fields.get(2, 0)))
        kind = fields.get(3, 1)
        self.kinds.append(kind if isinstance(kind, int) else 1)

    def _read_trainer(self, data: bytes) -> None:
        fields = dict(read_fields(data))
        kind = fields.get(3, 1)
        if kind not in (1, 2):
            raise ValueError("its model type is word or char; only BPE and unigram are supported")
        self.is_bpe = kind == 2

    def _read_normalizer(self, data: bytes) -> None:
        fields = dict(read_fields(data))
        self.charsmap = _as_bytes(fields.get(2, b""))
        self.add_prefix = bool(fields.get(3, 1))
        self.strips = bool(fields.get(4, 1))
        if not fields.get(5, 1):
            raise ValueError("it keeps spaces as they are, which is not supported")

    def byte_pairs(
        self, known: Mapping[str, int], normal: Mapping[str, int], unknown: str | None
    ) -> dict[str, Any]:
        scores = self.scores
        pairs = []
        for piece, number in normal.items():
            for cut in range(1, len(piece)):
                left, right = normal.get(piece[:cut]), normal.get(piece[cut:])
                if left is not None and right is not None:
                    pairs.append((-scores[number], number, left, right, piece[:cut], piece[cut:]))
        pairs.sort()
        return {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": BYTE in self.kinds,
            "vocab": known,
            "merges": [[left, right] for *_, left, right in pairs],
        }

    def unigram(self, known: Mapping[str, int], unknown: str | None) -> dict[str, Any]:
        words = list(zip(self.words, self.scores, strict=True))
        by_number = {number: word for word, number in known.items()}
        lowest = min(self.scores) - 100
        more = range(len(words), max(by_number, default=0) + 1)
        words += [(by_number.get(number, f"<gap_{number}>"), lowest) for number in more]
        unk_id = None if unknown is None else known[unknown]
        return {"type": "Unigram", "unk_id": unk_id, "vocab": words, "byte_fallback": BYTE in self.kinds}


def read_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a protobuf message: integers, or bytes. Raises ValueError."""
    at, size = 0, len(data)
    while at < size:
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        length, at = _read_varint(data, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), at)
        if length < 0 or at + length > size:
            raise ValueError("it is not a SentencePiece model, or it is truncated")
        yield key >> 3, data[at : at + length]
        at += length


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("it is not a SentencePiece model, or it is truncated")


def _as_float(value: Any) -> float:
    found: float = struct.unpack("<f", value)[0] if isinstance(value, bytes) else 0.0
    return found


def _as_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("it is not a SentencePiece model, or it is truncated")  # noqa: TRY004 - of a file
    return value
