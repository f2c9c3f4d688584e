"""What quality is measured with: the model's own prompts, and rows that are compared with the first."""

from types import SimpleNamespace
from typing import Any

import pytest

from gpu import quality, sections
from gpu.report import FAILED, Report
from llmbox.app.text.tokenizer.text_loader import load_model_text
from support import builtin_model
from support.builtin_model import ASSETS, IN_SCOPE


def test_prompts_and_ends_are_those_of_the_daemon() -> None:
    text = load_model_text(ASSETS)
    chats = builtin_model.user(*(question["ask"] for question in IN_SCOPE))
    assert quality.prompts() == builtin_model.asyncio.run(builtin_model._prompts(text, chats))
    assert set(quality.stop_ids()) == set(text.eos_token_ids)


@pytest.mark.parametrize(
    ("quant", "kv", "backend"),
    [
        ("none", "fp8", "reference, float8_e4m3fn keys and values"),
        ("fp8-block", "auto", "reference, fp8-block weights"),
    ],
)
def test_plain_torch_computes_the_formats(
    monkeypatch: pytest.MonkeyPatch, quant: str, kv: str, backend: str
) -> None:
    monkeypatch.setattr(quality, "IN_SCOPE", IN_SCOPE[:2])
    engine = quality.in_plain_torch(quant, kv)
    assert engine.info.backend == backend
    parts = quality.sequences_of(ASSETS, quality.TEXT.read_text())[:10]
    found = quality.measure(engine, parts)
    assert 1 < found.perplexity < 2048, "better than a guess"
    assert len(found.answers) == 2
    assert all(found.answers)


class Fake:
    """In place of engines: every quant has a perplexity, and answers that differ from `none`'s in two."""

    def __init__(self, quant: str) -> None:
        self.info = SimpleNamespace(backend=f"fake {quant}")
        self.perplexity = {"none": 8.0, "fp8": 8.1, "broken": 9.0}[quant]
        self.wrong = 0 if quant == "none" else 2


@pytest.fixture
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    right = [" ".join(need.split("|")[0] for need in question["must"]) for question in IN_SCOPE]
    monkeypatch.setattr(quality, "perplexity", lambda engine, _sequences: engine.perplexity)
    monkeypatch.setattr(quality, "answers", lambda engine: ["?"] * engine.wrong + right[engine.wrong :])


@pytest.mark.usefixtures("_fakes")
def test_rows_are_compared_with_the_first_and_what_is_broken_fails() -> None:
    report, count = Report(100.0), len(IN_SCOPE)
    load: Any = lambda quant, _kv: Fake(quant)  # noqa: E731
    quality.table(report, load, [("none", "auto"), ("fp8", "auto"), ("broken", "auto")])
    all_of, of = f"{count} of {count}", f"{count - 2} of {count}"
    assert report.lines[2].endswith(f"| fake none | 8.000 (+0.00%) | {all_of} | {all_of} |")
    assert report.lines[3].endswith(f"| fake fp8 | 8.100 (+1.25%) | {of} | {of} |")
    assert [line for line in report.lines if line.startswith(FAILED)] == report.lines[-1:]
    assert len(report.failures) == 1


@pytest.mark.usefixtures("_fakes")
@pytest.mark.parametrize(("absent", "rows"), [("fp8", ["none", "broken"]), ("none", [])])
def test_a_format_that_breaks_hides_no_other(absent: str, rows: list[str]) -> None:
    def load(quant: str, _kv: str) -> Any:
        if quant == absent:
            raise RuntimeError("an illegal memory access")
        return Fake(quant)

    report = Report(100.0)
    quality.table(report, load, [("none", "auto"), ("fp8", "auto"), ("broken", "auto")])
    assert [line.split(" | ")[0].strip("| ") for line in report.lines[2:] if line.startswith("| ")] == rows
    assert f"{absent} weights, auto keys and values: RuntimeError: an illegal" in report.failures[0]


@pytest.mark.usefixtures("_fakes")
def test_the_section_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "has_fp8", lambda _: False)
    assert quality.of_gpu() == [("none", "auto"), ("w8a8", "auto"), *quality.ALSO_ON_CPUS]
    report = Report(0.0)
    sections.quality(report)
    assert "out of time: 5 more, none and auto" in report.lines[-1]
    monkeypatch.setattr(quality, "ASSETS", ASSETS / "absent")
    sections.quality(report)
    assert report.lines[-1] == "Left out: the model's files are not there."
