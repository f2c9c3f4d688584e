"""Whole engines of several processes: the tokens of one process, and the end of all when one rank is lost."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from llmbox.app.engines.engine_process import SupervisorOptions
from llmbox.app.engines.restart_policy import RestartLimits
from llmbox.app.engines.supervisor import Supervisor
from llmbox.engine.config import EngineConfig
from llmbox.engine.distributed.step_codec import Link
from llmbox.engine.errors import EngineError, ParallelError
from llmbox.engine.executor.expert_load import LoadHistory
from llmbox.engine.executor.workers import Worker, WorkerGroup, all_min_on_worker
from llmbox.engine.hardware.proc import finish
from llmbox.engine.ipc.spawn import Launch
from llmbox.engine.model_config.parallel_layout import ParallelLayout
from llmbox.engine.weights.packed_cache.cache import cache_variables
from support.engines import ForkedEngines, is_running, read, until
from support.lanes import NIGHTLY, nightly
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model, save_sharded, tiny_weights

pytestmark = pytest.mark.slow

LENGTH = 200
PATIENCE = 300.0
"""Seconds: an engine starts three processes that import torch, maybe on a busy core."""


def asks(suffix="", length=LENGTH):
    """Greedy and drawn, with common prefixes, logprobs and penalties."""
    knobs = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_p": 0.9},
        {"temperature": 0.8, "seed": 3, "top_k": 20, "repetition_penalty": 1.2},
        {"logprobs": 2},
    ]
    prompts = [[5, 6, 7] * (1 + 4 * number) for number in range(len(knobs))]
    return [
        ask(f"r{number}{suffix}", prompt, length, **more)
        for number, (prompt, more) in enumerate(zip(prompts, knobs, strict=True))
    ]


@asynccontextmanager
async def supervised(directory, launch=None, **options):
    settings = {"device": "cpu", "memory_bytes": 256 << 20, "threads": 1, **options}
    config = EngineConfig(model_path=str(directory), name="tiny", **settings)
    deaths = RestartLimits(pauses=(0.0,))
    launch = launch or Launch()
    spares = ForkedEngines(launch) if launch.command == Launch().command else None
    supervisor = Supervisor(config, SupervisorOptions(launch=launch, spares=spares, deaths=deaths))
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop()


async def answers(supervisor, requests):
    streams = [supervisor.submit(request) for request in requests]
    return [ids for ids, _ in await all_of(streams)]


async def all_of(streams):
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*(read(stream) for stream in streams))


def expected(directory, **options):
    found = tokens(load(directory, **options), asks())
    return list(found.values())


def ranks_of(supervisor):
    """All but the first, as the engine names them: not every child process of its is a rank."""
    return supervisor.pids[1:]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("llama"), arch="llama", tokenizer=False)


async def test_tp_2_gives_the_tokens_of_one_process_whatever_happens_to_its_ranks(model):
    wanted = expected(model)
    async with supervised(model, tp=2) as supervisor:
        (worker,) = ranks_of(supervisor)
        assert psutil.Process(worker).ppid() == supervisor.pid
        await until(lambda: (supervisor.processor_seconds() or 0) > 0, PATIENCE)  # unknown while one computes
        assert psutil.Process(worker).cmdline()[0] == "llmbox: worker tiny rank 1"
        assert address_of_program(worker) == address_of_program(supervisor.pid), "it was not forked"
        assert sockets(worker)
        assert not sockets(worker) & sockets(supervisor.pid), "it holds the socket to the daemon"
        assert await answers(supervisor, asks("a")) == wanted
        for trouble in (signal.SIGKILL, signal.SIGSTOP):
            await lose_a_rank(supervisor, wanted, trouble)
        last = [supervisor.pid, *ranks_of(supervisor)]
    await until(lambda: not any(map(is_running, last)), PATIENCE)


def address_of_program(pid):
    """-> the same for processes that were forked, another each time that a program is started."""
    return Path(f"/proc/{pid}/auxv").read_bytes()


def sockets(pid):
    links = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
    return {link for link in links if link.startswith("socket:")}


async def lose_a_rank(supervisor, wanted, trouble=signal.SIGKILL, rank=-1):
    """Amid streams, which give the same tokens nevertheless."""
    for attempt in itertools.count():
        before, restarts = [supervisor.pid, *ranks_of(supervisor)], supervisor.restarts
        streams = [supervisor.submit(request) for request in asks(f"b{restarts}-{attempt}")]
        assert await answers_after(lambda pid=before[rank]: os.kill(pid, trouble), streams) == wanted
        if any(stream.resumes for stream in streams):
            break
        await is_whole_again(supervisor, restarts, trouble)
    assert supervisor.restarts == restarts + 1
    assert all(stream.resumes <= 1 for stream in streams)
    assert not any(map(is_running, before)), "nobody is left of the engine that lost a rank"


async def answers_after(trouble, streams):
    reading = asyncio.create_task(all_of(streams))
    await until(lambda: len(streams[0].output_ids) > 5, PATIENCE)
    with contextlib.suppress(ProcessLookupError):  # one that an earlier attempt stopped has ended by now
        trouble()
    return [ids for ids, _ in await reading]


async def is_whole_again(supervisor, restarts, trouble):
    """We were kept from the processor until the last token was there: a rank was lost amid nothing.

    One that was stopped then is noticed with the next step.
    """
    if trouble == signal.SIGKILL:
        await until(lambda: supervisor.restarts > restarts and supervisor.state == "ready", PATIENCE)


@pytest.mark.parametrize("cut", [{"tp": 2}, nightly({"pp": 3})], ids=str)
async def test_ranks_that_launch_ahead_give_those_tokens_and_survive_the_loss_of_one(model, cut, tmp_path):
    """The runner for devices, with CPUs in their place."""
    if "pp" in cut:
        model = make_tiny_model(tmp_path, arch="llama", tokenizer=False, num_hidden_layers=3)
    wanted = expected(model)
    async with supervised(model, overlap=True, **cut) as supervisor:
        assert await answers(supervisor, asks("a")) == wanted
        await lose_a_rank(supervisor, wanted)


async def test_stages_give_the_tokens_of_one_process_and_live_and_die_together(model):
    """A step is on its way in each when one is lost."""
    wanted = expected(model)
    async with supervised(model, pp=2) as supervisor:
        assert await answers(supervisor, asks("a")) == wanted
        await lose_a_rank(supervisor, wanted)
        await lose_a_rank(supervisor, wanted, signal.SIGSTOP)
        ranks = [supervisor.pid, *ranks_of(supervisor)]
        os.kill(ranks[0], signal.SIGKILL)
        await until(lambda: not any(map(is_running, ranks)), PATIENCE)


async def test_shared_stages_survive_whatever_happens_to_any_of_their_ranks(model):
    wanted = expected(model)
    async with supervised(model, tp=2, pp=2) as supervisor:
        assert len(ranks_of(supervisor)) == 3
        for rank, trouble in ((0, signal.SIGSTOP), (2, signal.SIGKILL))[not NIGHTLY :]:
            await lose_a_rank(supervisor, wanted, trouble, rank)


OUT_OF_MEMORY = """
import os, sys
from pathlib import Path
from llmbox.engine.light_torch import import_torch
import_torch()
import torch
from llmbox.engine.process.engine_main import main
from llmbox.engine.runner.cpu_runner import CPUModelRunner

