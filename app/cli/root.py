"""The `llmbox` command: its list of commands, and the entry point, which turns every expected error into
lines on stderr and an exit code.
"""

import errno
import io
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from ..errors import CliError, Exit
from ..lifecycle.program import Command, Program, location_options
from ..util.formatting import nearest
from . import output

COMMANDS: dict[str, tuple[str, str]] = {
    "up": (".server.up:up", "Start the daemon in the background and wait until it is ready."),
    "serve": (".server.up:serve", "Run the daemon in the foreground."),
    "down": (".server.lifecycle:down", "Let open requests finish, then stop the daemon."),
    "restart": (
        ".server.lifecycle:restart",
        "Restart the daemon as it was, with its loaded models.",
    ),
    "status": (".server.lifecycle:status", "Show whether the daemon runs; exit 3 when it does not."),
    "run": (".models.run:run", "Chat with a model, or ask it one question; downloads it if needed."),
    "batch": (".models.batch:batch", "Answer a file of requests; the same command again resumes."),
    "ps": (".models.models:ps", "List the models in memory."),
    "search": (".models.library:search", "List recommended models or search the hub; shows what fits here."),
    "fit": (".models.fit:fit", "Show whether a model fits, before downloading it."),
    "pull": (".models.pull:pull", "Download a model from the hub, by org/name or a short name."),
    "adopt": (".models.library:adopt", "Use models where they are, without copying them."),
    "import": (
        ".models.convert:import_gguf",
        "Convert a GGUF file (llama.cpp, Ollama, LM Studio) to a model folder.",
    ),
    "ls": (".models.models:ls", "List the models on disk."),
    "show": (".models.models:show", "Show the details of one model."),
    "rm": (".models.library:rm", "Delete models from this disk."),
    "df": (".models.library:df", "Show the disk space taken by models."),
    "quantize": (
        ".models.convert:quantize",
        "Quantize a model's weights into a new folder.",
    ),
    "alias": (".models.load:alias", "Manage other names and parameter variants of models."),
    "lora": (".models.load:lora", "Manage LoRA adapters: add, list, remove, merge."),
    "load": (".models.load:load", "Load a model into the running daemon."),
    "unload": (".models.load:unload", "Unload a model from memory."),
    "pin": (".models.load:pin", "Pin a model in memory: it is never evicted."),
    "unpin": (".models.load:unpin", "Unpin a model: it may be evicted again."),
    "share": (
        ".server.share:share",
        "Let other devices on your network use this machine's models; --off ends it.",
    ),
    "key": (".admin.key:key", "Manage API keys: create, list, rotate, revoke."),
    "requests": (".admin.requests:requests", "Read the request log, follow it, cancel a request."),
    "why": (".admin.replay:why", "Show where the time of one request went."),
    "replay": (".admin.replay:replay", "Simulate past scheduling, also with other limits."),
    "logs": (".server.logs:logs", "Read the daemon's log."),
    "stats": (".admin.doctor:stats", "Show current load and throughput."),
    "top": ("llmbox.ui.tui.command:top", "Watch devices, requests, models and memory in the terminal."),
    "dash": ("llmbox.ui.tui.command:top", "Same as top."),
    "config": (".admin.config:config", "Show and change settings."),
    "connect": (".admin.connect:connect", "Print the settings that make other programs use this daemon."),
    "mcp": (
        ".admin.connect:mcp",
        "Serve MCP on stdin and stdout, for assistants that manage this machine's models.",
    ),
    "ray": (".server.ray:ray", "Deploy a model under Ray Serve, on one machine or several."),
    "service": (".server.service:service", "Run the daemon under systemd."),
    "db": (".admin.doctor:db", "Maintain the request log's database: check, vacuum, back up, migrate."),
    "doctor": (".admin.doctor:doctor", "Check this machine; every finding comes with a fix."),
    "bench": (".admin.bench:bench", "Measure a server: time to first token, throughput."),
    "version": (".server.lifecycle:version", "Print the version."),
    "completion": (".admin.config:completion", "Print a shell's completion script."),
    "uninstall": (".server.service:uninstall", "Remove llmbox's files from this machine; models stay."),
}


SECTIONS: Final = {
    "Getting started": ("up", "run", "search", "pull", "top", "down"),
    "Models": (
        *("ls", "show", "fit", "ps", "load", "unload", "pin", "unpin", "alias", "lora"),
        *("adopt", "import", "quantize", "rm", "df"),
    ),
    "Daemon": ("status", "restart", "serve", "service", "ray", "logs", "stats", "dash"),
    "Requests and access": ("share", "key", "connect", "mcp", "requests", "why", "replay", "batch", "bench"),
}
"""Commands by group, in the order of `llmbox --help`. The others stand in a group at the end."""

