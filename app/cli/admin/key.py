"""`llmbox key`: API keys.

Commands work on the key file: a daemon need not run, and one that runs sees the change.
"""

import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from ...errors import CliError, Exit
from ...lifecycle.program import Program, json_option, pass_program
from ...util import formatting
from .. import output
from ..output import require_consent
from ..root import CommandGroup

if TYPE_CHECKING:
    from ...security.key_store import KeyStore, LastUsed
    from ...security.keys import ApiKey

HEADERS = (
    "NAME", "KEY", "SCOPES", "MODELS", "EXPIRES", "RPM", "TPM",
    "QUOTAS", "REQUESTS", "TOKENS IN", "TOKENS OUT", "LAST USED",
)  # fmt: skip
UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


class Expiry(click.ParamType[float]):
    """`12h`, `30d` from now, or the day on which it ends, as Unix time."""

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        if match := re.fullmatch(r"(\d{1,6})([mhdw])", text):
            return time.time() + int(match[1]) * UNITS[match[2]]
        try:
            when = datetime.fromisoformat(text).astimezone().timestamp()
        except (ValueError, OverflowError, OSError):
            self.fail(f"{text[:40]!r} is not a time such as 12h, 30d, 8w or 2030-12-31", param, ctx)
        if when <= time.time():
            self.fail(f"{text} is past", param, ctx)
        return when


class Limit(click.ParamType[float | None]):
    """Number above 0; `none` takes a limit away."""

    name = "limit"

    def __init__(self, *, whole: bool = True) -> None:
        self._whole = whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        text = str(value).replace("_", "").replace(",", "")
        if text == "none":
            return None
        try:
            number = int(text) if self._whole else float(text)
        except ValueError:
            self.fail(f"{text[:40]!r} is neither a number nor none", param, ctx)
        if not 0 < number <= 1e12:
            self.fail(f"{text[:40]} is not above 0", param, ctx)
        return number


LIMITS = (
    ("--rpm", "requests per minute"),
    ("--tpm", "tokens per minute, prompts and answers together"),
    ("--requests-day", "requests per day"),
    ("--requests-month", "requests per month"),
    ("--tokens-day", "tokens per day"),
    ("--tokens-month", "tokens per month"),
)
BUDGETS = (("--budget-day", "per day"), ("--budget-month", "per month"))


def limit_options(command: Any) -> Any:
    """Add the options of limits to a command. Days and months follow UTC."""
    for flag, what in reversed(BUDGETS):
        text = f"Highest cost {what}, at usage.prices."
        command = click.option(flag, type=Limit(whole=False), metavar="AMOUNT", help=text)(command)
    for flag, what in reversed(LIMITS):
        command = click.option(flag, type=Limit(), metavar="N", help=f"Maximum {what}.")(command)
    return command


@click.group(cls=CommandGroup)
def key() -> None:
    """Manage API keys: create, list, change, rotate, revoke.

    Changes take effect with the next request, also in a running daemon.
    """


@key.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(["infer", "read", "admin"]),
    multiple=True,
    default=("infer",),
    show_default=True,
    help="infer: use models; read: read metrics; admin: everything. May be repeated.",
)
@click.option(
    "--model",
    "models",
    metavar="NAME",
    multiple=True,
    help="Allow only these models; globs such as 'qwen*' are allowed.",
)
@click.option(
    "--expires",
    type=Expiry(),
    metavar="WHEN",
    help="When the key expires: in 12h, 30d or 8w, or on a day such as 2030-12-31.",
)
@limit_options
@click.option(
    "--priority",
    type=int,
    default=0,
    metavar="N",
    help="Priority: lower is served first, below 0 is premium (default 0).",
)
@click.option("--log-content", is_flag=True, help="Keep prompts and answers of this key in the request log.")
@json_option
@pass_program
def add(program: Program, /, *, as_json: bool, **fields: Any) -> None:
    """Create a key. Its secret is printed once, alone, on stdout."""
    import msgspec

    from ...security.keys import KeySpec

    try:
        spec = msgspec.convert(fields, KeySpec)
    except msgspec.ValidationError as error:
        raise bad_key(fields["name"], str(error)) from None
    program.paths.create()
    made, secret = _store(program).add(spec)
    _print_secret(program, made, secret, as_json=as_json)


@key.command("set")
@click.argument("name")
@limit_options
@click.option(
    "--priority", type=int, metavar="N", help="Priority: lower is served first, below 0 is premium."
)
@json_option
@pass_program
def set_(program: Program, /, *, name: str, as_json: bool, **limits: Any) -> None:
    """Change the limits of a key; its secret stays. The value none removes a limit."""
    import msgspec

    from ...security.keys import KeyChange

    context = click.get_current_context()
    given = {each: limits[each] for each in limits if is_given(context, each)}
    if not given:
        raise CliError("nothing to change", "no limit is named", "llmbox key set --help", Exit.USAGE)
    try:
        change = msgspec.convert(given, KeyChange)
    except msgspec.ValidationError as error:
        raise bad_key(name, str(error), "change") from None
    changed = _store(program).change(name, change)
    if as_json:
        output.write_json("key", {"key": _view(program, changed)})
    else:
        output.say(f"{name} is changed: {', '.join(each.replace('_', ' ') for each in given)}.")


