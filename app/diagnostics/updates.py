"""Newer releases, asked for by the owner only, and the commands that change this very installation.

The index is the one that pip or uv would ask: from their variables and pip's configuration files. PyPI is not
asked: the package of this name there is another program, by other people.
"""

import configparser
import http.client
import json
import os
import re
import shlex
import sys
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec

from llmbox import __version__

from ..config.paths import expand_home
from ..errors import CliError, Exit

DEFAULT_INDEX: Final = "https://pypi.org/simple"
"""Index of pip and uv where nothing else is configured."""
ACCEPTED: Final = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_FOREIGN: Final = {"pypi.org", "www.pypi.org", "test.pypi.org"}
"""Hosts of indexes whose `llmbox` is another program."""
_TIMEOUT: Final = 20.0
_LARGEST: Final = 20_000_000
"""Bytes of an answer."""
_RELEASE = re.compile(r"\d+(\.\d+)*")
_YANKED = re.compile(r"""(?:^|[\s"'])data-yanked(?![\w-])""", re.IGNORECASE)
_FILE = re.compile(r"llmbox-(\d[^-]*?)(?:-.*\.whl|\.tar\.gz)")


class _File(msgspec.Struct):
    filename: str
    yanked: bool | str = False


class _Page(msgspec.Struct):
    """Page of one project, as PEP 691 has it."""

    files: list[_File]


@dataclass(frozen=True, slots=True)
class Update:
    """Result of a check. `command` upgrades this installation."""

    installed: str
    latest: str
    is_newer: bool
    command: str
    index: str


def check_for_update(environ: Mapping[str, str]) -> Update:
    """Ask the index for the newest release. Raises CliError."""
    index = index_url(environ)
    if _host(index) in _FOREIGN:
        raise CliError(
            "there is no package index of llmbox here",
            "the llmbox on PyPI is another program: installing it would replace this one",
            f"{_upgrade_by_hand()}; or name an index that has it: PIP_INDEX_URL=URL",
            Exit.NOT_FOUND,
        )
    latest = newest_release(_fetch(index), index)
    newer = _numbers(latest) > _numbers(__version__)
    return Update(__version__, latest, newer, upgrade_command(), without_password(index))


def _upgrade_by_hand() -> str:
    source = _source_folder()
    return f"git -C {shlex.quote(source)} pull" if source else "install a newer wheel or package of it"


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def index_url(environ: Mapping[str, str]) -> str:
    """Return the URL of the package index that pip or uv would use here."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if url := environ.get(name, "").strip():
            return url.partition("=")[2] if re.match(r"[\w-]+=", url) else url  # uv's NAME=URL
    for file in _pip_files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(file.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # pip would not read it either
        for section in ("install", "global"):
            if url := parser.get(section, "index-url", fallback="").strip():
                return url
    return DEFAULT_INDEX


def _pip_files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield pip's configuration files, the one that wins first."""
    home = expand_home(Path(environ.get("HOME") or "~"))
    if named := environ.get("PIP_CONFIG_FILE"):
        yield Path(named)
    yield Path(sys.prefix) / "pip.conf"
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield home / ".pip" / "pip.conf"
    yield Path("/etc/pip.conf")


def _fetch(index: str) -> str:
    """Return the index's page of llmbox: JSON (PEP 691), or HTML of older indexes. Raises CliError."""
    shown = without_password(index)
    if not shown.startswith(("http://", "https://")):
        raise _failed(shown, "it is not an http or https URL", "set PIP_INDEX_URL to your package index")
    request = urllib.request.Request(  # noqa: S310 - the scheme is checked
        f"{without_password(index).rstrip('/')}/llmbox/", headers={"Accept": ACCEPTED}
    )
    if login := urlsplit(index).netloc.rpartition("@")[0]:
        encoded = b64encode(unquote(login).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:  # noqa: S310
            body: bytes = answer.read(_LARGEST)
    except urllib.error.HTTPError as error:
        with error:
            why = "it has no package llmbox" if error.code == 404 else f"it answers {error.code}"
        raise _failed(shown, why, "check the index, or name another: PIP_INDEX_URL=URL") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        fix = "check the network, or name an index that can be reached: PIP_INDEX_URL=URL"
        raise _failed(shown, str(reason) or type(error).__name__, fix) from None
    return body.decode("utf-8", "replace")


def newest_release(page: str, index: str) -> str:
    """Return the newest version on an index's page that is not a pre-release. Raises CliError."""
    try:
        files = [each.filename for each in msgspec.json.decode(page, type=_Page).files if not each.yanked]
    except msgspec.ValidationError:
        files = []  # JSON of another kind
    except msgspec.DecodeError:
        links = re.findall(r"<a\s([^>]*)>\s*([^<]+?)\s*</a>", page)
        files = [name for attributes, name in links if not _YANKED.search(attributes)]
    versions = [found[1] for file in files if (found := _FILE.fullmatch(unquote(file)))]
    releases = [each for each in versions if _RELEASE.fullmatch(each)]
    if not releases:
        raise _failed(without_password(index), "it lists no release of llmbox", "see the index in a browser")
    return max(releases, key=_numbers)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release for comparison; what follows them is left out."""
    found = _RELEASE.match(version)
    numbers = [int(each) for each in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _failed(index: str, why: str, fix: str) -> CliError:
    return CliError(
        f"cannot ask {index or 'the package index'} for newer versions", why, fix, Exit.UNREACHABLE
    )


def upgrade_command() -> str:
    """Return the command that upgrades this installation, by the tool that made it."""
    return _command("llmbox", upgrade=True)


def add_package_command(package: str) -> str:
    """Return the command that adds a package to this installation."""
    return _command(package, upgrade=False)


def _command(package: str, *, upgrade: bool) -> str:
    prefix, python = Path(sys.prefix), shlex.quote(sys.executable)
    if (prefix / "pipx_metadata.json").exists():
        return "pipx upgrade llmbox" if upgrade else f"pipx inject llmbox {package}"
    if (prefix / "uv-receipt.toml").exists():
        return "uv tool upgrade llmbox" if upgrade else f"uv tool install llmbox --with {package}"
    if upgrade and prefix == Path("/opt/llmbox"):
        deb = Path("/var/lib/dpkg/info/llmbox.list").exists()
        return "sudo apt install ./llmbox_VERSION.deb" if deb else "sudo dnf install ./llmbox-VERSION.rpm"
    if upgrade and (source := _source_folder()):
        return f"git -C {shlex.quote(source)} pull"
    target = f"--upgrade {package}" if upgrade else package
    if (prefix / "pyvenv.cfg").exists() and not _has_pip():
        return f"uv pip install --python {python} {target}"
    return f"{python} -m pip install {target}"


def _has_pip() -> bool:
    from importlib.util import find_spec

    return find_spec("pip") is not None


def _source_folder() -> str:
    """Return the folder of an editable installation, or of a checkout that is run in place; else empty."""
    try:
        data = json.loads(distribution("llmbox").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        data = {}
    if data.get("dir_info", {}).get("editable"):
        return unquote(urlsplit(data.get("url", "")).path)
    root = Path(os.path.realpath(__file__)).parents[2]
    return str(root) if (root / ".git").exists() else ""
