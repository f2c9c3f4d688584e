"""`llmbox run`: chat, or one answer. Only the answer goes to stdout."""

import contextlib
import os
import stat
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import click

from ...admin_client import AnswerPiece, stream_answer
from ...errors import CliError, Exit
from ...images.source import read_image_url, split_image_paths
from ...lifecycle.instance import find_running
from ...lifecycle.program import Command, Program, pass_program
from ...models.catalog import on_disk
from ...util import formatting
from .. import output
from ..options import mmproj_option
from ..server.daemon_starter import Started, start_daemon, wait_for_models
from ..server.up import load_missing
from .pull import fetch_missing, fetch_time

HELP = (
    "Commands: /image FILE adds an image to the next question, /image alone removes added ones, /clear "
    "forgets the conversation, /bye ends it. Ctrl-C stops an answer."
)
HISTORY_LINES = 1000


@click.command(cls=Command)
@click.argument("model", required=False)
@click.argument("prompt", nargs=-1, metavar="[PROMPT]...")
@mmproj_option
@click.option("--system", metavar="TEXT", help="System message at the start of the conversation.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    metavar="X",
    help="Sampling temperature; 0 always takes the most likely token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="X",
    help="Sample from the most likely tokens that together have this probability.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), metavar="N", help="Maximum number of tokens in an answer."
)
@click.option("--seed", type=int, metavar="N", help="Same seed, same answer.")
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="Ask about this image (PNG, JPEG, WebP, GIF). May be repeated.",
)
@click.option("--yes", is_flag=True, help="Download the model without asking if it is not on this disk.")
@pass_program
def run(
    program: Program,
    /,
    model: str | None,
    prompt: tuple[str, ...],
    system: str | None,
    mmproj: str | None,
    *,
    images: tuple[str, ...],
    yes: bool,
    **sampling: Any,
) -> None:
    """Chat with a model, or ask it one question with PROMPT or from stdin.

    Vision models accept images with --image. In a chat, add one with /image FILE or with its path in the
    question.

    MODEL may be a short name such as qwen3:4b (`llmbox search` lists them). A model that is not on this disk
    is downloaded first, after asking. Without MODEL, choose from models that suit this machine. Starts the
    daemon if it is not running.
    """
    if model is None:
        model, yes = choose_model(program), True
    urls = [read_image_url(each) for each in images]
    model = program.with_projector(model, mmproj)
    question = " ".join(prompt)
    if not sys.stdin.isatty():
        question = "\n\n".join(part for part in (question, _piped()) if part)
        if not question:
            raise CliError("the prompt is empty", "stdin is empty", f"llmbox run {model} 'Hello'", Exit.USAGE)
    fetch_missing(program, [model], {}, yes=yes)
    served = ensure_loaded(program, model)
    talk = ChatSession(
        program, served, system, {key: value for key, value in sampling.items() if value is not None}
    )
    for url in urls:
        talk.attach(url)
    if question:
        talk.ask(question)
    else:
        _chat(program, talk)


def choose_model(program: Program) -> str:
    """Ask which model to chat with: those on this disk, and recommended ones with size and speed.

    Raises CliError where nobody can be asked, click.Abort.
    """
    from ...fit.recommendations import begin_with, first_choices
    from .fit import recommendations

    recommended = first_choices(recommendations(program))
    rows = [
        (each.ref.name, "on this disk") for each in on_disk(program.environ, program.names) if each.servable
    ]
    default = begin_with(recommended).model.name if recommended else "builtin"
    if own := [name for name, _ in rows if name != "builtin"]:
        default = own[0]
    for label, each in recommended.items():
        if not each.here:
            speed = (
                f", {formatting.rate_range(*each.fit.speed.one_stream)} tokens/s" if each.fit.speed else ""
            )
            size, time = formatting.size(each.fit.disk_need), fetch_time(each.fit.disk_need)
            rows.append((each.model.name, f"{label.lower()}: fetch {size}, {time}{speed}"))
    if not sys.stdin.isatty():
        raise CliError("which model?", "MODEL is missing", f"llmbox run {default}", Exit.USAGE)
    names = [name for name, _ in rows]
    wide = max(map(len, names))
    for number, (name, text) in enumerate(rows, 1):
        output.say(formatting.printable(f"  {number}  {name:{wide}}  {text}"))
    picked: int = click.prompt(
        "Which model?", type=click.IntRange(1, len(rows)), default=names.index(default) + 1, err=True
    )
    return names[picked - 1]


def _piped() -> str:
    """Read text from a pipe or a file; other kinds of stdin (/dev/null, a socket) may never end."""
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not stat.S_ISFIFO(mode) and not stat.S_ISREG(mode):
        return ""
    try:
        return sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError as error:
        raise CliError(
            "stdin is not UTF-8 text", str(error), "give an image with --image", Exit.USAGE
        ) from None