SYNONYMS: Final = {
    "list": ("ls", "show"),
    "models": ("ls",),
    "get": ("pull", "show"),
    "download": ("pull",),
    "install": ("pull",),
    "delete": ("rm",),
    "remove": ("rm",),
    "start": ("up",),
    "stop": ("down",),
    "chat": ("run",),
    "ask": ("run",),
    "info": ("show",),
    "log": ("logs",),
    "keys": ("key",),
    "settings": ("config",),
    "create": ("add", "set", "alias"),
    "add": ("set", "pull"),
    "new": ("add", "set"),
    "cp": ("alias",),
    "copy": ("alias",),
    "revoke": ("rm",),
    "monitor": ("top",),
    "dashboard": ("top",),
}
"""Command names of other programs, each with our names for it; the first that the group has is suggested."""


OPTIONS: Final = {
    "--ctx": "--max-model-len --context-length --context --ctx-size --num-ctx --n-ctx",
    "--tp": "--tensor-parallel-size --tensor-parallel",
    "--pp": "--pipeline-parallel-size --pipeline-parallel",
    "--quant": "--quantization",
    "--dtype": "--precision",
    "--kv-dtype": "--kv-cache-dtype --cache-type-k --cache-type-v",
    "--max-running": "--max-num-seqs --parallel --max-running-requests",
    "--token-budget": "--max-num-batched-tokens --batch-size --ubatch-size --chunked-prefill-size",
    "--memory": "--gpu-memory-utilization --mem-fraction-static",
    "--prefix-cache": "--enable-prefix-caching",
    "--chunked-prefill": "--enable-chunked-prefill",
    "--draft": "--model-draft --speculative-model --speculative-draft-model-path",
    "--cpu-experts": "--cpu-moe --n-cpu-moe",
    "--alias": "--served-model-name",
    "--ttl": "--keep-alive",
    "--threads": "--num-threads --n-threads",
    "--concurrency": "--streams --max-concurrency --users",
    "--requests": "--num-prompts",
}
"""Options of ours, each with what vLLM, SGLang, llama.cpp and Ollama call it."""
OPTION_SYNONYMS: Final = {theirs: ours for ours, names in OPTIONS.items() for theirs in names.split()}

_CHOICES = {"gpu": "cuda", "fp16": "float16", "half": "float16", "fp32": "float32"}
"""Values that other programs have, each with ours."""


def refuse_unknown(group: click.Group, ctx: click.Context, args: list[str]) -> None:
    """Raise UsageError with the nearest command, if the first word is none of the group's."""
    word = args[0]
    if ctx.resilient_parsing or word.startswith("-") or group.get_command(ctx, word) is not None:
        return
    names = group.list_commands(ctx)
    meant = next((name for name in SYNONYMS.get(word.lower(), ()) if name in names), None)
    meant = meant or nearest(word, names)
    hint = f" Did you mean '{meant}'?" if meant else ""
    raise click.UsageError(f"No such command '{word}'.{hint}", ctx)


def with_suggestion(error: click.UsageError) -> click.UsageError:
    """Return the error with our name for another program's option, or with the nearest choice, if it is about
    a value that is none of a parameter's.
    """
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        option = OPTION_SYNONYMS.get(error.option_name)
        if not any(option in param.opts for param in error.ctx.command.get_params(error.ctx)):
            return error
        message = f"No such option '{error.option_name}'. Did you mean '{option}'?"
        return click.NoSuchOption(error.option_name, message, ctx=error.ctx)
    if not isinstance(error, click.BadParameter) or error.param is None:
        return error
    kind = error.param.type
    said = re.match(r"'(.*)' is not one of", error.message)
    if not isinstance(kind, click.Choice) or not said:
        return error
    ours = _CHOICES.get(said[1].lower())
    meant = ours if ours in kind.choices else nearest(said[1], [*kind.choices])
    if meant is None:
        return error
    message = f"{error.message.rstrip('.')}. Did you mean '{meant}'?"
    return click.BadParameter(message, error.ctx, error.param, error.param_hint)


