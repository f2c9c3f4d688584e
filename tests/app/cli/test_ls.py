"""`llmbox ls` of models whose files have left, and of failed loads."""

import json
from pathlib import Path

from llmbox.app.cli.models.models import _output_format
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


def test_show_says_how_a_model_writes_calls_and_thoughts(tmp_path):
    template = "{% if tools %}[TOOL_CALLS]f[ARGS]{% endif %}[THINK][/THINK]"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    told = _output_format(tmp_path)
    assert told["tool_calls"].startswith("mistral (")
    assert told["thoughts"] == "[THINK] … [/THINK]"
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert _output_format(tmp_path) == {"tool_calls": None, "thoughts": None}
