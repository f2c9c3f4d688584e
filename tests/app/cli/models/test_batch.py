"""`llmbox batch`: every line once, whatever interrupts it."""

import fcntl
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import click.testing
import pytest

from llmbox.app.admin_client import ApiRefusal
from llmbox.app.cli.models import batch
from llmbox.app.errors import CliError, Exit
from llmbox.app.lifecycle.program import Program
from support.cli_box import PATIENCE, interrupt


class FakeClient:
    """Answers with the prompt, refuses what it is told to."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.refusals: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def call(self, method, path, body, timeout):
        with self._lock:
            self.asked.append({"path": path, **body})
            left = self.refusals.get(str(body.get("prompt")), [])
            status = left.pop(0) if left else 200
        if status != 200:
            raise ApiRefusal("no", exit=Exit.FAILED, log="", status=status, code="busy")
        return {"text": body.get("prompt")}


@pytest.fixture
def client(monkeypatch):
    made = FakeClient()
    monkeypatch.setattr(batch, "fetch_missing", lambda *_, **__: None)
    monkeypatch.setattr(batch, "ensure_loaded", lambda _, name: {"name": name.rpartition("/")[2]})
    monkeypatch.setattr(batch, "LONGEST_PAUSE", 0.0)
    return made


@pytest.fixture
def run(client, tmp_path):
    def running(*words: object):
        program = Program(data_dir=tmp_path / "data")
        program.__dict__["client"] = client
        return click.testing.CliRunner().invoke(
            batch.batch,
            [*map(str, words)],
            obj=program,
            standalone_mode=False,
            help_option_names=["-h", "--help"],  # click keeps the option of a command's first call
        )

    return running


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return path


def read(path: Path) -> dict[str, dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each["response"] for each in found}


def test_each_kind_of_line_goes_to_its_route(run, client, tmp_path):
    source = write(
        tmp_path / "in",
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1", "model": "m"}},
        {"messages": [{"role": "user", "content": "x"}]},
        "",
        {"input": "x", "custom_id": "vector"},
        {"prompt": "2", "stream": True},
    )
    result = run(source, tmp_path / "out", "--model", "other")
    assert result.return_value == Exit.OK
    answers = read(tmp_path / "out")
    assert set(answers) == {"a", "2", "vector", "5"}
    assert answers["a"] == {"status_code": 200, "body": {"text": "1"}}
    assert sorted((each["path"], each["model"], each["stream"]) for each in client.asked) == [
        ("/v1/chat/completions", "other", False),
        ("/v1/completions", "m", False),
        ("/v1/completions", "other", False),
        ("/v1/embeddings", "other", False),
    ]
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_answered_lines_are_not_asked_again(run, client, tmp_path):
    source = write(tmp_path / "in", *({"prompt": str(n)} for n in range(6)))
    run(source, tmp_path / "out", "--model", "m")
    lines = (tmp_path / "out").read_text().splitlines(keepends=True)
    (tmp_path / "out").write_text("".join(lines[:3]) + lines[3][:25])  # as after a kill
    client.asked.clear()
    assert run(source, tmp_path / "out", "--model", "m").return_value == Exit.OK
    assert len(client.asked) == 3
    assert set(read(tmp_path / "out")) == {str(n) for n in range(1, 7)}


def test_failed_lines_stand_apart_and_are_tried_again(run, client, tmp_path):
    source = write(tmp_path / "in", {"prompt": "good"}, {"prompt": "bad"})
    client.refusals["bad"] = [400]
    assert run(source, tmp_path / "out", "--model", "m").return_value == Exit.FAILED
    assert set(read(tmp_path / "out")) == {"1"}
    assert read(tmp_path / "out.errors.jsonl")["2"]["body"] == {"error": {"message": "no", "code": "busy"}}
    assert run(source, tmp_path / "out", "--model", "m").return_value == Exit.OK
    assert set(read(tmp_path / "out")) == {"1", "2"}
    assert not (tmp_path / "out.errors.jsonl").exists()
    assert [each["prompt"] for each in client.asked].count("good") == 1


def test_a_busy_daemon_is_asked_again(run, client, tmp_path):
    client.refusals = {"x": [429, 503, 429], "y": [429] * batch.MOST_TRIES}
    source = write(tmp_path / "in", {"prompt": "x"}, {"prompt": "y"})
    assert run(source, tmp_path / "out", "--model", "m").return_value == Exit.FAILED
    assert set(read(tmp_path / "out")) == {"1"}
    assert read(tmp_path / "out.errors.jsonl")["2"]["status_code"] == 429


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ({"question": "x"}, "none of messages, prompt, input"),
        ({"url": "/admin/api/keys", "body": {}}, "'url' must be one of"),
        ({"url": "/v1/completions", "body": []}, "'url' must be one of"),
        ({"prompt": "x", "custom_id": "1"}, "occurs twice"),
        ({"prompt": "x", "custom_id": None}, "'custom_id' must be a text"),
        ({"url": "/v1/completions", "body": {"prompt": "x"}, "custom_id": 7}, "'custom_id' must be a text"),
        ({"prompt": "x", "custom_id": ""}, "'custom_id' must be a text"),
        ({"prompt": "x", "model": 7}, "names no model"),
        ('{"prompt": "\\ud83d"}', "half of a surrogate pair"),
        (f'{{"prompt": {"[" * 100_000}', "not JSON"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_asked(run, client, tmp_path, line, why):
    source = write(tmp_path / "in", {"prompt": "x"}, line)
    result = run(source, tmp_path / "out", "--model", "m")
    assert result.exception.what == "line 2 is not a request"
    assert why in result.exception.why
    assert client.asked == []


def test_a_line_that_is_not_utf8_is_named_and_a_byte_order_mark_is_not_text(run, client, tmp_path):
    source = tmp_path / "in"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\n{"prompt": "Gr\xfc\xdfe"}\n')
    result = run(source, tmp_path / "out", "--model", "m")
    assert result.exception.what == "line 2 is not a request"
    assert "not UTF-8" in result.exception.why
    assert client.asked == []


SLOW = """
import sys, time
from pathlib import Path
from llmbox.app.cli.models import batch
from llmbox.app.lifecycle.program import Program