class ChatSession:
    """A conversation with one model. Models without a chat template continue text instead."""

    def __init__(
        self, program: Program, model: dict[str, Any], system: str | None, sampling: dict[str, Any]
    ) -> None:
        self._program = program
        self._chat = bool(model["chat"])
        self._fixed = {"model": model["name"], **sampling}
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, Any]] = []
        self._images: list[str] = []
        """URLs of images for the next question."""
        self.image_problem: str = (model["info"] or {}).get("image_problem", "")
        """Reason why the model cannot read images; empty if it does."""
        if not self._chat:
            self.image_problem = self.image_problem or "it has no chat template"

    def attach(self, url: str) -> None:
        """Add an image to the next question. Raises CliError for a model that reads none."""
        if self.image_problem:
            raise CliError(
                f"{self._fixed['model']} cannot read images",
                self.image_problem,
                "choose a vision model: llmbox search",
            )
        self._images.append(url)

    @property
    def num_images(self) -> int:
        """Number of images for the next question."""
        return len(self._images)

    def drop_images(self) -> None:
        self._images.clear()

    def clear(self) -> None:
        self._messages.clear()
        self.drop_images()

    def ask(self, question: str) -> None:
        """Stream the answer to stdout. Ctrl-C or an error ends the answer and keeps the text so far; images
        of a question without an answer are kept for the next one.
        """
        content: str | list[dict[str, Any]] = question
        images = self._images
        if images:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
            content = [*parts, {"type": "text", "text": question}]
            self._images = []
        self._messages.append({"role": "user", "content": content})
        pieces: list[str] = []
        thoughts = _Thoughts()
        try:
            for thought, piece in self._stream():
                if thought:
                    thoughts.show(piece)
                    continue
                thoughts.end()
                pieces.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
            thoughts.end()
            if thoughts.seen and not pieces:
                output.say("The answer ended inside the model's reasoning. --max-tokens N allows more.")
                self._messages.append({"role": "assistant", "content": ""})
        except CliError:
            if not pieces:
                self._messages.pop()
                self._images = images
            raise
        finally:
            thoughts.end()
            if pieces and not pieces[-1].endswith("\n"):
                sys.stdout.write("\n")
                sys.stdout.flush()
            if pieces:
                self._messages.append({"role": "assistant", "content": "".join(pieces)})

    def _stream(self) -> Iterator[AnswerPiece]:
        if self._chat:
            body: dict[str, Any] = {"messages": self._system + self._messages}
        else:
            body = {"prompt": self._messages[-1]["content"]}
        return stream_answer(self._program.client, {**self._fixed, **body}, lambda _: None)


class _Thoughts:
    """Printer of reasoning before an answer: dim, on stderr, on terminals only."""

    def __init__(self) -> None:
        self.seen = False
        self._shown = False

    def show(self, piece: str) -> None:
        self.seen = True
        if output.is_live():
            self._shown = True
            sys.stderr.write(f"\x1b[2m{piece}\x1b[0m" if output.has_color() else piece)
            sys.stderr.flush()

    def end(self) -> None:
        if self._shown:
            output.say("\n")
        self._shown = False


def ensure_loaded(program: Program, model: str) -> dict[str, Any]:
    """Load a model that is on this disk; start the daemon if it is not running. Returns the served model;
    an alias or adapter keeps its own name, which requests must use.
    """
    served = _loaded(program, model)
    return {**served, "name": model} if model in program.names.aliases else served


def _loaded(program: Program, model: str) -> dict[str, Any]:
    running = find_running(program.paths)
    if running is None:
        (wanted,) = program.find_models([model], None, {})  # a wrong name needs no daemon
        output.say("The daemon is not running; starting it. It stays until llmbox down.")
        started = start_daemon(program, [model], None, {})
        names = [wanted.served_name]
    else:
        started = Started(running, None, 0)
        known = {
            name
            for loaded in program.client.get("/admin/api/models")["models"]
            if loaded["state"] != "failed"
            for name in (loaded["name"], *loaded["aliases"])
        }
        names = [model] if model in known else load_missing(program, program.find_models([model], None, {}))
    return wait_for_models(program, started, names, timeout=600.0)[0]


def _chat(program: Program, talk: ChatSession) -> None:
    help_text = textwrap.fill(HELP, output.width())
    with _line_editing(program):
        output.say(help_text)
        while True:
            try:
                question = input(">>> ").strip()
            except EOFError:
                output.say("")
                return
            except KeyboardInterrupt:
                output.say("\n/bye or Ctrl-D ends the chat.")
                continue
            if question in {"/bye", "/exit", "/quit"}:  # the words of other programs too
                return
            if not talk.image_problem and not question.startswith("/image "):
                question, paths = split_image_paths(question)
                _attach(talk, paths)
                if paths and not question:
                    continue
            if question == "/clear":
                talk.clear()
            elif question == "/image":
                talk.drop_images()
                output.say("The next question has no images.")
            elif question.startswith("/image "):
                _attach(talk, [question.removeprefix("/image ").strip().strip("'\"")])
            elif question.startswith("/"):
                output.say(help_text)
            elif question:
                _answer(talk, question)


def _attach(talk: ChatSession, paths: Sequence[str]) -> None:
    """Add images to the next question, or say why not."""
    for path in paths:
        try:
            talk.attach(read_image_url(path))
        except CliError as error:
            output.print_error(error)
        else:
            output.say(f"Added {formatting.printable(path)}.")


def _answer(talk: ChatSession, question: str) -> None:
    try:
        talk.ask(question)
    except KeyboardInterrupt:
        output.say("(stopped)")
    except CliError as error:
        if error.exit == Exit.UNREACHABLE:
            raise
        output.print_error(error)
        if talk.num_images:
            kept = f"{talk.num_images} image{'s' if talk.num_images > 1 else ''}"
            output.say(f"Kept for the next question: {kept}. /image alone drops what was added.")


@contextlib.contextmanager
def _line_editing(program: Program) -> Iterator[None]:
    """Enable history and arrow keys where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = program.paths.history_file
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)
            path.chmod(0o600)
