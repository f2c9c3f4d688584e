from llmbox.app.bench import measure as runs


def test_runs_are_kept_newest_first_up_to_a_limit(tmp_path, monkeypatch):
    times = iter(range(1, 100))
    monkeypatch.setattr(runs.time, "time", lambda: float(next(times)) + 1e9)
    monkeypatch.setattr(runs, "KEPT", 3)
    for number in range(5):
        runs.keep_run(tmp_path / "bench", f"m{number}", "http://x", [{"concurrency": 1}])
    (tmp_path / "bench" / "0.json").write_text("no run")
    assert [run.model for run in runs.read_runs(tmp_path / "bench")] == ["m4", "m3", "m2"]
    assert runs.read_runs(tmp_path / "nothing") == []
