"""`llmbox replay` over a log as the gateway writes it: what it prints, its JSON, and what it refuses."""

import time

import pytest

from llmbox.app.cli.admin.replay import BlocksParam
from llmbox.app.errors import Exit
from llmbox.app.store import RequestLog
from llmbox.app.store.record import RequestRecord, SequenceRecord, encode_schedule, encode_sequence
from llmbox.engine.ipc.sequence_times import EngineFacts, ScheduleRecord
from support.cli_box import Box

FACTS = EngineFacts(context=200, max_running=4, token_budget=32, num_blocks=12, block_size=4)


def schedule(number, run=7):
    """Five sequences that come together; alone, the last one would end after 3 + 8 steps."""
    return ScheduleRecord(
        run=run,
        facts=FACTS,
        number=number,
        call=0,
        arrived=number,
        prompt=16,
        resumed=0,
        output=8,
        limit=8,
        end_call=20,
        ended=2_000_000,
    )


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    made = Box(tmp_path_factory.mktemp("replay"))
    made.paths.create()
    log = RequestLog(made.paths.request_db)
    log.start()
    rows = [("tiny", schedule(number)) for number in range(5)] + [("other", schedule(3, run=8))]
    for model, told in rows:
        record = RequestRecord(
            id=f"{model}-{told.number}", created=time.time(), model=model, endpoint="chat", http_status=200
        )
        times = SequenceRecord(total=1, schedule=encode_schedule(told))
        log.write(record, None, [encode_sequence(times)])
    log.flush()
    log.close()
    try:
        yield made
    finally:
        made.close()


def test_a_table_for_each_engine(box):
    told = box.run("replay", "--kv-blocks", "2x")
    assert told.code == 0
    assert "tiny  5 sequences" in told.out
    assert "other  1 sequences" in told.out
    assert told.out.count("WHAT IF") >= 2
    assert "3 sequences of this engine are not in the log" in told.out


def test_json_of_one_model(box):
    told = box.run("replay", "--model", "tiny", "--max-num-seqs", "1", "--no-priorities", "--json").json
    assert told["schema"] == "llmbox.replay/1"
    (run,) = told["runs"]
    assert run["models"] == ["tiny"]
    assert (run["missing"], run["begun_before"], run["inexact"]) == (0, 0, {})
    assert run["recorded"]["output_tokens"] == run["what_if"]["output_tokens"] == 40
    assert run["recorded"]["most_running"] > run["what_if"]["most_running"] == 1
    assert run["limits"]["num_blocks"] == 12


def test_without_a_change_there_is_no_what_if(box):
    (run,) = box.run("replay", "--model", "tiny", "--json").json["runs"]
    assert run["what_if"] is None
    assert "WHAT IF" not in box.run("replay", "--model", "tiny").out


def test_what_cannot_be_replayed_is_told(box, tmp_path):
    nobody = box.run("replay", "--model", "nobody")
    assert nobody.code == Exit.FAILED
    assert "no request of this time can be replayed" in nobody.err
    impossible = box.run("replay", "--max-num-seqs", "9", "--max-batched-tokens", "3")
    assert impossible.code == Exit.FAILED
    assert "below max_running" in impossible.err
    assert "there is no request log" in Box(tmp_path).run("replay").err


@pytest.mark.parametrize("good", ["1", "4096", "2x", "1.5x", "0.5x"])
def test_blocks(good):
    assert BlocksParam().convert(good, None, None) == good


@pytest.mark.parametrize("bad", ["0", "x", "0x", "0.0x", "-1", "2X", "1e9", "many"])
def test_blocks_that_are_none(bad):
    with pytest.raises(Exception, match="multiple such as 2x"):
        BlocksParam().convert(bad, None, None)
