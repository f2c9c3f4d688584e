"""What keys do, driven as a person would; the made-up API remembers what was asked of it."""

import json
import sys
import threading

import pytest

from llmbox.ui.tui.app import SCREENS
from llmbox.ui.tui.data.api import Recorder, Replay
from llmbox.ui.tui.messages import SPARKS, Connected, RunAction, StateChanged, TickReceived
from llmbox.ui.tui.widgets.dialogs import ConfirmDialog, HelpDialog, InputDialog, KeyValueDialog
from llmbox.ui.tui.widgets.lines import FixedTable, Lines
from support.snapshots import NOON, FakeApi, idle_tick, live_request, tick


async def test_numbers_go_to_screens(stage):
    async with stage((80, 24)) as scene:
        for number, screen in enumerate(SCREENS, 1):
            await scene.press("escape", str(number))
            assert isinstance(scene.app.screen, screen)


async def test_cancel_asks_first_and_goes_by_messages(stage):
    async with stage((80, 24)) as scene:
        await scene.press("2", "down", "x")
        await scene.until(lambda: isinstance(scene.app.screen, ConfirmDialog))
        await scene.press("n")
        assert scene.api.posted == []
        await scene.press("x")
        await scene.until(lambda: isinstance(scene.app.screen, ConfirmDialog))
        await scene.press("y")
        await scene.until(lambda: scene.api.posted)
        assert scene.api.posted == [("requests/req-2/cancel", {})]
        assert [m.path for m in scene.messages if isinstance(m, RunAction)][-1] == "requests/req-2/cancel"


async def test_only_what_is_in_flight_can_be_cancelled(stage):
    async with stage((80, 24)) as scene:
        await scene.press("2")
        await scene.settled()
        await scene.press("end", "x")
        assert not isinstance(scene.app.screen, ConfirmDialog)
        assert scene.api.posted == []


async def test_read_only_forbids(stage):
    async with stage((80, 24), read_only=True) as scene:
        await scene.press("2", "x")
        await scene.press("3", "p", "l")
        await scene.settled()
        assert scene.api.posted == []
        assert "read-only" in scene.text


async def test_models(stage):
    async with stage((120, 40)) as scene:
        await scene.press("3")
        await scene.settled()
        await scene.press("u")
        await scene.until(lambda: isinstance(scene.app.screen, ConfirmDialog))
        assert "15 requests in flight end" in scene.app.screen.question
        await scene.press("y")
        await scene.until(lambda: scene.api.posted)
        await scene.press("P")
        await scene.until(lambda: len(scene.api.posted) == 2)
        await scene.press("end", "l")
        await scene.until(lambda: len(scene.api.posted) == 3)
        await scene.press("p")
        await scene.until(lambda: isinstance(scene.app.screen, InputDialog))
        await scene.press(*"org/x", "enter")
        await scene.until(lambda: len(scene.api.posted) == 4)
        await scene.press("d")
        await scene.until(lambda: isinstance(scene.app.screen, ConfirmDialog))
        await scene.press("y")
        await scene.until(lambda: len(scene.api.posted) == 5)
        assert scene.api.posted == [
            ("models/unload", {"model": "qwen3-8b"}),
            ("models/pin", {"model": "qwen3-8b", "pinned": False}),
            ("models/load", {"model": "org/old"}),
            ("downloads", {"model": "org/x"}),
            ("models/delete", {"models": ["org/old"]}),
        ]


async def test_a_refusal_of_the_daemon_is_shown_as_it_is(stage):
    async with stage((120, 40)) as scene:
        scene.api.refusal = "needs [bold]30 GB[/bold], has 2 GB"
        await scene.press("3")
        await scene.settled()
        await scene.press("end", "l")
        await scene.until(lambda: "needs [bold]30 GB[/bold]" in scene.text)


async def test_download_progress_is_drawn_from_events_alone(stage):
    async with stage((120, 40)) as scene:
        await scene.press("3")
        await scene.settled()
        scene.api.push(
            "download.progress", {"model": "org/new", "state": "downloading", "done": 60, "total": 80}
        )
        await scene.until(lambda: "downloading 75 %" in scene.text)