execute, steps, mark, rank_0 = CPUModelRunner.execute, iter(range(10**9)), Path({mark!r}), os.getpid()

def failing(self, plan):
    if os.getpid() != rank_0 and next(steps) == 40 and not mark.exists():
        mark.touch()
        torch.empty(1 << 50)
    return execute(self, plan)

CPUModelRunner.execute = failing
sys.exit(main())
"""


async def test_one_rank_that_runs_out_of_memory_in_a_step_costs_a_restart(model, tmp_path):
    program = OUT_OF_MEMORY.format(mark=str(tmp_path / "mark"))
    wanted = expected(model)
    async with supervised(model, Launch((sys.executable, "-P", "-c", program)), pp=2) as supervisor:
        assert await answers(supervisor, asks("a")) == wanted
        assert supervisor.restarts == 1
        assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("cut", "over", "most"),
    [({"pp": 2}, "mesh", 2), ({"tp": 2, "pp": 2}, "mesh", 2), ({"pp": 2, "overlap": True}, "gloo", 3)],
    ids=str,
)
def test_each_stage_has_a_step_on_its_way(model, monkeypatch, cut, over, most):
    """Decoding, and with chunks of prompts among it; ahead of its tokens one more."""
    monkeypatch.setenv("LLMBOX_RANKS", over)
    options = {"token_budget": 24, "max_running": 5}
    wanted = tokens(load(model, **options), asks(length=20))
    engine = load(model, **options, **cut)
    found = {request.request_id: [] for request in asks()}
    launched = []
    for request in asks(length=20):
        engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            found[output.request_id] += output.token_ids
        launched.append(len(engine._launched) + 1)  # and the one that was taken
    finish()
    assert found == wanted
    assert max(launched) == most
    assert launched.count(most) > len(launched) * 0.8


@pytest.mark.parametrize("overlap", [nightly(False), True])
async def test_preemption_and_prefix_hits_change_nothing(tmp_path, monkeypatch, overlap):
    """In bfloat16 and int8 on the C++ kernels, over torch.distributed: for one tp the tokens are the same."""
    monkeypatch.setenv("LLMBOX_RANKS", "gloo")
    make_tiny_model(tmp_path, arch="qwen3", tokenizer=False, torch_dtype="bfloat16", intermediate_size=128)
    async with supervised(
        tmp_path, tp=2, quant="int8-g32", kv_tokens=192, context=128, max_running=5, overlap=overlap
    ) as supervisor:
        apart = [(await answers(supervisor, [request]))[0] for request in asks("a", 70)]
        assert supervisor.stats.preemptions == 0
        assert await answers(supervisor, asks("b", 70)) == apart
        assert supervisor.stats.preemptions > 0
        assert supervisor.stats.prefix_hits > 0
        assert supervisor.info.dtype == "bfloat16"


async def test_ranks_with_whole_experts_give_one_answer_and_survive_the_loss_of_one(tmp_path, monkeypatch):
    """The tokens of each request alone, in bfloat16 and int8, with preemptions and prefix hits. Copies of hot
    experts change none, nor does it that the next engine places them elsewhere.
    """
    folder = cache_variables(tmp_path / "kept", 1.0)
    for name, value in folder.items():
        monkeypatch.setenv(name, value)
    sizes = {"torch_dtype": "bfloat16", "mlp_only_layers": []}
    model = make_tiny_model(tmp_path / "model", arch="qwen3_moe", tokenizer=False, **sizes)
    options = {"quant": "int8-g32", "kv_tokens": 288, "context": 256, "max_running": 5}
    cut = {"tp": 2, "expert_parallel": True, **options}
    async with supervised(model, Launch(env=folder), **cut) as supervisor:
        assert supervisor.info.expert_parallel
        alone = await answers(supervisor, asks("a")[:2])
    async with supervised(model, Launch(env=folder), redundant_experts=3, **cut) as supervisor:
        assert supervisor.info.redundant_experts == 3
        apart = [(await answers(supervisor, [request]))[0] for request in asks("a")]
        assert supervisor.stats.preemptions == 0
        assert await answers(supervisor, asks("b")) == apart
        assert supervisor.stats.preemptions > 0
        assert supervisor.stats.prefix_hits > 0
        assert apart[:2] == alone
        stats = supervisor.stats
        assert 1 <= stats.expert_rank_imbalance <= 2
        assert 1 <= stats.expert_rank_imbalance_without_copies <= 2
        assert stats.expert_rank_imbalance != stats.expert_rank_imbalance_without_copies
        history = LoadHistory.of_model(model)
        before = history.placement(2, 8, 2, 3)
        hot = next(expert for expert, holders in enumerate(before[0]) if len(holders) == 1)
        history.save([[9000 if expert == hot else 1 for expert in range(8)]] * 2)
        await lose_a_rank(supervisor, apart)
        assert history.placement(2, 8, 2, 3)[0][hot] == (0, 1)


KILLED_IN_A_MOVE = """
import os, runpy, signal, sys
from pathlib import Path
from llmbox.engine.light_torch import import_torch
import_torch()
from llmbox.engine.executor import expert_moves

