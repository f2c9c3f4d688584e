"""The engine's side: the loop, and the channel that never blocks a step."""

import contextvars
import select
import socket
import threading
from dataclasses import replace
from functools import partial

import pytest

from llmbox.engine.config import EngineConfig
from llmbox.engine.executor import build as loader
from llmbox.engine.ipc import channel as channel_module
from llmbox.engine.ipc import messages as m
from llmbox.engine.ipc.channel import Channel, DaemonGone, FrameReader, encode
from llmbox.engine.process import engine_main as process
from llmbox.engine.process.engine_main import serve
from llmbox.kernels.cpu.build import compile_progress
from support.engines import request
from support.fake_engine import FakeEngine, FakeOptions

CONFIG = EngineConfig(model_path="none", name="fake")


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with ours, theirs:
        yield ours, theirs


def read(sock: socket.socket, reader: FrameReader[m.ToDaemon]) -> list[m.ToDaemon]:
    return list(reader.feed(sock.recv(1 << 20)))


def pong(nonce: int) -> m.Pong:
    return m.Pong(nonce=nonce, stats=m.EngineStats())


def test_a_full_socket_does_not_block_and_nothing_is_lost(ends):
    daemon, engine = ends
    channel = Channel(engine, outbox_limit=100_000)
    sent = 0
    while not channel.congested:
        channel.send(pong(sent))
        sent += 1
    reader: FrameReader[m.ToDaemon] = FrameReader(m.ToDaemon)
    received = []
    waiting = threading.Thread(target=channel.receive, kwargs={"block": True})
    waiting.start()  # returns when the daemon has read enough
    while waiting.is_alive():
        if select.select([daemon], [], [], 0.01)[0]:
            received += read(daemon, reader)
    while len(received) < sent:
        channel.receive(block=False)
        received += read(daemon, reader)
    assert [message.nonce for message in received] == list(range(sent))
    assert not channel.congested


def test_messages_are_read_while_congested(ends):
    daemon, engine = ends
    channel = Channel(engine, outbox_limit=1000)
    while not channel.congested:
        channel.send(pong(0))
    daemon.sendall(encode(m.AbortRequest(request_id="r")))
    assert channel.receive(block=True) == [m.AbortRequest(request_id="r")]


def test_the_end_of_the_daemon_is_noticed(ends):
    daemon, engine = ends
    channel = Channel(engine)
    daemon.close()
    with pytest.raises(DaemonGone):
        channel.receive(block=True)
    with pytest.raises(DaemonGone):
        channel.send(pong(1))


def test_a_burst_is_read_between_two_steps_and_answers_share_one_message(ends):
    daemon, engine_end = ends
    wrong = request(50, max_tokens=5000)
    sent = [request(1, 2), wrong, request(2, 9), m.AbortRequest(request_id="r2"), m.Ping(nonce=3)]
    daemon.sendall(b"".join(map(encode, sent)))
    engine = FakeEngine(CONFIG, FakeOptions())
    thread = threading.Thread(target=serve, args=(engine, Channel(engine_end)))
    thread.start()
    reader: FrameReader[m.ToDaemon] = FrameReader(m.ToDaemon)
    received: list[m.ToDaemon] = []
    while not any(isinstance(x, m.StepOutputs) and x.stats.output_tokens == 2 for x in received):
        received += read(daemon, reader)
    daemon.sendall(encode(m.Shutdown()))
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(received[0], m.Pong)
    steps = [x for x in received if isinstance(x, m.StepOutputs)]
    assert len(steps) == 2
    ends_of = {o.request_id: (o.finish_reason, o.error_code) for s in steps for o in s.outputs}
    assert ends_of == {"r1": ("length", None), "r2": ("abort", None), "r50": ("error", "does_not_fit")}