async def test_filter_sort_and_back(stage):
    async with stage((120, 40)) as scene:
        await scene.press("2")
        await scene.settled()
        grid = scene.app.screen.query_one(FixedTable)
        await scene.press("slash", *"queued", "enter")
        assert {row.cells[4][0].split()[0] for row in grid.rows} == {"queued"}
        assert "15 in flight: 12 running, 3 queued; 3 of 18 match the filter" in scene.text
        await scene.press("slash", *" nothing", "enter")
        assert "Nothing matches" in scene.text
        await scene.press("escape")
        assert len(grid.rows) == 18
        await scene.press("o", "o", "o", "o")
        outputs = [int(row.cells[6][0]) for row in grid.rows[:15]]
        assert outputs == sorted(outputs, reverse=True)
        assert "sorted by OUTPUT" in scene.text
        await scene.press("o", "o", "o")
        assert "sorted by age" in scene.text


async def test_the_cursor_stays_with_its_request(stage):
    requests = tuple(live_request(number) for number in range(1, 6))
    async with stage((120, 40), ticks=(tick(0, requests=requests),)) as scene:
        await scene.settled()
        scene.app.state.ended.clear()
        await scene.press("down", "down")
        grid = scene.app.screen.query_one("#requests", FixedTable)
        assert grid.selected == "req-3"
        await scene.ticks(tick(1, requests=requests[1:]))
        assert grid.selected == "req-3"
        await scene.ticks(tick(2, requests=requests[4:]))
        assert grid.selected == "req-5"
        await scene.ticks(idle_tick())
        assert grid.selected is None
        await scene.press("enter")


async def test_copy_as_curl(stage):
    async with stage((120, 40)) as scene:
        await scene.press("2")
        await scene.settled()
        await scene.press("end", "up", "up", "y")
        await scene.until(lambda: scene.app.clipboard)
        assert scene.app.clipboard.startswith("curl http://127.0.0.1:7411/v1/chat/completions ")
        assert '"temperature": 0.7' in scene.app.clipboard
        assert '"seed": 7' in scene.app.clipboard


async def test_log_levels_parts_and_the_jump_to_a_request(stage):
    async with stage((120, 40)) as scene:
        await scene.press("2", "5")
        await scene.settled()
        assert "slow \\x1b[31m answer" in scene.text
        scene.api.push("log", {"time": 1.0, "level": "info", "component": "http", "message": "came live"})
        await scene.until(lambda: "came live" in scene.text)
        await scene.press("v", "v", "v")
        assert "came live" not in scene.text
        assert "old-2 brought it down" in scene.text
        await scene.press("enter")
        await scene.until(lambda: isinstance(scene.app.screen, KeyValueDialog))
        assert scene.app.screen.heading == "old-2"


async def test_two_marked_runs_are_compared(stage):
    async with stage((120, 40)) as scene:
        await scene.press("6")
        await scene.settled()
        await scene.press("m", "down", "m")
        assert "TTFT p50 +100%" in scene.shown("#compared")
        await scene.press("r")
        await scene.settled()
        assert "FAILED" in scene.text


async def test_pause_help_and_palette(stage):
    async with stage((120, 40)) as scene:
        await scene.press("space")
        scene.api.push("tick", idle_tick())
        await scene.until(lambda: scene.app.state.tick == idle_tick())
        assert "req-1" in scene.text
        assert "paused" in scene.text
        await scene.press("space")
        assert "req-1" not in scene.text
        await scene.press("2", "question_mark")
        assert isinstance(scene.app.screen, HelpDialog)
        for words in ("Copy as curl", "Filter", "Pause", "Bench & Doctor"):
            assert words in scene.text
        await scene.press("escape", "ctrl+p")
        await scene.until(lambda: "Memory" in scene.text)
        await scene.press(*"memory", "enter")
        await scene.until(lambda: isinstance(scene.app.screen, SCREENS[3]))


