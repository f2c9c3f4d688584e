"""Steps and results between rank 0 and its workers: frames of JSON and int32 on an inherited socket.

    frame = JSON bytes u32 | integer bytes u32 | JSON | int32...

No pickle, no network. No msgspec either: the engine's runner works where only torch is installed.

Workers keep mirrors of the running requests, so that a decoding request costs one token and now and then one
KV block. A request that runs again after a preemption is sent again in full.

Where steps overlap, a mirror lacks the tokens that rank 0 does not know yet: each rank sampled them itself.
"""

import contextlib
import json
import socket
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any, Final

from ..core.request import Request
from ..core.step import ImagePiece, SampledToken, ScheduledRequest, StepPlan, StepResult
from ..errors import RankLost
from ..ipc.messages import PreparedImage, TokenLogprobs
from ..sampling_params import SamplingParams

_HEADER: Final = struct.Struct("<II")
NUMBER: Final = "i"


@dataclass(frozen=True, slots=True)
class Frame:
    kind: str
    body: dict[str, Any] = field(default_factory=dict)
    numbers: "array[int]" = field(default_factory=lambda: array(NUMBER))

    def encode(self) -> bytes:
        text = json.dumps([self.kind, self.body], separators=(",", ":")).encode()
        numbers = self.numbers.tobytes()
        return _HEADER.pack(len(text), len(numbers)) + text + numbers


class Link:
    """One end of the socket; sends and receives block."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, frame: bytes) -> None:
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise RankLost(f"the other rank is gone: {error}") from error

    def receive(self) -> Frame:
        """Receive one frame. Raises RankLost at the end of the stream."""
        text_size, numbers_size = _HEADER.unpack(self._exactly(_HEADER.size))
        kind, body = json.loads(self._exactly(text_size))
        numbers = array(NUMBER)
        numbers.frombytes(self._exactly(numbers_size))
        return Frame(kind, body, numbers)

    def end(self) -> None:
        """Shut the stream down, from any thread: pending and later calls at both ends raise RankLost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise RankLost(f"the other rank is gone: {error}") from error
            if not count:
                raise RankLost("the other rank closed its end")
            view = view[count:]
        return data


_DEFAULTS = SamplingParams(max_tokens=0)
_IN_MASKS = {"grammar", "triggers", "thinking"}
"""Parameters that workers meet in the masks alone."""
_ROW = 9
# Integers of a row: number, start, tokens, flags, admission, pending, new ids, new blocks, mask.
_SAMPLES, _HAS_WINDOW, _HAS_STATE, _HAS_DRAFTS, _HAS_MASKS, _SAVE = 1, 2, 4, 8, 16, 32
# Flags of a row, and the unit of the number of states that it saves.
_MASK_UNIT = 4
# Bytes of a grammar mask per integer.
_GRAPH = "graph"
_ADAPTERS = "adapters"
_IMAGES = "images"
_GONE = -1
"""Admission of a mirrored request that has left, by which runners recognize its stale state."""


@dataclass(slots=True)
class _Mirror:
    """State of a request's mirror on the workers, in one of its admissions."""

    number: int
    request: Request
    admission: int
    tokens: int = 0
    blocks: int = 0
    """Sent blocks of its table, which only grows during an admission."""
    window_blocks: int = 0

    @property
    def is_gone(self) -> bool:
        return self.request.admissions != self.admission