def test_outputs_that_are_too_large_for_one_message_are_sent_one_by_one(ends, monkeypatch):
    daemon, engine_end = ends
    monkeypatch.setattr(channel_module, "encode", partial(encode, max_frame=9000))
    entry = m.TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top=[(5, -0.5)])
    outputs = [
        m.RequestOutput(request_id=name, token_ids=[7], prompt_logprobs=[None, *[entry] * 90])
        for name in ("a", "b", "c")
    ]
    process.send(Channel(engine_end), m.StepOutputs(outputs=outputs, stats=m.EngineStats(steps=3)))
    engine_end.close()
    reader: FrameReader[m.ToDaemon] = FrameReader(m.ToDaemon)
    received: list[m.ToDaemon] = []
    while data := daemon.recv(1 << 20):
        received += reader.feed(data)
    reader.finish()
    assert [output for step in received for output in step.outputs] == outputs
    assert {step.stats.steps for step in received} == {3}


def test_requests_get_the_pixels_that_were_sent_before_them(ends):
    daemon, engine_end = ends
    image = m.PreparedImage(content_hash=b"h", tiles=[(1, 1)], pixels=b"rgb")
    without = replace(image, pixels=b"", start=1)
    sent = [
        m.KeepImages(images=[image]),
        *(request(number, 2, images=[without]) for number in (1, 2)),
        m.KeepImages(drop=[b"h", b"unknown"]),
        request(3, 2, images=[without]),
        m.Shutdown(),
    ]
    daemon.sendall(b"".join(map(encode, sent)))
    engine, seen = FakeEngine(CONFIG, FakeOptions()), []
    engine.add = lambda message: seen.extend(message.images)
    serve(engine, Channel(engine_end))
    assert [each.pixels for each in seen] == [b"rgb", b"rgb", b""]
    assert seen[0] == replace(image, start=1)


class Preparing(FakeEngine):
    """Has two things to prepare, which take their time."""

    prepared = 0

    def prepare(self) -> bool:
        self.prepared += 1
        return self.prepared <= 2


class CountingChannel(Channel):
    reads = 0

    def receive(self, *, block: bool) -> list[m.ToEngine]:
        self.reads += 1
        return super().receive(block=block)


def test_idle_moments_prepare_and_then_sleep(ends):
    daemon, engine_end = ends
    engine, channel = Preparing(CONFIG, FakeOptions()), CountingChannel(engine_end)
    thread = threading.Thread(target=serve, args=(engine, channel))
    thread.start()
    reader: FrameReader[m.ToDaemon] = FrameReader(m.ToDaemon)
    for number in range(3):
        daemon.sendall(encode(m.Ping(nonce=number)))
        assert len(read(daemon, reader)) == 1
    daemon.sendall(encode(m.Shutdown()))
    thread.join(60)
    assert not thread.is_alive()
    assert engine.prepared == 3, "until there was nothing left, and never again"
    assert channel.reads <= 2 + 3 + 1, "a read for each thing prepared and each message: no spinning"


def test_a_message_out_of_turn_is_an_error(ends):
    daemon, engine_end = ends
    daemon.sendall(encode(m.Start(config=CONFIG)))
    with pytest.raises(ValueError, match="out of turn"):
        serve(FakeEngine(CONFIG, FakeOptions()), Channel(engine_end))


def test_gpus_are_named_before_torch_could_start_cuda(monkeypatch):
    done = []
    monkeypatch.setattr(process, "name_gpus", lambda: done.append("named"))
    monkeypatch.setattr(process, "import_torch_or_restart", lambda: done.append("torch"))
    process._import_torch()
    assert done == ["named", "torch"]


def test_a_compile_is_told_before_there_is_anything_to_load(ends, monkeypatch):
    def compile_something():
        compile_progress.get()(1, 3)

    daemon, engine_end = ends
    monkeypatch.setattr(loader, "native_ready", compile_something)
    assert contextvars.copy_context().run(process._import_engine, Channel(engine_end)) is loader.load_engine
    told = read(daemon, FrameReader(m.ToDaemon))
    assert told == [m.Progress(phase="kernels", done=1, total=3)]