def is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


@key.command()
@click.argument("name")
@json_option
@pass_program
def rotate(program: Program, name: str, *, as_json: bool) -> None:
    """Give a key a new secret; the old one is refused from now on."""
    changed, secret = _store(program).rotate(name)
    _print_secret(program, changed, secret, as_json=as_json)


@key.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_program
def rm(program: Program, names: tuple[str, ...], *, yes: bool) -> None:
    """Revoke keys. Their stored answers (store: true) are erased."""
    store = _store(program)
    store.check()
    wanted = [store.get(name) for name in dict.fromkeys(names)]
    keys = ", ".join(f"{each.name} ({each.display})" for each in wanted)
    question = f"Revoke {keys}? Their running requests end, and what they had stored is erased"
    require_consent(question, "nothing was revoked", yes=yes, as_json=False)
    for each in wanted:
        gone = revoke(program, store, each.name)
        output.say(f"{gone.name} ({gone.display}) is revoked.")
    forget_stored(program)


def revoke(program: Program, store: "KeyStore", name: str) -> "ApiKey":
    """Delete a key and what it has on disk of the KV cache; `forget_stored` afterwards erases its answers."""
    from ...control.kv_cache import purge_key

    gone = store.remove(name)
    purge_key(program.paths, program.settings().settings.cache, gone.id)
    return gone


@key.command()
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print names only.")
@pass_program
def ls(program: Program, *, as_json: bool, quiet: bool) -> None:
    """List the keys. Secrets are not kept, so they cannot be shown.

    Usage is shown while the daemon runs, as far back as the request log goes.
    """
    store = _store(program)
    store.check()
    usage = {} if quiet else _usage(program)
    rows = [{**_view(program, each), "usage": usage.get(each.name)} for each in store.list()]
    if as_json:
        output.write_json("keys", {"keys": rows})
    elif quiet:
        for row in rows:
            output.write(row["name"])
    elif rows:
        output.table(HEADERS, [_row(row) for row in rows], right=(5, 6, 8, 9, 10))
    else:
        output.say("There are no keys. On this machine none is needed; make one with llmbox key add NAME.")


def forget_stored(program: Program) -> None:
    """Erase the stored answers of deleted keys. Without a daemon that happens a minute after its
    next start.
    """
    if not program.client.is_up():
        return
    try:
        program.client.post("/admin/api/stored/forget", {})
    except CliError as error:
        output.say(f"Stored answers are deleted within the hour: {error.why}.")


def _print_secret(program: Program, key: "ApiKey", secret: str, *, as_json: bool) -> None:
    if as_json:
        output.write_json("key", {"key": _view(program, key), "secret": secret})
        return
    output.say(f"Key {key.name} ({', '.join(key.scopes)}). This is the only time that it is shown:")
    output.write(secret)


def _row(row: Mapping[str, Any]) -> tuple[object, ...]:
    expires = "never" if row["expires"] is None else formatting.clock(row["expires"])
    usage = row["usage"] or {}
    return (
        row["name"],
        row["display"],
        ",".join(row["scopes"]),
        ",".join(row["models"]) or "all",
        "expired" if row["expired"] else expires,
        row["rpm"] or "-",
        row["tpm"] or "-",
        ", ".join(_quota(each) for each in row["quotas"]) or "-",
        *(usage.get(name, "-") for name in ("requests", "tokens_in", "tokens_out")),
        "never" if row["last_used"] is None else formatting.clock(row["last_used"]),
    )


def _quota(row: Mapping[str, Any]) -> str:
    return f"{row['used']:.4g} of {row['limit']:.10g} {row['kind']}/{row['period']}"


def _view(program: Program, key: "ApiKey") -> dict[str, Any]:
    import msgspec

    from ...security.key_store import view
    from ...security.keys import QuotaLedger

    ledger = QuotaLedger(program.paths.keys_quota_file)
    data: dict[str, Any] = msgspec.to_builtins(view(key, _used(program), ledger))
    return data


def _usage(program: Program) -> Mapping[str, Any]:
    """Return the usage of keys from the daemon; empty if none runs."""
    try:
        found: Mapping[str, Any] = program.client.get("/admin/api/keys")["usage"]
    except CliError:
        return {}
    return found


def _store(program: Program) -> "KeyStore":
    from ...security.key_store import KeyStore

    return KeyStore(program.paths.keys_file)


def _used(program: Program) -> "LastUsed":
    from ...security.key_store import LastUsed

    return LastUsed(program.paths.keys_used_file)


def bad_key(name: str, why: str, verb: str = "make") -> CliError:
    text, _, place = why.partition(" - at ")
    field = place.strip("`$.").partition("[")[0]
    if field == "name":
        text = "at most 64 letters, digits, dots, dashes and underscores, a letter or digit first"
    where = f"{field}: " if field else ""
    return CliError(
        f"cannot {verb} the key {name[:64]!r}", f"{where}{text[:200]}", "llmbox key --help", Exit.USAGE
    )
