import os
import stat
from pathlib import Path

import pytest

from llmbox.app.config.paths import elsewhere, find_paths, private_dir, socket_address
from llmbox.app.errors import CliError, Exit


def test_data_dir_holds_everything(tmp_path: Path):
    paths = find_paths(tmp_path)
    for path in (
        paths.config_file,
        paths.state_dir,
        paths.cache_dir,
        paths.lock_file,
        paths.socket_file,
        paths.log_file,
        paths.request_db,
    ):
        assert path.is_relative_to(tmp_path)


def test_the_platform_folders_follow_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for kind in ("CONFIG_HOME", "DATA_HOME", "STATE_HOME", "CACHE_HOME", "RUNTIME_DIR"):
        monkeypatch.setenv(f"XDG_{kind}", str(tmp_path / kind))
    paths = find_paths()
    assert paths.config_file == tmp_path / "CONFIG_HOME" / "llmbox" / "config.toml"
    assert paths.system_config == Path("/etc/llmbox/config.toml")
    assert paths.request_db == tmp_path / "STATE_HOME" / "llmbox" / "requests.db"
    assert paths.pid_file == tmp_path / "RUNTIME_DIR" / "llmbox" / "llmbox.pid"
    assert paths.cache_dir == tmp_path / "CACHE_HOME" / "llmbox"
    assert paths.data_dir == tmp_path / "DATA_HOME" / "llmbox"


def test_config_replaces_the_user_file_only(tmp_path: Path):
    paths = find_paths(tmp_path, tmp_path / "other.toml")
    assert paths.config_file == tmp_path / "other.toml"
    assert paths.state_dir == tmp_path / "state"


def test_folders_are_private_and_an_own_data_dir_keeps_its_mode(tmp_path: Path):
    tmp_path.chmod(0o755)
    paths = find_paths(tmp_path)
    paths.state_dir.mkdir(mode=0o755)
    paths.create()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    for folder in (paths.state_dir, paths.runtime_dir, paths.cache_dir):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_data_dir_that_others_could_write_is_closed_to_them(tmp_path: Path, mode: int):
    tmp_path.chmod(mode)
    find_paths(tmp_path).create()
    assert stat.S_IMODE(tmp_path.stat().st_mode) & 0o022 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("name", ["keys.json", "config.toml", "state"])
def test_what_others_left_in_an_open_data_dir_is_refused(tmp_path: Path, name: str):
    tmp_path.chmod(0o777)
    (tmp_path / name).touch()
    os.chown(tmp_path / name, 12345, 12345)
    with pytest.raises(CliError, match=f"cannot use the file .*{name}") as caught:
        find_paths(tmp_path).create()
    assert caught.value.exit == Exit.DENIED


def test_folders_that_cannot_be_written_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a file system that is mounted read-only, where nothing can be created either."""
    paths = find_paths(tmp_path)
    paths.create()
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != paths.data_dir)
    with pytest.raises(CliError, match="cannot write to the folder") as caught:
        paths.create()
    assert str(paths.data_dir) in caught.value.fix
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != paths.runtime_dir)
    with pytest.raises(CliError, match=r"cannot write to the folder .*run"):
        paths.create()


def test_a_foreign_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CliError, match="cannot use the folder") as caught:
        private_dir(tmp_path)
    assert caught.value.exit == Exit.DENIED


def test_long_socket_paths_go_through_a_descriptor(tmp_path: Path):
    long = tmp_path / ("x" * 120) / "llmbox.sock"
    assert socket_address(tmp_path / "s", 5) == str(tmp_path / "s")
    assert socket_address(long, 5) == "/proc/self/fd/5/llmbox.sock"


@pytest.mark.parametrize(("name", "kind"), [("XDG_RUNTIME_DIR", "runtime_dir"), ("HOME", "data_dir")])
def test_a_variable_of_another_user_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
):
    """As after `su`, which keeps the variables of the user before it."""
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv(name, str(tmp_path / "theirs"))
    paths = find_paths()
    monkeypatch.setattr(Path, "mkdir", _refuse)
    with pytest.raises(CliError, match="cannot create the folder") as caught:
        private_dir(getattr(paths, kind))
    assert f"set {name} to a folder of this user: it is {tmp_path}/theirs" in caught.value.fix


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_an_own_folder_is_not_blamed_on_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "HOME" not in elsewhere(tmp_path / "box")


@pytest.mark.parametrize("home", [None, "", "home/of/nobody"])
def test_without_a_home_the_next_step_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
):
    """As in a container whose user has no entry in /etc/passwd: HOME is missing, empty or relative."""
    for name in ("CONFIG_HOME", "DATA_HOME", "STATE_HOME", "CACHE_HOME"):
        monkeypatch.delenv(f"XDG_{name}", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    with pytest.raises(CliError, match="~ is not a path") as caught:
        find_paths()
    assert "set HOME" in caught.value.fix
    assert find_paths(tmp_path).data_dir == tmp_path
