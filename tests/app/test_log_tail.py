import json

from llmbox.app.log import tail


def test_entries_of_ours_and_of_others(tmp_path):
    path = tmp_path / "daemon.log"
    lines = [
        json.dumps({"time": 1.0, "level": "info", "component": "engines", "message": "a"}),
        "Fatal Python error \udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
        json.dumps({"time": 2.0, "level": "warning", "component": "http", "message": "b"}),
        "{half",
    ]
    path.write_text("\n".join(lines))
    assert [entry.component for entry in tail(path, 10)] == ["engines", "stderr", "http", "stderr"]
    assert [entry.message for entry in tail(path, 10, "warning", "http")] == ["b"]
    assert [entry.message for entry in tail(path, 1)] == ["{half"]
    assert tail(tmp_path / "none", 10) == []
