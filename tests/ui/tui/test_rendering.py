import pytest
from rich.cells import cell_len

from llmbox.app.telemetry.snapshot import NA, GpuReading
from llmbox.engine.ipc.messages import DraftCounts
from llmbox.ui.tui.rendering import (
    ASCII,
    UNICODE,
    bar,
    count,
    duration,
    fit,
    line_width,
    rate,
    seconds,
    size,
    wrap,
)
from llmbox.ui.tui.screens.memory import _prefix_cache
from llmbox.ui.tui.screens.overview import gpu_lines
from llmbox.ui.tui.screens.requests import request_lines, time_bar
from llmbox.ui.tui.widgets.charts import AXIS, AxisChart, Series, draw_chart, nice_top, thin
from llmbox.ui.tui.widgets.lines import cut
from support.snapshots import detail, engine, record


def test_fit_is_exact_for_any_text():
    for text in ("", "abc", "abcdefghij", "模型模型模型", "a模b型c"):
        for width in range(12):
            assert cell_len(fit(text, width)) == width
    assert fit("12", 4, right=True) == "  12"
    assert fit("abcdef", 4) == "abc…"


def test_a_line_is_cut_by_cells_not_by_characters():
    wide = (("模型名称很长", ""), (" ready", "good"))  # twelve cells, and six
    assert sum(cell_len(text) for text, _ in cut(wide, 9, UNICODE)) <= 9
    assert "".join(text for text, _ in cut(wide, 18, UNICODE)) == "模型名称很长 ready"
    assert "".join(text for text, _ in cut(wide, 17, UNICODE)).startswith("模型名称很长 re")


def test_bars_fill_their_width_and_show_what_is_small():
    for glyphs in (UNICODE, ASCII):
        for parts in ([], [(0.001, "kv")], [(0.5, "kv"), (0.7, "bad")], [(1.0, "kv"), (0.2, "bad")]):
            assert line_width(bar(parts, 10, glyphs)) == 10
    assert bar([(0.001, "kv")], 10, UNICODE)[0] == ("▇", "kv")


def test_names_are_cut_in_the_middle():
    name = "Qwen/Qwen3-30B-A3B-Instruct-2507"
    assert fit(name, 20, middle=True) == "Qwen/Qwen3…ruct-2507"
    assert fit(name, 40, middle=True) == name.ljust(40)
    for width in range(12):
        assert cell_len(fit("模型" * 9, width, middle=True)) == width


def plot(values, width, height, **options):
    glyphs = options.pop("glyphs", UNICODE)
    chart = AxisChart("T", (), (Series(values, "kv"),), lambda value: f"{value:g}", **options)
    return ["".join(text for text, _ in line) for line in draw_chart(chart, width, height, glyphs)]


def test_charts_have_axes():
    lines = plot([0.0] * 50 + [30.0, 60.0, 80.0, 100.0], 47, 6)
    assert [line[:AXIS].strip() for line in lines[1:]] == ["100┤", "│", "50┤", "│", "└"]
    assert lines[-1].endswith("───now")
    assert "-0:30" in lines[-1]
    assert [line[-2:] for line in lines[1:5]] == [" ⣸", "⢠⣿", "⣸⣿", "⣿⣿"]
    assert all(line_width(((line, ""),)) == 47 for line in lines)


def test_charts_leave_gaps_and_show_what_is_small():
    assert [line[-2:] for line in plot([-1.0, -1.0, 0.001, 0.0], 20, 3, top=1.0)][1] == " ⡀"
    assert plot([100.0, 0.0, 50.0], 20, 4, glyphs=ASCII)[1:3] == [
        "   100|          #  ",
        "      |          # #",
    ]


def test_a_second_series_is_a_line():
    series = (Series([1.0] * 8, "kv"), Series([2.0, 2.0, 4.0, 4.0, 4.0, 1.5, 1.5, 1.5], "work"))
    chart = AxisChart("T", (), series, lambda value: f"{value:g}", top=4.0)
    upper, lower = draw_chart(chart, 20, 4, UNICODE)[1:3]
    assert upper[2:] == (("⡏⢱", "work"), (" ", ""))
    assert lower[2:] == (("⣭⣤⣼⣶", "kv"),), "the first series is filled and keeps its color"
    assert draw_chart(chart, 20, 4, ASCII)[1][2] == ("---", "work")


