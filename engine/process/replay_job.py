"""Job of `llmbox replay`: replay recorded scheduling. Run as `python -m llmbox.engine.process.replay_job`.

Reads a file of encoded `ScheduleRecord`s; writes its report as `engine/ipc/spawn.py` says.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..core.replay.replayed_engine import ScheduleOutcome
from ..core.replay.schedule_replay import LinearStepCost, ScheduleReplay, WhatIf
from ..errors import EngineError
from ..ipc.sequence_times import ADAPTER, DRAFTED, IMAGES, LIMITED, ScheduleRecord, decode_schedule
from ..ipc.spawn import ReportProgress, run_job


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRun:
    """Replay of one engine process. Times are in seconds."""

    run: int
    limits: dict[str, Any]
    """`EngineFacts` as recorded."""
    missing: int
    """Sequences without a record, among those between the first and the last one."""
    begun_before: int
    """Sequences that had come before the first one."""
    inexact: dict[str, int]
    """Sequences with what a replay has not, by its name."""
    ends: int
    """Sequences that ended by their tokens."""
    same_ends: int
    """Part of `ends`: in the same step as recorded."""
    recorded: ScheduleOutcome
    """Steps as they were."""
    cost: LinearStepCost
    as_it_was: ScheduleOutcome
    """Simulation with the recorded limits, which `what_if` compares with."""
    what_if: ScheduleOutcome | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    runs: list[ReplayedRun] = field(default_factory=list)
    sequences: int = 0
    seconds: float = 0.0
    """Time that the replay took."""


_INEXACT = (
    (DRAFTED, "more draft tokens than are recorded"),
    (IMAGES, "images"),
    (ADAPTER, "adapters"),
    (LIMITED, "grammars"),
)


def replay_records(
    records: Sequence[ScheduleRecord], what_if: WhatIf, report: ReportProgress
) -> ReplayReport:
    """Replay all engines of the records, each by itself."""
    began, runs = time.perf_counter(), dict[int, list[ScheduleRecord]]()
    for record in records:
        runs.setdefault(record.run, []).append(record)
    done = []
    for place, each in enumerate(runs.values()):
        report({"replay": [place, len(runs)]})
        done.append(_replay(each, what_if))
    return ReplayReport(runs=done, sequences=len(records), seconds=time.perf_counter() - began)


def _replay(records: Sequence[ScheduleRecord], what_if: WhatIf) -> ReplayedRun:
    replay = ScheduleReplay(records)
    followed, facts = replay.follow(), replay.facts
    numbers = {record.number for record in records}
    flags = ((name, sum(bool(each.flags & flag) for each in records)) for flag, name in _INEXACT)
    inexact = {name: count for name, count in flags if count}
    for name, holds in (("KV cache on disk", facts.disk), ("recurrent states", facts.state_slots > 0)):
        if holds:
            inexact[name] = len(records)
    return ReplayedRun(
        run=records[0].run,
        limits=facts._asdict(),
        missing=max(numbers) - min(numbers) + 1 - len(numbers),
        begun_before=min(numbers),
        inexact=inexact,
        ends=followed.ends,
        same_ends=followed.same_ends,
        recorded=followed.outcome,
        cost=followed.cost,
        as_it_was=replay.simulate(followed.cost),
        what_if=replay.simulate(followed.cost, what_if) if what_if.changes else None,
    )


def read_records(path: Path) -> list[ScheduleRecord]:
    """Read a file of MessagePack: a list of encoded records. Raises EngineError where it has none."""
    encoded = msgspec.msgpack.decode(path.read_bytes(), type=list[bytes])
    found = [record for data in encoded if (record := decode_schedule(data)) is not None]
    if not found:
        raise EngineError("there is no record of scheduling")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job and return its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--kv-blocks", default="", help="a number, or a multiple such as 2x")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-batched-tokens", type=int)
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--no-priorities", action="store_true")
    given = parser.parse_args(arguments)
    blocks, is_multiple = given.kv_blocks.removesuffix("x"), given.kv_blocks.endswith("x")
    what_if = WhatIf(
        num_blocks=int(blocks) if blocks and not is_multiple else None,
        block_factor=float(blocks) if is_multiple else None,
        max_running=given.max_num_seqs,
        token_budget=given.max_batched_tokens,
        caching=False if given.no_prefix_cache else None,
        ignore_priorities=given.no_priorities,
    )
    return run_job(lambda report: replay_records(read_records(given.records), what_if, report))


if __name__ == "__main__":
    sys.exit(main())
