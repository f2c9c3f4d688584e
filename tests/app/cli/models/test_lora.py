"""`llmbox lora` on a tiny model: added after a check, listed, merged, removed."""

import json
from pathlib import Path

import pytest

from llmbox.app.cli.models import models, run
from llmbox.app.errors import Exit
from llmbox.app.lifecycle.program import Program
from llmbox.app.models.registry import Alias
from support.adapters import plain_tensors, write_adapter
from support.cli_call import Call, FakeClient, call, home
from support.tiny_models import make_tiny_model

__all__ = ["call", "home"]


@pytest.mark.process
def test_an_adapter_from_its_folder_to_a_merged_model(call: Call, tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", arch="qwen3")
    folder = write_adapter(tmp_path / "a", plain_tensors())
    added = call("lora", "add", "pirate", folder, "--base", base)
    assert added.code == 0, added.err
    assert "adapter of rank 4, 1 modules" in added.err + added.out
    assert call("lora", "add", "pirate", folder, "--base", base).code == Exit.CONFLICT
    assert call("alias", "set", "pirate", "builtin").code == Exit.CONFLICT
    (row,) = json.loads(call("lora", "ls", "--json").out)["adapters"]
    assert (row["name"], row["base"], row["rank"]) == ("pirate", str(base), 4)
    assert "(not here)" not in call("lora", "ls").out
    base.rename(tmp_path / "away")
    assert f"{base} (not here)" in call("lora", "ls").out
    (tmp_path / "away").rename(base)
    # The copy is used: the folder it came from may go.
    (folder / "adapter_model.safetensors").unlink()
    merged = call("lora", "merge", "pirate", "--out", tmp_path / "merged", "--json")
    assert json.loads(merged.out)["targets"] == 1, merged.err
    assert (tmp_path / "merged" / "model.safetensors").exists()
    assert call("lora", "rm", "pirate").code == 0
    assert call("lora", "rm", "pirate").code == Exit.NOT_FOUND
    assert call("lora", "ls", "-q").out == ""
    assert list((tmp_path / "data").rglob("adapter_model.safetensors")) == []


def test_a_folder_that_is_no_adapter_is_told_at_once(call: Call, tmp_path: Path) -> None:
    missing = call("lora", "add", "x", tmp_path / "nowhere", "--base", "builtin")
    assert missing.code == Exit.FAILED
    assert "is not a folder" in missing.err
    folder = write_adapter(tmp_path / "a", plain_tensors(), r=10**6)
    assert "allowed are 1 to 256" in call("lora", "add", "x", folder, "--base", "builtin").err
    unnamed = call("lora", "add", "x", write_adapter(tmp_path / "b", plain_tensors()))
    assert unnamed.code == Exit.USAGE
    assert "--base MODEL" in unnamed.err
    assert "NAME=DIR" in call("up", "--lora", "x").err


def test_show_tells_a_models_adapters_apart_from_its_aliases(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Program(data_dir=tmp_path / "data").registry
    for name, digest in (("poet", "0"), ("pirate", "1")):
        registry.set_alias(name, Alias("builtin", adapter=digest * 32))
    registry.set_alias("short", Alias("builtin"))
    facts = json.loads(call("show", "builtin", "--json").out)
    assert (facts["aliases"], sorted(facts["adapters"])) == (["short"], ["pirate", "poet"])
    memory = {"name": "builtin", "state": "ready", "info": None, "adapters": ["pirate"]}
    monkeypatch.setattr(models, "_in_memory", lambda *_: memory)
    (line,) = [line for line in call("show", "builtin").out.splitlines() if line.startswith("adapters")]
    assert sorted(line.removeprefix("adapters").strip().split(", ")) == ["pirate (in memory)", "poet"]


def test_chats_and_batches_ask_for_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the base, which is what is loaded."""
    program = Program(data_dir=tmp_path / "data")
    program.registry.set_alias("pirate", Alias("builtin", adapter="0" * 32))
    program.__dict__["client"] = FakeClient({"/admin/api/models": {"models": []}})
    monkeypatch.setattr(run, "find_running", lambda _: object())
    monkeypatch.setattr(run, "load_missing", lambda *_: ["builtin"])
    monkeypatch.setattr(run, "wait_for_models", lambda *_, **__: [{"name": "builtin", "chat": True}])
    assert run.ensure_loaded(program, "pirate")["name"] == "pirate"
    assert run.ensure_loaded(program, "builtin")["name"] == "builtin"


def test_uninstall_removes_the_copies_alone(call: Call, tmp_path: Path) -> None:
    home = tmp_path / "data" / "adapters"
    for name in ("0123456789abcdef" * 2, "somebody's"):
        write_adapter(home / name, plain_tensors())
    assert call("uninstall", "--yes").code == 0
    assert [folder.name for folder in home.iterdir()] == ["somebody's"]


def test_fit_says_what_an_adapter_takes(call: Call, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", plain_tensors())
    arguments = ("fit", "builtin", "--device", "cpu", "--dtype", "float32", "--json")
    alone, beside = call(*arguments), call(*arguments, "--lora", folder)
    assert beside.code == 0, beside.err
    told, plain = json.loads(beside.out), json.loads(alone.out)
    assert told["adapters"] == {str(folder): 4 * 2 * 64 * 4}
    assert "adapters" not in plain
    assert told["plan"]["workspace_bytes"] - plain["plan"]["workspace_bytes"] >= told["adapter_budget"]
    large = write_adapter(tmp_path / "large", plain_tensors(inputs=80_000, outputs=80_000))
    small = call("fit", "builtin", "--lora", large, "--lora-memory", "0.001")
    assert small.code == Exit.DOES_NOT_FIT
    assert "more than there is: --lora-memory GB" in small.out
    assert told["fits"]
    small = call("fit", "builtin", "--lora", large, "--lora-memory", "0.001", "--json")
    assert (small.code, json.loads(small.out)["fits"]) == (Exit.DOES_NOT_FIT, False)
    assert call("fit", "builtin", "--lora", tmp_path / "none").code == Exit.NOT_FOUND
