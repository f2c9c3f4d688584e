"""Frames: every message there and back, and nothing but errors from anything else."""

import struct
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc import messages as m
from llmbox.engine.ipc.channel import FrameReader, FrameTooLarge, TransportError, encode
from llmbox.engine.ipc.handover_messages import HandedBlock, HandedBlocks, Prefill, TakenSlots
from llmbox.engine.ipc.profile_messages import (
    AskProfile,
    AskRows,
    BlockHolder,
    BlockMap,
    BlockRun,
    PrefixUse,
    StepProfile,
    WeightRows,
)
from llmbox.engine.sampling_params import SamplingParams, ThinkingParams

PARAMS = SamplingParams(
    max_tokens=5,
    seed=-(2**63),
    logit_bias={3: -1.5, 0: 2.0},
    bad_words=((1, 2), (3,)),
    allowed_token_ids=(1, 2),
    stop_token_ids=(7,),
    logprobs=2,
    grammar="{}",
    thinking=ThinkingParams(begins="may", opener_ids=(1, 2), budget=3),
)
LOGPROBS = m.TokenLogprobs(token_id=1, logprob=-0.25, rank=1, top=[(1, -0.25), (2, -1.5)])
STATS = m.EngineStats(running=1, steps=2, step_seconds=0.5)
INFO = m.ModelInfo(
    name="a", architecture="qwen3", device="cpu", dtype="float32", kv_dtype="float32", backend="reference",
    context_window=1, vocab_size=2, block_size=3, num_blocks=4, weights_bytes=5, kv_bytes=6,
    kv_bytes_per_token=7, workspace_bytes=8, max_running=9, max_concurrency=1.5, load_seconds=0.5,
)  # fmt: skip
ROWS = AskRows(
    file="/models/ü.gguf",
    tensor="output.weight",
    dtype="Q8_0",
    shape=(9, 64),
    offset=1 << 40,
    nbytes=612,
    rows=(3, 1),
)
TO_ENGINE = [
    m.Start(config=EngineConfig(model_path="/models/ü", name="a", threads=2)),
    m.AddRequest(request_id="r", prompt_ids=[1, 2, 3], params=PARAMS, output_ids=[9], fork_of="q"),
    m.AbortRequest(request_id="r"),
    m.Ping(nonce=1),
    m.AskBlocks(),
    Prefill(request_id="r 1", prompt_ids=[3, 4], first_block=1, tenant="t", cache_namespace="n"),
    TakenSlots(slots=[0, 5]),
    AskProfile(seconds=1.5),
    ROWS,
    m.KeepImages(drop=[b"digest"]),
    m.Shutdown(),
    m.Vocabulary(data=b"ab\xff", sizes=[2, 0, 1], special=[1]),
    m.KeepImages(images=[m.PreparedImage(content_hash=b"h", tiles=[(1, 1)], pixels=b"rgb")], drop=[b"old"]),
]
TO_DAEMON = [
    m.Progress(phase="weights", done=1, total=2**40),
    m.Ready(info=INFO),
    m.LoadFailed(code="bad_model", message="no config.json"),
    m.StepOutputs(
        outputs=[
            m.RequestOutput(
                request_id="r", token_ids=[4], logprobs=[LOGPROBS], prompt_logprobs=[None, LOGPROBS]
            ),
            m.RequestOutput(request_id="s", finish_reason="stop", stop_token_id=7, scheduled_at=0.5),
        ],
        stats=STATS,
    ),
    m.Pong(nonce=1, stats=STATS),
    HandedBlocks(
        request_id="r 1", blocks=[HandedBlock(slot=1, kind="kv", block_hash=b"h" * 32)], is_last=True
    ),
    StepProfile(is_on=False, spans={"a": 0.5}, steps=2),
    WeightRows(asked=ROWS, rows=[[0.5, -1.0]]),
    BlockMap(
        block_size=16,
        num_blocks=9,
        runs=[BlockRun(count=9, state="live", owner=0, holders=2)],
        owners=["r"],
        holders=[BlockHolder(request_id="r", blocks=9, shared=0)],
        prefixes=[PrefixUse(prefix="0a", tokens=16, blocks=1, hits=3, last_request="r")],
        evictions=4,
    ),
]


def read(kinds: object, data: bytes, piece: int = 1 << 20) -> list[object]:
    reader: FrameReader[object] = FrameReader(kinds)
    found = [message for i in range(0, len(data), piece) for message in reader.feed(data[i : i + piece])]
    reader.finish()
    return found


def test_all_messages_are_here():
    assert {type(message) for message in TO_ENGINE} == set(m.ToEngine.__args__)
    assert {type(message) for message in TO_DAEMON} == set(m.ToDaemon.__args__)


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize(("kinds", "sent"), [(m.ToEngine, TO_ENGINE), (m.ToDaemon, TO_DAEMON)])
def test_there_and_back_in_any_pieces(kinds, sent, piece):
    received = read(kinds, b"".join(map(encode, sent)), piece)
    assert received == sent
    for before, after in zip(sent, received, strict=True):
        for field in fields(before):
            assert type(getattr(before, field.name)) is type(getattr(after, field.name))


@pytest.mark.parametrize("message", TO_DAEMON)
def test_a_message_on_the_wrong_side_is_refused(message):
    with pytest.raises(TransportError, match="does not belong"):
        read(m.ToEngine, encode(message))


def test_a_cut_message_is_noticed_at_the_end():
    with pytest.raises(TransportError, match="ended inside"):
        read(m.ToEngine, encode(TO_ENGINE[1])[:-1])


def test_too_large_to_send_and_to_receive():
    with pytest.raises(FrameTooLarge):
        encode(TO_ENGINE[1], max_frame=50)
    reader: FrameReader[m.ToEngine] = FrameReader(m.ToEngine, max_frame=50)
    with pytest.raises(TransportError, match="frame of"):
        list(reader.feed(encode(TO_ENGINE[1])))


def test_a_huge_length_is_refused_before_it_is_awaited():
    with pytest.raises(TransportError, match="frame of"):
        read(m.ToEngine, struct.pack("<II", 2**31, 0))


def test_a_payload_of_another_type_is_refused():
    import zlib

    body = b"\x02" + encode(TO_ENGINE[2])[9:]  # an AbortRequest labelled AddRequest
    with pytest.raises(TransportError, match="does not have its type"):
        read(m.ToEngine, struct.pack("<II", len(body), zlib.crc32(body)) + body)


@given(st.binary(max_size=300))
def test_garbage_is_an_error_or_incomplete(data):
    if not data:
        return
    with pytest.raises(TransportError):
        read(m.ToDaemon, data)


@given(st.integers(min_value=0), st.integers(1, 255))
def test_one_changed_byte_never_changes_a_message(position, mask):
    """What is read before the error is a true beginning of what was sent."""
    data = bytearray(b"".join(map(encode, TO_DAEMON)))
    data[position % len(data)] ^= mask
    reader: FrameReader[m.ToDaemon] = FrameReader(m.ToDaemon)
    received = []

    def read_on() -> None:
        received.extend(reader.feed(bytes(data)))
        reader.finish()

    with pytest.raises(TransportError):
        read_on()
    assert received == TO_DAEMON[: len(received)]


def test_facts_of_a_model_can_be_hashed_as_they_arrive() -> None:
    """The daemon looks fingerprints of answers up by them."""
    ready = m.Ready(info=replace(INFO, notes=("lowered",), worker_pids=(1, 2)))
    (arrived,) = FrameReader(m.ToDaemon).feed(encode(ready))
    assert hash(arrived.info) == hash(ready.info)
