"""Vectors in the playground, in a real browser."""

from collections.abc import Iterator

import httpx
import pytest

from support.browser import Window, needs_browser, serious_problems
from support.cli_box import PATIENCE
from support.panel_box import Panel

pytestmark = needs_browser
TEXTS = ["hello there", "hello again", "quite another matter"]


@pytest.fixture
def only_text(panel: Panel) -> Iterator[str]:
    """A model that makes no vectors."""
    model = panel.box.model("only-text", vocab_size=480, pooling_problem="its head is another one")
    assert panel.box.run("load", model).code == 0
    yield "only-text"
    assert panel.box.run("unload", "only-text").code == 0


def send(window: Window, *texts: str) -> None:
    window.page.get_by_label("Prompt", exact=True).fill("\n\n".join(texts))
    window.page.get_by_role("button", name="Send").click()


def vectors(panel: Panel) -> list[list[float]]:
    body = {"model": "tiny", "input": TEXTS}
    answer = httpx.post(f"{panel.url}/v1/embeddings", json=body, timeout=PATIENCE)
    return [each["embedding"] for each in answer.json()["data"]]


def test_texts_are_compared_by_their_vectors(window: Window, axe: str):
    window.open("/admin/playground?model=tiny")
    page = window.page
    page.get_by_label("Kind").select_option("embeddings")
    assert page.get_by_label("Max tokens").is_hidden()
    send(window, *TEXTS)
    page.locator(".measure").wait_for()
    known = vectors(window.panel)
    assert f"{len(known[0])} dimensions" in page.locator(".measure").text_content()
    shown = [cells.locator("td").all_text_contents() for cells in page.locator(".vectors tbody tr").all()]
    assert [cells[0] for cells in shown] == TEXTS
    alike = [sum(map(float.__mul__, known[0], each)) for each in known]
    assert [float(cells[2]) for cells in shown] == pytest.approx(alike, abs=1e-4)
    assert not serious_problems(page, axe)


def test_vectors_as_an_api_call(window: Window):
    window.open("/admin/playground?model=tiny")
    page = window.page
    page.get_by_label("Kind").select_option("embeddings")
    page.get_by_label("Prompt", exact=True).fill("\n".join(TEXTS))
    page.get_by_text("View as API call").click()
    curl, python, javascript = (
        page.locator(place).text_content() for place in ("#curl", "#python", "#javascript")
    )
    assert "/v1/embeddings" in curl
    assert TEXTS[2] in curl
    assert "stream" not in curl + python + javascript
    assert "client.embeddings.create(" in javascript
    assert "client.embeddings.create(" in python
    compile(python, "shown", "exec")


def test_what_a_model_cannot_do_is_not_offered(window: Window, only_text: str):
    window.open("/admin/playground?model=tiny")
    page = window.page
    page.get_by_label("Kind").select_option("embeddings")
    page.locator("select[name=model]").select_option(only_text)
    assert page.locator("option[value=embeddings]").is_disabled()
    assert page.get_by_label("Kind").input_value() != "embeddings"
    assert page.get_by_label("Max tokens").is_visible()


def test_a_text_that_is_refused_is_not_lost(window: Window):
    window.open("/admin/playground?model=tiny")
    page = window.page
    page.get_by_label("Kind").select_option("embeddings")
    send(window, "word " * 3000)
    page.locator(".turn .failure").wait_for()
    assert page.get_by_label("Prompt", exact=True).input_value()
    window.problems.clear()  # the browser tells of the 400