class StepEncoder:
    """Rank 0's side: encodes steps as differences to the mirrors on the workers."""

    def __init__(
        self, embeddings: Callable[[Sequence[ScheduledRequest]], dict[ImagePiece, bytes]] | None = None
    ) -> None:
        """`embeddings`: returns those of images in the rows of a step."""
        self._embeddings = embeddings
        self._mirrors: dict[int, _Mirror] = {}
        """Keyed by `id`: each entry holds its request, so that no other object can get the same id."""
        self._next = 0

    def encode(self, plan: StepPlan, graph: int = 0) -> Frame:
        """Encode one step.

        Integers: counts of finished requests, block copies, state copies and rows; numbers of the requests
        that ceased to run since the last step; (source, destination) of each copy; the rows, see `_row`; then
        the embeddings of images.

        `graph`: size that a decoding step is padded to, see `decode_graph`.
        """
        gone = self._forget_gone()
        copies = [*plan.copies, *plan.state_copies]
        counts = len(gone), len(plan.copies), len(plan.state_copies), len(plan.rows)
        numbers = array(NUMBER, [*counts, *gone])
        for pair in copies:
            numbers.extend(pair)
        new: dict[str, Any] = {_GRAPH: graph} if graph else {}
        if plan.adapter_loads:
            new[_ADAPTERS] = plan.adapter_loads
        for row in plan.rows:
            known = self._mirrors.get(id(row.request))
            if known is None:
                known = self._mirrors[id(row.request)] = _Mirror(self._next, row.request, row.admission)
                self._next += 1
                new[str(known.number)] = _introduction(row.request)
            self._row(numbers, row, known)
        if self._embeddings is not None and any(row.request.images for row in plan.rows):
            new[_IMAGES] = _append_images(numbers, self._embeddings(plan.rows))
        return Frame("step", new, numbers)

    def _forget_gone(self) -> list[int]:
        gone = [key for key, known in self._mirrors.items() if known.is_gone]
        return [self._mirrors.pop(key).number for key in gone]

    def _row(self, numbers: "array[int]", row: ScheduledRequest, known: _Mirror) -> None:
        """Append the integers of `_ROW`, then the new ids, the new blocks, the mask, the saves; then what the
        flags say: its state slot, drafts with their number, masks after them with their number and sizes, new
        blocks of sliding windows with their number. Blocks freed behind the window are not sent: they are not
        read.
        """
        request = row.request
        ids = request.token_ids[known.tokens :]
        added = request.block_table[known.blocks :]
        flags = _SAMPLES * row.samples + _HAS_WINDOW * bool(request.window_table)
        flags += _HAS_STATE * (request.state_slot >= 0) + _HAS_DRAFTS * bool(row.drafts)
        flags += _HAS_MASKS * bool(row.draft_masks) + _SAVE * len(row.saves)
        numbers.extend((known.number, row.start, row.num_tokens, flags, row.admission))
        mask = _as_numbers(request.mask) if row.samples else array(NUMBER)
        numbers.extend((request.num_pending, len(ids), len(added), len(mask)))
        numbers.extend(ids)
        numbers.extend(added)
        numbers.extend(mask)
        for save in row.saves:
            numbers.extend(save)
        if flags & _HAS_STATE:
            numbers.append(request.state_slot)
        if row.drafts:
            numbers.extend((len(row.drafts), *row.drafts))
        if row.draft_masks:
            masks = [_as_numbers(each) for each in row.draft_masks]
            numbers.extend((len(masks), *map(len, masks)))
            for each in masks:
                numbers.extend(each)
        if request.window_table:
            more = request.window_table[known.window_blocks :]
            numbers.extend((len(more), *more))
            known.window_blocks += len(more)
        known.tokens += len(ids)
        known.blocks += len(added)