class Client:
    def call(self, method, path, body, timeout):
        if body["prompt"] == "slow":
            print("asked", flush=True)
            time.sleep(600)
        return {"text": body["prompt"]}

batch.fetch_missing = lambda *_, **__: None
batch.ensure_loaded = lambda _, name: {"name": name}
program = Program(data_dir=Path("data"))
program.__dict__["client"] = Client()
batch.batch(sys.argv[1:], obj=program, standalone_mode=False)
"""


@pytest.mark.process
def test_a_second_interrupt_ends_it_at_once_and_the_same_command_goes_on(run, client, tmp_path):
    # The second line: with the first the pool starts its thread, and a signal may find that half made.
    source = write(tmp_path / "in", *({"prompt": prompt} for prompt in ("0", "slow", "1", "2")))
    command = [sys.executable, "-P", "-c", SLOW, "in", "out", "--model", "m", "--parallel", "1"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "asked\n"
            process.send_signal(signal.SIGINT)
            while "at once" not in process.stderr.readline():
                assert process.poll() is None
            interrupt(process)
            assert process.wait(PATIENCE) == 130
            assert "Run the same command to continue" in process.stderr.read()
        finally:
            process.kill()
    assert not (tmp_path / "out.errors.jsonl").exists()
    assert run(source, tmp_path / "out", "--model", "m").return_value == Exit.OK
    assert set(read(tmp_path / "out")) == {"1", "2", "3", "4"}


def test_other_files_are_not_written_over(run, tmp_path):
    source = write(tmp_path / "in", {"prompt": "x", "model": "m"})
    assert run(source, source).exception.what == "OUTPUT is the same file as INPUT"
    other = write(tmp_path / "out", {"name": "precious"})
    assert "is not an output of llmbox batch" in run(source, other).exception.what
    assert json.loads(other.read_text()) == {"name": "precious"}


@pytest.mark.parametrize("content", ['{"important": 1}', "hf_abcdef", '{"custom_id": "1"}\nnotes'])
def test_a_file_without_a_last_newline_is_not_emptied(run, tmp_path, content):
    source = write(tmp_path / "in", {"prompt": "x", "model": "m"})
    (tmp_path / "out").write_text(content)
    assert "is not an output of llmbox batch" in run(source, tmp_path / "out").exception.what
    assert (tmp_path / "out").read_text() == content


def test_a_whole_last_line_without_its_newline_is_kept(run, client, tmp_path):
    source = write(tmp_path / "in", {"prompt": "x"}, {"prompt": "y"})
    run(source, tmp_path / "out", "--model", "m")
    (tmp_path / "out").write_text((tmp_path / "out").read_text().splitlines()[0])
    client.asked.clear()
    run(source, tmp_path / "out", "--model", "m")
    assert len(client.asked) == 1
    assert set(read(tmp_path / "out")) == {"1", "2"}


def test_a_directory_is_asked_for_by_the_name_it_is_served_under(run, client, tmp_path):
    source = write(tmp_path / "in", {"prompt": "x"})
    run(source, tmp_path / "out", "--model", "/models/tiny")
    assert [each["model"] for each in client.asked] == ["tiny"]


def test_two_runs_do_not_write_to_one_file(run, tmp_path):
    source = write(tmp_path / "in", {"prompt": "x", "model": "m"})
    errors = tmp_path / "out.errors.jsonl"
    for failed in ("", "a failed line\n"):
        errors.write_text(failed)
        with (tmp_path / "out").open("a") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            other.write('{"custom_id": "unfin')
            other.flush()
            assert "another llmbox batch" in run(source, tmp_path / "out").exception.what
        assert errors.read_text() == failed, "the other run's"
        assert (tmp_path / "out").read_text().endswith('"unfin')
        (tmp_path / "out").unlink()


def test_a_run_that_begins_meanwhile_leaves_the_errors_of_the_other(tmp_path):
    """OUTPUT may be locked between its repair and its first line."""
    errors = tmp_path / "out.errors.jsonl"
    errors.touch()
    with (tmp_path / "out").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CliError, match="another llmbox batch"):
            batch._answer_all(Program(data_dir=tmp_path), [], tmp_path / "out", 1)
    assert errors.exists()
