"""Locations of files: the platform's folders, or all of them under one `--data-dir`.

Folders are made 0700 and files 0600 (umask 077): other users of the box cannot read them.
"""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from ..errors import CliError, Exit

SYSTEM_CONFIG = Path("/etc/llmbox/config.toml")
UNIX_PATH_LIMIT = 104
"""Length limit in bytes of a unix socket address on every platform we know (Linux: 107, macOS: 103)."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Locations of all files of one daemon."""

    config_file: Path
    system_config: Path
    data_dir: Path
    state_dir: Path
    cache_dir: Path
    runtime_dir: Path

    @property
    def lock_file(self) -> Path:
        return self.runtime_dir / "llmbox.lock"

    @property
    def pid_file(self) -> Path:
        return self.runtime_dir / "llmbox.pid"

    @property
    def socket_file(self) -> Path:
        return self.runtime_dir / "llmbox.sock"

    @property
    def sign_in_file(self) -> Path:
        """One-time link, used where a service manager would keep printed output."""
        return self.runtime_dir / "sign-in"

    @property
    def log_file(self) -> Path:
        return self.state_dir / "daemon.log"

    @property
    def files_dir(self) -> Path:
        """Files uploaded by clients."""
        return self.state_dir / "files"

    @property
    def request_db(self) -> Path:
        return self.state_dir / "requests.db"

    @property
    def tls_dir(self) -> Path:
        """Certificate and key that llmbox made for itself."""
        return self.data_dir / "tls"

    @property
    def share_file(self) -> Path:
        """Settings as they were before `llmbox share`, for its undo."""
        return self.data_dir / "share.json"

    @property
    def mcp_secrets_file(self) -> Path:
        """Headers and environment variables of the MCP servers that the panel's chat uses."""
        return self.data_dir / "mcp-secrets.json"

    @property
    def registry_file(self) -> Path:
        """Aliases and adopted models."""
        return self.data_dir / "models.json"

    @property
    def loads_file(self) -> Path:
        """Results of the last loads of each model."""
        return self.state_dir / "loads.json"

    @property
    def downloads_file(self) -> Path:
        """Unfinished downloads."""
        return self.state_dir / "downloads.json"

    @property
    def bandwidth_file(self) -> Path:
        """Measured memory bandwidth of this machine."""
        return self.state_dir / "bandwidth.json"

    @property
    def recommended_file(self) -> Path:
        """Facts of the recommended models, from the hub."""
        return self.cache_dir / "recommended.json"

    @property
    def kernel_cache(self) -> Path:
        return self.cache_dir / "kernels"

    @property
    def repacked(self) -> Path:
        """Weights packed for the CPU kernels."""
        return self.cache_dir / "repacked"

    @property
    def kv_cache(self) -> Path:
        """KV blocks that later loads and turns go on from."""
        return self.cache_dir / "kv"

    @property
    def keys_file(self) -> Path:
        """API keys, as hashes."""
        return self.data_dir / "keys.json"

    @property
    def keys_used_file(self) -> Path:
        """Time of last use of each key."""
        return self.data_dir / "keys-used.json"

    @property
    def keys_quota_file(self) -> Path:
        """Requests, tokens and cost of each key in this day and month."""
        return self.data_dir / "keys-quota.json"

    @property
    def history_file(self) -> Path:
        return self.state_dir / "chat_history"

    def create(self) -> None:
        """Make the folders. Raises CliError if another user can write them or we cannot."""
        if self.data_dir.is_dir():
            self._claim_data_dir()
        else:
            private_dir(self.data_dir)
        for folder in (self.state_dir, self.cache_dir, self.runtime_dir):
            private_dir(folder)

    def _claim_data_dir(self) -> None:
        """Take over a folder that a user named and created: others may keep reading it, but not write there.

        Anybody who could write may have left files that grant access: such files must be ours.
        """
        _check_owner(self.data_dir)
        status = self.data_dir.stat()
        if status.st_mode & 0o022:
            for file in (
                self.keys_file,
                self.registry_file,
                self.config_file,
                self.state_dir,
                self.runtime_dir,
            ):
                if file.parent == self.data_dir and file.exists():
                    _check_owner(file)
            try:
                self.data_dir.chmod(status.st_mode & 0o7755)
            except OSError as error:
                raise _unusable(self.data_dir, error) from error
        _check_writable(self.data_dir)