class CommandGroup(click.Group):
    """A group of commands inside one, such as `config`. `earlier` maps names that commands had to those that
    they have: they still work, and no help lists them.
    """

    command_class = Command

    def __init__(self, *args: Any, earlier: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += location_options()
        self._earlier = earlier or {}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, self._earlier.get(cmd_name, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        refuse_unknown(self, ctx, args)
        return super().resolve_command(ctx, args)


class StdoutClosed(Exception):  # noqa: N818 - nothing went wrong
    """The reader of our stdout has closed it (`llmbox logs | head`)."""


class LazyGroup(click.Group):
    """Group that imports a command when it runs. `commands` maps a name to (`module:attribute`, help line);
    several names may share one target.
    """

    def __init__(self, *args: Any, table: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table
        self.params += location_options(from_environment=True)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # click would end with 1
            raise StdoutClosed from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        refuse_unknown(self, ctx, args)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self.table:
            return None
        target, line = self.table[cmd_name]
        module, _, attribute = target.partition(":")
        command: click.Command = getattr(import_module(module, "llmbox.app.cli"), attribute)
        command.short_help = line
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        if self.table is not COMMANDS:
            _write_section(formatter, "Commands", self.table, self.table)
            return
        for title, names in SECTIONS.items():
            _write_section(formatter, title, self.table, names)
        rest = [name for name in self.table if not any(name in names for names in SECTIONS.values())]
        _write_section(formatter, "This program", self.table, rest)


def _write_section(
    formatter: click.HelpFormatter, title: str, table: dict[str, tuple[str, str]], names: Iterable[str]
) -> None:
    with formatter.section(title):
        formatter.write_dl([(name, table[name][1]) for name in names])


INTERRUPTED = 130
"""Exit code that shells report for a process that SIGINT ended."""


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="llmbox", prog_name="llmbox", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Serve language models on one machine.

    Start with `llmbox up`, then point any OpenAI client at the printed URL.
    """
    if context.invoked_subcommand is None:
        from .server.lifecycle import print_overview  # keeps `llmbox --help` fast

        print_overview(context.ensure_object(Program))


def main(arguments: Sequence[str] | None = None, program: Program | None = None) -> None:
    """Run the command and exit the process with its exit code."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and "utf" not in stream.encoding.lower():
            stream.reconfigure(errors="replace")  # a bar or an answer in letters that this locale lacks
    sys.exit(run(arguments, program or Program()))


def _open_closed_streams() -> None:
    """Open standard streams that the caller has closed (`<&-`, cron): Python leaves None in their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - until the exit


def run(arguments: Sequence[str] | None, program: Program) -> int:
    """Run the command. Returns its exit code."""
    os.umask(0o077)
    try:
        code = cli.main(
            None if arguments is None else list(arguments),
            prog_name="llmbox",
            standalone_mode=False,
            obj=program,
        )
        sys.stdout.flush()
    except CliError as error:
        output.print_error(error)
        return error.exit
    except click.UsageError as error:
        with_suggestion(error).show()
        return Exit.USAGE
    except click.ClickException as error:
        error.show()
        return Exit.FAILED
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except UnicodeEncodeError as error:
        output.print_error(_not_utf8(error))
        return Exit.USAGE
    except (StdoutClosed, BrokenPipeError):
        _drop_stdout()
        return Exit.OK
    except OSError as error:  # of the disk, permissions, names: nothing that a traceback would explain
        output.print_error(_of_os_error(error))
        try:
            sys.stdout.flush()
        except OSError:
            _drop_stdout()
        return Exit.FAILED
    return code if isinstance(code, int) else Exit.OK


def _drop_stdout() -> None:
    """Point stdout elsewhere, or Python complains at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _not_utf8(error: UnicodeEncodeError) -> CliError:
    """Error of text that cannot be encoded. A lone surrogate stands for a byte of the command line."""
    code = ord(error.object[error.start])
    if not 0xDC80 <= code <= 0xDCFF:
        return CliError("text cannot be printed", str(error), "set LANG to a UTF-8 locale, such as C.UTF-8")
    why = f"a word of it holds the byte 0x{code & 0xFF:02x}, which begins no character"
    return CliError("the command line is not UTF-8", why, "type it in a terminal with UTF-8")


def _of_os_error(error: OSError) -> CliError:
    fixes = {
        errno.ENOSPC: "make room: llmbox df shows what models take",
        errno.EDQUOT: "make room: llmbox df shows what models take",
        errno.ENAMETOOLONG: "give a shorter name",
    }
    why = error.strerror or str(error)
    if error.filename is None and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return CliError("stdout cannot be written", why, "make room where it goes to")
    fix = fixes.get(error.errno or 0, "llmbox doctor checks folders, disks and permissions")
    return CliError("a file cannot be used", f"{error.filename}: {why}" if error.filename else why, fix)