def test_a_target_is_a_line_where_nothing_is_drawn():
    lines = plot([1.0, 1.0], 20, 6, top=4.0, target=3.0)
    assert [("╌" in line) for line in lines] == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("value", "top"), [(0.0, 4.0), (3.9, 4.0), (41.0, 100.0), (100.0, 100.0), (101.0, 200.0), (0.3, 4.0)]
)
def test_the_top_of_an_axis_is_round(value, top):
    assert nice_top(value, 4.0) == top


def test_longer_ranges_average_over_intervals_that_stay():
    assert thin([1.0, 3.0, -1.0, 5.0], 2, now=103) == [2.0, 5.0]
    assert thin([3.0, -1.0, 5.0, 7.0], 2, now=104) == [3.0, 5.0, 7.0]


def test_numbers():
    assert [count(value) for value in (NA, None, 0, 3, 3.14, 1234.5)] == ["-", "-", "0", "3", "3.1", "1,234"]
    assert [size(value) for value in (0, 999, 5e3, 5e8, 141e9, 1.2e12)] == [
        "0 B", "999 B", "5 kB", "500 MB", "141.0 GB", "1.20 TB",
    ]  # fmt: skip
    assert [seconds(value) for value in (NA, 0.0214, 3.0, 75.0)] == ["-", "21 ms", "3.0 s", "1 min 15 s"]
    assert [duration(value) for value in (59, 3600, 90_000)] == ["59 s", "1 h 00 min", "1 d 1 h"]
    assert rate(NA) == "-"


@pytest.mark.parametrize(("temperature", "warns"), [(84.9, False), (85.0, True), (NA, False)])
def test_a_warm_gpu_is_colored_from_85_degrees_on(temperature, warns):
    lines = gpu_lines(GpuReading(index=0, name="NVIDIA H100", temperature=temperature), 120, UNICODE)
    assert ("warn" in {style for line in lines for _, style in line}) == warns


def test_where_the_time_went():
    (_, legend) = time_bar(record(1, queue_s=1.0, ttft_s=3.0, e2e_s=10.0), 20, UNICODE)
    assert "".join(text for text, _ in legend) == "queue 1.0 s   prefill 2.0 s   decode 7.0 s"
    (queued, _) = time_bar(record(1, queue_s=None, ttft_s=None, e2e_s=4.0), 20, UNICODE)
    assert queued[0] == ("▇" * 20, "warn")
    assert time_bar({"age": 3.0}, 20, UNICODE) == []


def test_a_request_in_full_has_its_prompt_and_answer():
    content = {"prompts": ["<|user|>\n\n" + "word " * 20], "outputs": ["said \x1b[31m this", "and that"]}
    answer = {**detail(record(1)), "content": content, "content_note": ""}
    text = ["".join(span for span, _ in line) for line in request_lines(answer, 40, UNICODE)]
    assert all(len(line) <= 68 for line in text)
    assert "Prompt ─────────────────────────────────" in text
    assert text[-5:] == [
        "Answer ─────────────────────────────────",
        "said \\x1b[31m this",
        "",
        "Answer ─────────────────────────────────",
        "and that",
    ]
    assert "shared with an earlier prompt" in " ".join(text)
    assert request_lines({"request": record(1)}, 40, UNICODE), "rows of the event stream have no notes"


def test_wrapping_breaks_words_that_are_too_long():
    lines = ["".join(span for span, _ in line) for line in wrap("ab " + "x" * 12 + " 漢字漢字 c", 5)]
    assert lines == ["ab", "xxxxx", "xxxxx", "xx", "漢字", "漢字", "c"]
    assert wrap("", 5) == []


def test_the_memory_screen_has_the_acceptance_of_each_method():
    counts = {"ngram": DraftCounts(draft_tokens=30, accepted_tokens=15), "mtp": DraftCounts(draft_tokens=10)}
    snapshot = engine(draft_tokens=40, accepted_tokens=15, draft_methods=counts)
    ((text, _),) = _prefix_cache(snapshot)[0]
    assert "38 % of draft tokens accepted (ngram 50 %, mtp 0 %)" in text
