"""`llmbox ls` of models whose files have left, and of failed loads."""

from pathlib import Path

from support.cli_call import Call, FakeClient, call, home

__all__ = ["call", "home"]


def test_a_model_in_memory_whose_folder_is_gone_is_told_so(call: Call, tmp_path: Path):
    loaded = [{"name": "gone", "path": str(tmp_path / "gone"), "aliases": []}]
    daemon = FakeClient({"/admin/api/models": {"models": loaded}, "/admin/api/downloads": {"downloads": []}})
    done = call("ls", client=daemon)
    (row,) = [line for line in done.out.splitlines() if line.startswith("gone")]
    assert "loaded, its files are gone" in row
    assert "1970" not in row


def test_a_load_that_failed_does_not_list_the_current_folder(call: Call):
    failed = [{"name": "broken", "path": "", "aliases": []}]
    daemon = FakeClient({"/admin/api/models": {"models": failed}, "/admin/api/downloads": {"downloads": []}})
    done = call("ls", client=daemon)
    assert "builtin" in done.out
    assert "broken" not in done.out