async def test_help_is_sorted_by_use_and_holds_no_keys_of_the_toolkit(stage):
    async with stage((120, 50)) as scene:
        await scene.press("2", "question_mark")
        await scene.settled()
        groups = ("Screens", "On this screen", "Moving", "Everywhere")
        places = [scene.text.index(name) for name in groups]
        assert places == sorted(places)
        assert "↑ k   Up" in scene.text
        assert "6   Bench & Doctor" in scene.text
        assert not any(words in scene.text for words in ("Scroll", "Page right", "Focus", "selected text"))


async def test_a_running_request_is_told_in_words(stage):
    async with stage((120, 40)) as scene:
        await scene.press("2", "enter")
        await scene.until(lambda: "prompt tokens" in scene.text)
        assert "streamed                yes" in scene.text
        assert "prompt_tokens" not in scene.text


async def test_a_daemon_that_goes_leaves_a_grey_frame_with_its_age(stage):
    async with stage((120, 40)) as scene:
        scene.app.state.clock = lambda: scene.app.state.tick_at + 75
        scene.api.break_off()
        await scene.until(lambda: "daemon gone" in scene.text)
        assert "1 min 15 s old" in scene.text
        assert "req-1" in scene.text
        styles = [
            segment.style for strip in _strips(scene)[4:-2] for segment in strip if segment.text.strip()
        ]
        colors = {style.color.name for style in styles if style and style.color}
        alert = next(segment for segment in _strips(scene)[1] if "daemon gone" in segment.text)
        assert alert.style.bold, "what tells of it is not gray"
        assert alert.style.color.name not in colors
        assert len(colors) <= 3, "everything but rules and scroll bars has one gray"


async def test_charts_begin_with_what_the_daemon_remembers(stage):
    async with stage((120, 40), ticks=()) as scene:
        times = [int(NOON) - 3, int(NOON) - 1]
        scene.api.table[f"telemetry?step=1&series={','.join(SPARKS)}"] = {
            "step": 1, "times": times, "series": {"running": [4.0, 6.0]},
        }  # fmt: skip
        await scene.ticks(tick(0))
        await scene.until(lambda: "past" in scene.app.state.answers)
        running = list(scene.app.state.sparks["running"])
        assert running[-4:] == [4.0, -1.0, 6.0, 12.0]
        assert len(running) == 600


async def test_no_daemon_at_all(stage):
    async with stage((120, 40), ticks=()) as scene:
        scene.api.break_off()
        await scene.until(lambda: "llmbox up" in scene.text)


async def test_newer_ticks_replace_those_that_wait():
    first, second = TickReceived(tick(0)), TickReceived(tick(1))
    assert first.can_replace(second)
    assert not first.can_replace(StateChanged())
    assert StateChanged().can_replace(StateChanged())


async def test_too_small_is_a_list_and_grows_back(stage):
    async with stage((40, 10)) as scene:
        assert "requests 12 running, 3 queued" in scene.text
        await scene.pilot.resize_terminal(120, 40)
        await scene.until(lambda: "Tokens/s" in scene.text)
        await scene.pilot.resize_terminal(8, 2)
        await scene.settled()


async def test_hostile_names_are_only_text(stage):
    hostile = live_request(1, id="[red]x[/red]\x1b[2J\n🦙" * 3, model="模型" * 30, key="\x07")
    async with stage((120, 40), ticks=(tick(0, requests=(hostile,)),)) as scene:
        for number in "123456":
            await scene.press(number)
            await scene.settled()
            assert "\x1b" not in scene.text
            assert all(len(line) <= 120 for line in scene.text.splitlines())


@pytest.mark.parametrize(
    "content", ["", "no json", '{"schema":"other/1"}', '{"schema":"llmbox.recording/1"}\n[]']
)
def test_a_file_that_is_no_recording(tmp_path, content):
    from llmbox.app.errors import CliError

    path = tmp_path / "r"
    path.write_text(content)
    with pytest.raises(CliError, match="not a recording"):
        Replay(path)
    with pytest.raises(CliError, match="cannot be read"):
        Replay(tmp_path)


