"""`llmbox batch`: answer a file of requests, and go on where an interrupted run stopped."""

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final

import click

from ...admin_client import ApiRefusal
from ...errors import CliError, Exit
from ...lifecycle.program import Command, Program, pass_program
from .. import output
from .pull import fetch_missing
from .run import ensure_loaded

ROUTES: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Routes that a line may name as its `url`."""
ROUTE_OF_FIELD: Final = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
}
"""Route of a line that is a request's body, by the field that it has."""
BEGINNING: Final = b'{"custom_id": '
"""Beginning of every line of OUTPUT."""
BUSY: Final = (429, 503)
"""Statuses after which a request is sent again."""
MOST_TRIES: Final = 8
LONGEST_PAUSE: Final = 30.0
"""Seconds between two tries, at most."""
LONGEST_ID: Final = 512
CTRL_C_SECONDS: Final = 0.5
"""Longest time until a Ctrl-C is seen."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Request of one line."""

    custom_id: str
    path: str
    body: dict[str, Any]


@click.command(cls=Command)
@click.argument("source", metavar="INPUT", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("target", metavar="OUTPUT", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--model", metavar="MODEL", help="Model for lines that name none.")
@click.option(
    "--parallel", type=click.IntRange(1, 256), default=32, metavar="N", help="Requests at a time (32)."
)
@click.option("--yes", is_flag=True, help="Download the model without asking if it is not on this disk.")
@pass_program
def batch(
    program: Program, /, source: Path, target: Path, model: str | None, parallel: int, *, yes: bool
) -> int:
    """Answer a file of requests: INPUT and OUTPUT are JSON Lines, as OpenAI's batch files are.

    A line is {"custom_id", "url", "body"}, or just the body of a chat, completion or embedding request; the
    line's number is then its id. Run the same command again to resume: lines that are in OUTPUT are skipped.
    Failed lines are in OUTPUT.errors.jsonl, and the next run tries them again. Starts the daemon if it is
    not running.
    """
    if target.exists() and target.samefile(source):
        raise CliError(
            "OUTPUT is the same file as INPUT",
            "answers would be mixed with requests",
            "name two files",
            Exit.USAGE,
        )
    lines = read_lines(source, model)
    done = repair(target)
    left = [line for line in lines if line.custom_id not in done]
    output.say(f"{len(lines)} requests, {len(lines) - len(left)} answered before.")
    if not left:
        return Exit.OK
    served = dict[str, str]()
    for name in {line.body["model"] for line in left}:
        fetch_missing(program, [name], {}, yes=yes)
        served[name] = ensure_loaded(program, name)["name"]  # of a directory: the API knows no paths
    left = [replace(line, body={**line.body, "model": served[line.body["model"]]}) for line in left]
    return _answer_all(program, left, target, parallel)


def read_lines(source: Path, model: str | None) -> list[BatchLine]:
    """Read and check all requests. Raises CliError with the number of the first bad line."""
    found: dict[str, BatchLine] = {}
    # Bytes that are not UTF-8 become lone surrogates, which `_parse` refuses with the line's number.
    with source.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            line = _parse(number, text, model)
            if line.custom_id in found:
                raise _bad(number, f"the custom_id {line.custom_id!r} occurs twice")
            found[line.custom_id] = line
    return list(found.values())


def _parse(number: int, text: str, model: str | None) -> BatchLine:
    try:
        data = json.loads(text)
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad(number, "it is not UTF-8, or holds half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise _bad(number, f"it is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise _bad(number, "it is not a JSON object")
    custom_id = data.pop("custom_id", str(number))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= LONGEST_ID:
        raise _bad(number, f"'custom_id' must be a text of 1 to {LONGEST_ID} characters")
    if "body" in data:
        path, body = data.get("url"), data["body"]
        if path not in ROUTES or not isinstance(body, dict):
            raise _bad(number, f"'url' must be one of {', '.join(ROUTES)}, and 'body' an object")
    else:
        path = next((route for name, route in ROUTE_OF_FIELD.items() if name in data), None)
        body = data
        if path is None:
            raise _bad(number, f"it has none of {', '.join(ROUTE_OF_FIELD)}")
    body = {"model": model, **body, "stream": False} if model else {**body, "stream": False}
    if not isinstance(body.get("model"), str):
        raise _bad(number, "it names no model; --model MODEL names that of all such lines")
    return BatchLine(custom_id, path, body)


def _bad(number: int, why: str) -> CliError:
    return CliError(f"line {number} is not a request", why, "llmbox batch --help", Exit.USAGE)


def repair(target: Path) -> set[str]:
    """Return the ids that OUTPUT has, and cut off a line that an interrupted run left unfinished. Raises
    CliError for a file of other content.
    """
    if not target.exists():
        return set()
    done: set[str] = set()
    with target.open("rb+") as file:
        _lock(file, target)  # what looks unfinished may be a line that another run writes
        whole = 0
        for text in file:
            try:
                done.add(json.loads(text)["custom_id"])
            except (ValueError, KeyError, TypeError):
                if text.endswith(b"\n") or not text.startswith(BEGINNING[: len(text)]):
                    raise CliError(
                        f"{target} is not an output of llmbox batch",
                        f"after {len(done)} answers it has a line without a custom_id",
                        "name another file",
                        Exit.USAGE,
                    ) from None
                file.truncate(whole)
                return done
            whole += len(text)
            if not text.endswith(b"\n"):
                file.seek(whole)
                file.write(b"\n")
    return done


@dataclass(slots=True)
class ResultFiles:
    """Files that results are appended to as they come, each whole line at once."""

    answers: IO[str]
    errors: IO[str]
    total: int
    failed: int = 0
    written: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, line: BatchLine, status: int, body: Any) -> None:
        result = {
            "custom_id": line.custom_id,
            "response": {"status_code": status, "body": body},
            "error": None,
        }
        with self.lock:
            file = self.answers if status == 200 else self.errors
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
            file.flush()
            self.written += 1
            self.failed += status != 200
            if output.is_live():
                end = "\n" if self.written == self.total else ""
                click.echo(f"\r{self.written} of {self.total}, {self.failed} failed{end}", nl=False, err=True)


def _answer_all(program: Program, lines: list[BatchLine], target: Path, parallel: int) -> int:
    begun = time.monotonic()
    stopping = threading.Event()
    with _open_results(target, len(lines)) as files:
        try:
            with ThreadPoolExecutor(parallel) as pool:
                tasks = list[Future[None]]()
                try:
                    tasks.extend(pool.submit(_answer, program, line, files, stopping) for line in lines)
                    for task in tasks:
                        _wait_for(task)
                        task.result()
                except BaseException:
                    _wait_or_leave(pool, tasks, files, stopping)
                    raise
        except KeyboardInterrupt:
            text = f"{files.written - files.failed} more are answered"
            output.say(f"\nStopped. To continue, run the same command: {text}.")
            return Exit.FAILED
    seconds = time.monotonic() - begun
    output.say(f"{files.written - files.failed} answered in {seconds:.1f} s: {target}")
    if files.failed:
        output.say(f"{files.failed} failed: {files.errors.name}")
    return Exit.FAILED if files.failed else Exit.OK


def _wait_for(task: Future[None]) -> None:
    """Wait for a request in short steps. Python does not see a Ctrl-C that comes just as a wait begins until
    that wait ends.
    """
    while wait([task], timeout=CTRL_C_SECONDS).not_done:
        pass


def _wait_or_leave(
    pool: ThreadPoolExecutor, tasks: list[Future[None]], files: ResultFiles, stopping: threading.Event
) -> None:
    """Wait for the requests under way. Another Ctrl-C ends the process, between two lines of OUTPUT: its
    threads wait for answers, and Python would wait for them.
    """
    try:
        stopping.set()
        for task in tasks:
            task.cancel()
        running = sum(task.running() for task in tasks)
        text = f"Stopping after the {running} requests that are being answered"
        output.say(f"\n{text}. Ctrl-C stops at once.")
        for task in tasks:
            if not task.cancelled():
                _wait_for(task)
        pool.shutdown()
    except KeyboardInterrupt:
        with files.lock:
            if not files.errors.tell():
                Path(files.errors.name).unlink(missing_ok=True)
            output.say(
                "\nStopped. Run the same command to continue; requests without an answer are sent again."
            )
            os._exit(128 + signal.SIGINT)


@contextlib.contextmanager
def _open_results(target: Path, total: int) -> Iterator[ResultFiles]:
    """Open OUTPUT and the file of errors, which goes if it is empty. Raises CliError where another run writes
    to them.
    """
    errors = target.with_name(f"{target.name}.errors.jsonl")
    with target.open("a", encoding="utf-8") as answers:
        _lock(answers, target)
        with errors.open("w", encoding="utf-8") as failures:
            try:
                yield ResultFiles(answers, failures, total)
            finally:
                if not failures.tell():
                    errors.unlink(missing_ok=True)


def _lock(file: IO[Any], target: Path) -> None:
    """Make sure that no other run writes to OUTPUT. Raises CliError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise CliError(
            f"another llmbox batch writes to {target}",
            "both would send the same requests",
            "wait until it ends, or name another file",
            Exit.CONFLICT,
        ) from None


def _answer(program: Program, line: BatchLine, files: ResultFiles, stopping: threading.Event) -> None:
    """Send one request until it has an answer that is not for lack of room."""
    for pause in _pauses():
        if stopping.is_set():
            return
        try:
            body = program.client.call("POST", line.path, line.body, None)
        except ApiRefusal as error:
            if error.status in BUSY and pause is not None:
                stopping.wait(pause)
                continue
            files.write(line, error.status, {"error": {"message": error.what, "code": error.code}})
            return
        files.write(line, 200, body)
        return


def _pauses() -> Iterator[float | None]:
    """Yield the seconds to wait after each try; None: no more tries."""
    for number in range(MOST_TRIES - 1):
        yield min(LONGEST_PAUSE, 0.5 * 2**number)
    yield None
