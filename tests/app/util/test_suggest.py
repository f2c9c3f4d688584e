"""A word that is not known is answered with the nearest that is."""

import io
import re
from pathlib import Path

import pytest

from llmbox.app.cli.root import run
from llmbox.app.errors import CliError, Exit
from llmbox.app.lifecycle.program import Program
from llmbox.app.security.key_store import KeyStore
from llmbox.app.util.formatting import nearest


@pytest.fixture
def called(tmp_path: Path, capsys, monkeypatch):
    """Runs a command on files of its own: (exit code, stderr)."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str]:
        code = run(["--data-dir", str(tmp_path / "data"), *words], Program())
        return code, capsys.readouterr().err

    with Path("/dev/null").open() as nobody:
        monkeypatch.setattr("sys.stdin", nobody)
        yield call


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["rnu"], "Did you mean 'run'?"),
        (["list"], "Did you mean 'ls'?"),
        (["stop"], "Did you mean 'down'?"),
        (["config", "list"], "Did you mean 'show'?"),
        (["config", "gte", "x"], "Did you mean 'get'?"),
        (["key", "delete", "x"], "Did you mean 'rm'?"),
        (["alias", "lst"], "Did you mean 'ls'?"),
        (["requests", "purg"], "Did you mean 'purge'?"),
        (["service", "instal"], "Did you mean 'install'?"),
        (["ps", "--jsno"], "Did you mean '--json'?"),
        (["config", "get", "server.prot"], "did you mean server.port?"),
        (["config", "show", "sever"], "did you mean server?"),
        (["show", "buitlin"], "did you mean builtin?"),
        (["up", "bulitin"], "did you mean builtin?"),
        (["run", "bultin", "hi"], "did you mean builtin?"),
        (["up", "builtin", "--device", "gpu"], "Did you mean 'cuda'?"),
        (["up", "builtin", "--dtype", "FP16"], "Did you mean 'float16'?"),
        (["up", "builtin", "--dtype", "bf16"], "Did you mean 'bfloat16'?"),
    ],
)
def test_the_nearest_is_named(called, words, meant):
    code, told = called(*words)
    assert code in {Exit.USAGE, Exit.NOT_FOUND}
    assert meant in told
    assert "tarting" not in told, "no daemon is started for a name that is wrong"


@pytest.mark.parametrize(("words", "now"), [(["lora", "list"], "ls"), (["ray", "delete"], "rm")])
def test_names_that_commands_had_still_work_and_no_help_lists_them(words: list[str], now: str, capsys):
    group, old = words
    assert run([group, old, "--help"], Program()) == Exit.OK
    assert "Usage: llmbox" in capsys.readouterr().out
    assert run([group, "--help"], Program()) == Exit.OK
    listed = capsys.readouterr().out.partition("Commands:")[2]
    assert re.search(rf"^  {now} ", listed, re.MULTILINE)
    assert not re.search(rf"^  {old} ", listed, re.MULTILINE)


def test_nothing_is_made_up(called):
    code, told = called("xylophone")
    assert code == Exit.USAGE
    assert "No such command 'xylophone'." in told
    assert "Did you mean" not in told
    assert nearest("zzz", ["run", "up"]) is None
    assert nearest("QWEN/qwen3-06b", ["Qwen/Qwen3-0.6B"]) == "Qwen/Qwen3-0.6B"


def test_models_keys_and_aliases(called, tmp_path):
    repo = tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-0.6B"
    repo.mkdir(parents=True)
    code, told = called("show", "Qwen/Qwen3-0.8B")
    assert code == Exit.NOT_FOUND
    assert "did you mean Qwen/Qwen3-0.6B?" in told
    called("alias", "set", "writer", "builtin")
    assert "did you mean writer?" in called("alias", "rm", "writr")[1]
    called("key", "add", "laptop")
    assert "did you mean laptop?" in called("key", "rm", "latop", "--yes")[1]


def test_a_gguf_file_that_does_not_exist(called, tmp_path):
    code, told = called("import", "nofile.gguf")
    assert code == Exit.NOT_FOUND
    assert "nofile.gguf does not exist" in told
    assert "fetch" not in told
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "did you mean model.gguf?" in called("import", "modle.gguf")[1]
    assert "is a folder: name a GGUF file, such as model.gguf" in called("import", ".")[1]


# ------------------------------------------------------------------ what cannot be had back asks


def test_without_a_terminal_nothing_is_deleted_unless_told(called, tmp_path):
    snapshot = tmp_path / "hf" / "hub" / "models--org--little" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}" * 500_000)
    code, told = called("rm", "org/little")
    assert code == Exit.USAGE
    assert "nothing was deleted" in told
    assert "Delete org/little (1.0 MB)?" in told
    assert "--yes" in told
    assert called("rm", "org/little", "--json")[0] == Exit.USAGE
    assert snapshot.exists()
    assert called("rm", "org/other")[0] == Exit.NOT_FOUND
    assert called("rm", "org/little", "--yes")[0] == 0
    assert not snapshot.exists()

    called("key", "add", "laptop")
    code, told = called("key", "rm", "laptop")
    assert code == Exit.USAGE
    assert "nothing was revoked" in told
    assert called("key", "rm", "laptop", "--yes")[0] == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 130), ("\n", 130)])
def test_on_a_terminal_it_is_asked(called, monkeypatch, tmp_path, answer, code):
    called("key", "add", "laptop")
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    got, told = called("key", "rm", "laptop")
    assert got == code
    assert "Revoke laptop (sk-llmbox" in told
    store = KeyStore(tmp_path / "data" / "keys.json")
    if code:
        assert store.get("laptop").name == "laptop"
    else:
        with pytest.raises(CliError, match="no key"):
            store.get("laptop")