class StepDecoder:
    """Worker's side: decodes steps and maintains the mirrors of requests."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def decode(self, frame: Frame) -> StepPlan:
        numbers = iter(frame.numbers)
        gone, copies, states, rows = islice(numbers, 4)
        for number in islice(numbers, gone):
            self._requests.pop(number).admissions = _GONE
        pairs = [(next(numbers), next(numbers)) for _ in range(copies + states)]
        decoded = [self._row(numbers, frame.body) for _ in range(rows)]
        loads = [(slot, folder) for slot, folder in frame.body.get(_ADAPTERS, ())]
        embeddings = _taken_images(frame) if _IMAGES in frame.body else {}
        return StepPlan(decoded, pairs[:copies], pairs[copies:], loads, embeddings)

    def _row(self, numbers: Iterator[int], new: dict[str, Any]) -> ScheduledRequest:
        number, start, tokens, flags, admission, pending, num_ids, added, mask = islice(numbers, _ROW)
        ids, blocks = list(islice(numbers, num_ids)), list(islice(numbers, added))
        allowed = array(NUMBER, islice(numbers, mask)).tobytes()
        saves = list(islice(numbers, flags // _SAVE * 2))
        slot = next(numbers) if flags & _HAS_STATE else -1
        drafts = list(islice(numbers, next(numbers))) if flags & _HAS_DRAFTS else []
        sizes = list(islice(numbers, next(numbers))) if flags & _HAS_MASKS else []
        masks = [array(NUMBER, islice(numbers, size)).tobytes() or None for size in sizes]
        window = list(islice(numbers, next(numbers))) if flags & _HAS_WINDOW else []
        request = self._requests.get(number)
        if request is None:
            request = self._requests[number] = _introduced(new[str(number)], ids)
        else:
            request.token_ids += ids
        request.block_table += blocks
        request.window_table += window
        request.admissions, request.num_pending, request.state_slot = admission, pending, slot
        request.mask = allowed or None
        pairs = tuple(zip(saves[::2], saves[1::2], strict=True))
        samples = bool(flags & _SAMPLES)
        return ScheduledRequest(request, start, tokens, samples, admission, drafts, pairs, masks)


def decode_graph(frame: Frame) -> int:
    """Return the size that rank 0 pads this step to; 0: no padding."""
    return int(frame.body.get(_GRAPH, 0))


def _as_numbers(mask: bytes | None) -> "array[int]":
    """Pad the mask with zero bytes, bits of ids beyond the vocabulary, which samplers do not read."""
    numbers = array(NUMBER)
    if mask is not None:
        numbers.frombytes(mask + bytes(-len(mask) % _MASK_UNIT))
    return numbers


def _introduction(request: Request) -> list[Any]:
    params = {
        field.name: value
        for field in fields(SamplingParams)
        if field.name not in _IN_MASKS
        and (value := getattr(request.params, field.name)) != getattr(_DEFAULTS, field.name)
    }
    values = [request.request_id, request.num_prompt, params, request.adapter_slot, request.is_long]
    # Workers need the places of images, not their pixels.
    return values + [
        [each.content_hash.hex(), *each.grid, each.start, each.num_tokens, each.num_rows]
        for each in request.images
    ]


def _append_images(numbers: "array[int]", embeddings: dict[ImagePiece, bytes]) -> list[list[Any]]:
    """Append the embeddings to the integers of a step; return whose they are, and how many bytes each has."""
    for each in embeddings.values():
        numbers.frombytes(each + bytes(-len(each) % numbers.itemsize))
    return [[name.hex(), first, end, len(each)] for (name, first, end), each in embeddings.items()]


def _taken_images(frame: Frame) -> dict[ImagePiece, bytes]:
    """Read back the embeddings that `_append_images` appended."""
    listed = frame.body[_IMAGES]
    size = frame.numbers.itemsize
    start = len(frame.numbers) - sum(-(-nbytes // size) for *_, nbytes in listed)
    found = {}
    for name, first, end, nbytes in listed:
        stop = start + -(-nbytes // size)
        found[bytes.fromhex(name), first, end] = frame.numbers[start:stop].tobytes()[:nbytes]
        start = stop
    return found


def _introduced_image(values: Sequence[Any]) -> PreparedImage:
    content_hash, rows, columns, start, num_tokens, num_rows = values
    return PreparedImage(
        content_hash=bytes.fromhex(content_hash),
        tiles=[],
        pixels=b"",
        grid=(rows, columns),
        start=start,
        num_tokens=num_tokens,
        num_rows=num_rows,
    )


def _introduced(values: Sequence[Any], ids: list[int]) -> Request:
    request_id, num_prompt, params, adapter_slot, is_long, *images = values
    return Request(
        request_id=request_id,
        prompt_ids=ids[:num_prompt],
        params=_params(params),
        images=[_introduced_image(each) for each in images],
        token_ids=ids,
        adapter_slot=adapter_slot,
        is_long=is_long,
    )


def _params(sent: dict[str, Any]) -> SamplingParams:
    """Restore tuples and integer keys: JSON has lists and string keys only."""
    values = {"max_tokens": 0, **sent}
    for name, value in sent.items():
        if name == "bad_words":
            values[name] = tuple(map(tuple, value))
        elif name == "logit_bias":
            values[name] = {int(token): bias for token, bias in value.items()}
        elif isinstance(value, list):
            values[name] = tuple(value)
    return SamplingParams(**values)


def encode_result(result: StepResult) -> Frame:
    """Encode a result. A token without log-probabilities costs its request's name and its id."""
    body = {
        "tokens": {name: token.token_id for name, token in result.tokens.items()},
        "logprobs": {
            name: asdict(token.logprobs)
            for name, token in result.tokens.items()
            if token.logprobs is not None
        },
        "accepted": {
            name: [(each.token_id, each.logprobs and asdict(each.logprobs)) for each in tokens]
            for name, tokens in result.accepted.items()
        },
        "prompts": {
            name: [asdict(entry) for entry in entries] for name, entries in result.prompt_logprobs.items()
        },
        "failed": result.failed,
        "pooled": {name: sums.tolist() for name, sums in result.pooled.items()},
    }
    return Frame("result", body)


def decode_result(frame: Frame) -> StepResult:
    body = frame.body
    logprobs = {name: _logprobs(entry) for name, entry in body["logprobs"].items()}
    tokens = {name: SampledToken(token, logprobs.get(name)) for name, token in body["tokens"].items()}
    prompts = {name: [_logprobs(entry) for entry in entries] for name, entries in body["prompts"].items()}
    pooled = {name: array("q", sums) for name, sums in body["pooled"].items()}
    accepted = {
        name: [SampledToken(token, entry and _logprobs(entry)) for token, entry in entries]
        for name, entries in body["accepted"].items()
    }
    return StepResult(tokens, prompts, body["failed"], pooled, accepted)


def _logprobs(entry: dict[str, Any]) -> TokenLogprobs:
    top = [(token, logprob) for token, logprob in entry["top"]]
    return TokenLogprobs(token_id=entry["token_id"], logprob=entry["logprob"], rank=entry["rank"], top=top)