async def test_a_recording_shows_the_same_again(tmp_path, stage):
    path = tmp_path / "recording"
    api = FakeApi()
    with path.open("w") as file:
        recorder = Recorder(api, file)
        api.push("tick", tick(3))
        api.push("model.ready", {"model": "m"})
        events = recorder.events()
        assert [next(events)[0] for _ in range(2)] == ["tick", "model.ready"]
        recorder.get("bench")
    replay = Replay(path)
    assert [kind for kind, _ in replay.events()] == ["tick", "model.ready"]
    assert replay.get("bench") == api.table["bench"]
    from llmbox.app.errors import CliError

    with pytest.raises(CliError, match="cannot change anything"):
        replay.post("models/load", {})


def _strips(scene):
    return scene.app.screen._compositor.render_strips()


async def test_a_fit_is_told_in_words(stage):
    async with stage((120, 40)) as scene:
        scene.api.table["fit?model=Qwen%2FQwen3-8B"] = {
            "fits": False,
            "disk_free": 9_000_000_000,
            "plan": None,
            "words": {
                "verdict": "Qwen/Qwen3-8B does not fit on cpu.",
                "why": "the model needs 17.3 GB and has 8.0 GB " + "(weights 16.4 GB in bfloat16) " * 3,
                "budget": "8.0 GB (7.1 GB free now)",
            },
            "remedies": ["--quant int4: 5.6 GB with a context of 4096 tokens"],
            "notes": [],
        }
        await scene.press("3")
        await scene.settled()
        await scene.press("f")
        await scene.until(lambda: isinstance(scene.app.screen, KeyValueDialog))
        await scene.settled()
        told = scene.app.screen.query_one(Lines).plain
        assert told[0] == "Qwen/Qwen3-8B does not fit on cpu."
        assert "budget      8.0 GB (7.1 GB free now)" in told
        assert "would fit   --quant int4: 5.6 GB with a context of 4096 tokens" in told
        assert not any("disk_free" in line or "plan" in line for line in told)
        assert max(map(len, told)) <= 68


async def test_a_failed_download_is_dismissed(stage):
    async with stage((120, 40)) as scene:
        error = {"what": "org/typo was not found", "why": "no such model", "fix": ""}
        failed = {"model": "org/typo", "state": "failed", "done": 0, "total": 0, "error": error}
        scene.api.table["downloads"] = {"downloads": [failed]}
        await scene.press("3")
        await scene.settled()
        await scene.until(lambda: "failed: org/typo" in scene.text)
        await scene.press("down", "down")
        await scene.press("d")
        await scene.until(lambda: isinstance(scene.app.screen, ConfirmDialog))
        await scene.press("y")
        await scene.until(lambda: scene.api.posted)
        assert scene.api.posted == [("downloads/dismiss", {"model": "org/typo"})]


async def test_a_failed_download_is_an_alert_before_its_screen_was_seen(stage):
    async with stage((120, 40)) as scene:
        error = {"what": "the hub cannot be reached", "why": "no network", "fix": ""}
        failed = {"model": "org/far", "state": "failed", "done": 0, "total": 0, "error": error}
        scene.api.table["downloads"] = {"downloads": [failed]}
        scene.app.post_message(Connected())
        await scene.until(lambda: "org/far: download failed: the hub cannot be reached" in scene.text)


def test_a_recording_is_whole_when_requests_and_events_come_at_once(tmp_path):
    path = tmp_path / "recording"
    api = FakeApi()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with path.open("w") as file:
            recorder = Recorder(api, file)
            threads = [
                threading.Thread(target=lambda: [recorder.get("bench") for _ in range(500)]) for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert len([json.loads(line) for line in path.read_text().split("\n")[:-1]]) == 2001
    assert Replay(path).get("bench") == api.table["bench"]