note, mover = Path({note!r}), expert_moves.ExpertMover
run_move, run_transfer = mover._move, mover._transfer

def end_at(self, stage):
    if note.exists() and note.read_text() == f"{{self._rank.layout.tp_rank}} {{stage}}":
        note.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

def move(self, move):
    end_at(self, "before it")
    run_move(self, move)
    end_at(self, "after it")

def transfer(self, memory, *ranks):
    for part in memory:
        run_transfer(self, [part], *ranks)
        end_at(self, "in a transfer")
    end_at(self, "before the tables change")

mover._move, mover._transfer = move, transfer
for name, value in dict(CHECK_SECONDS=0.0, LONGEST_CHECK=0.0, ROWS_OF_EXPERT=1, WORTH_IT=1.0).items():
    setattr(expert_moves, name, value)
runpy.run_module("llmbox.engine.process.engine_main", run_name="__main__")
"""


async def experts_move(supervisor, name):
    """Nothing moves until all ranks have written their weights to disk."""
    async with asyncio.timeout(PATIENCE):
        for number in itertools.count():
            await answers(supervisor, [ask(f"{name}{number}", [5 + number % 200, 7, 9], 8)])
            if supervisor.stats.expert_moves:
                break


@pytest.mark.parametrize("rank", [1, nightly(0)])
async def test_a_rank_killed_at_any_stage_of_a_move_of_experts_costs_a_restart(tmp_path, rank):
    """Streams go on with their tokens: weights that were half overwritten, mapped from a file as they are,
    go with the processes.
    """
    folder, note = cache_variables(tmp_path / "kept", 1.0), tmp_path / "note"
    program = tmp_path / "killed_in_a_move.py"
    program.write_text(KILLED_IN_A_MOVE.format(note=str(note)))
    sizes = {"torch_dtype": "bfloat16", "mlp_only_layers": []}
    model = make_tiny_model(tmp_path / "model", arch="qwen3_moe", tokenizer=False, **sizes)
    options = {"quant": "int8-g32", "tp": 2, "expert_parallel": True, "redundant_experts": 2}
    async with supervised(model, Launch(env=folder), **(options | {"redundant_experts": 0})) as supervisor:
        wanted = await answers(supervisor, asks("a", 64))
    launch = Launch((sys.executable, "-P", str(program)), env=folder)
    async with supervised(model, launch, **options) as supervisor:
        await experts_move(supervisor, "w")
        for stage in ("before it", "in a transfer", "before the tables change", "after it"):
            for attempt in itertools.count():  # an idle engine moves experts too, and dies without streams
                before = list(supervisor.pids)
                note.write_text(f"{rank} {stage}")
                streams = [supervisor.submit(request) for request in asks(f"{stage}{attempt}", 64)]
                assert [ids for ids, _ in await all_of(streams)] == wanted
                if any(stream.resumes for stream in streams):
                    break
            assert not any(map(is_running, before))
        assert supervisor.restarts >= 4
        await experts_move(supervisor, "x")
        assert await answers(supervisor, asks("z", 64)) == wanted


def test_a_cut_that_cannot_be_is_refused_before_anything_starts(model):
    with pytest.raises(ParallelError, match=r"--tp 3: the model's 4 attention heads cannot be shared"):
        load(model, tp=3)
    with pytest.raises(ParallelError, match="2 layers"):
        load(model, pp=3)


def test_what_a_worker_cannot_load_is_told_in_its_words(tmp_path):
    """Rank 0 reads nothing of the last layer."""
    strangers = psutil.Process().children()
    make_tiny_model(tmp_path, tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = {name: w for name, w in tiny_weights(config).items() if "layers.1.mlp.up" not in name}
    save_sharded(tmp_path, weights)
    with pytest.raises(
        EngineError, match=r"rank 1: .*layers\.1\.mlp\.up_proj\.weight' is missing"
    ) as refused:
        load(tmp_path, pp=2)
    assert refused.value.code == "bad_model"
    assert psutil.Process().children() == strangers


@pytest.mark.parametrize("numbers", [(5, 9, 7), (9, 5, 7), (9, 7, 5)])
def test_all_ranks_take_the_least_of_their_numbers(numbers):
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in numbers[1:]]
    crew = WorkerGroup(ParallelLayout(3))
    crew.processes = [Worker(rank, None, Link(ours)) for rank, (ours, _) in enumerate(pairs, 1)]
    with ThreadPoolExecutor(2) as pool:
        others = pool.map(all_min_on_worker, [Link(theirs) for _, theirs in pairs], numbers[1:])
        assert crew.all_min(numbers[0]) == 5
        assert list(others) == [5, 5]
    for pair in pairs:
        for end in pair:
            end.close()