def expand_home(path: Path) -> Path:
    """Replace a leading `~` or `~user` by that user's home. Raises CliError if the home is not known."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise _without_home(path) from None


def _without_home(path: Path) -> CliError:
    return CliError(
        f"{path} is not a path here",
        "there is no such user, or HOME is not set",
        "set HOME, or write the whole path",
        Exit.NOT_FOUND,
    )


def find_paths(data_dir: Path | None = None, config: Path | None = None) -> Paths:
    """Locate all files, from `--data-dir` and `--config` or the platform."""
    if data_dir is not None:
        root = expand_home(data_dir).absolute()
        paths = Paths(root / "config.toml", SYSTEM_CONFIG, root, root / "state", root / "cache", root / "run")
    else:
        try:
            paths = _platform_paths()
        except RuntimeError:  # HOME and the user database name no absolute path
            raise _without_home(Path("~")) from None
    if config is None:
        return paths
    return Paths(
        expand_home(config).absolute(),
        paths.system_config,
        paths.data_dir,
        paths.state_dir,
        paths.cache_dir,
        paths.runtime_dir,
    )


def _platform_paths() -> Paths:
    from platformdirs import PlatformDirs  # noqa: PLC0415 - not needed with --data-dir

    dirs = PlatformDirs("llmbox", appauthor=False)
    with warnings.catch_warnings():
        # Without XDG_RUNTIME_DIR (root, cron, containers) it is below /tmp: `private_dir` looks whose it is.
        warnings.simplefilter("ignore")
        runtime = dirs.user_runtime_path
    return Paths(
        dirs.user_config_path / "config.toml",
        SYSTEM_CONFIG,
        dirs.user_data_path,
        dirs.user_state_path,
        dirs.user_cache_path,
        runtime,
    )


def private_dir(folder: Path) -> None:
    """Make `folder` 0700. Refuses a folder of another user, who may have prepared it in /tmp."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise _unusable(folder, error) from error
    _check_writable(folder)


def _check_owner(path: Path) -> None:
    owner = path.stat().st_uid
    if owner != os.geteuid():
        what = "folder" if path.is_dir() else "file"
        raise CliError(
            f"cannot use the {what} {path}",
            f"it belongs to user id {owner}, this process runs as {os.geteuid()}",
            "choose another place with --data-dir DIR, or fix its owner with chown",
            Exit.DENIED,
        )


def _check_writable(folder: Path) -> None:
    """Check before the first file is written that the folder is writable; also detects read-only mounts."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CliError(
            f"cannot write to the folder {folder}",
            "it is read-only for this user",
            f"{elsewhere(folder)}, or: chmod u+rwx {folder}",
            Exit.DENIED,
        )


def _unusable(folder: Path, error: OSError) -> CliError:
    return CliError(
        f"cannot create the folder {folder}",
        error.strerror or str(error),
        elsewhere(folder),
        Exit.DENIED,
    )


def elsewhere(path: Path) -> str:
    """Return what to do about a place that cannot be used. The variable that leads there may be of another
    user, as after `su` and `sudo -E`.
    """
    fix = "choose another place with --data-dir DIR"
    for name in (
        "XDG_RUNTIME_DIR",
        *(f"XDG_{kind}_HOME" for kind in ("CONFIG", "DATA", "STATE", "CACHE")),
        "HOME",
    ):
        value = os.environ.get(name)
        if value and path.is_relative_to(value) and not _is_own(Path(value)):
            return f"{fix}, or set {name} to a folder of this user: it is {value}"
    return fix


def _is_own(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def socket_address(path: Path, dir_fd: int | None = None) -> str:
    """Address to bind or connect to. Paths over the limit go through an open descriptor of their folder.

    `dir_fd` must stay open until the call that uses the address returns.
    """
    if len(os.fsencode(path)) <= UNIX_PATH_LIMIT or dir_fd is None:
        return str(path)
    return f"/proc/self/fd/{dir_fd}/{path.name}"
