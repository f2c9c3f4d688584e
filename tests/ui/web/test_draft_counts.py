"""The panel's line about draft tokens."""

from types import SimpleNamespace

from llmbox.engine.ipc.messages import DraftCounts
from llmbox.ui.web.render import environment
from support.snapshots import blocks, engine


def test_the_panel_has_the_acceptance_of_each_method():
    counts = {
        "ngram": DraftCounts(draft_tokens=30, accepted_tokens=15),
        "draft_model": DraftCounts(draft_tokens=10),
    }
    state = engine(draft_tokens=40, accepted_tokens=15, draft_methods=counts)
    shown = SimpleNamespace(**blocks())
    drawn = SimpleNamespace(blocks=shown, width=10, height=10, cells="", paths={})
    page = (
        environment()
        .get_template("live/maps.html")
        .render(maps=[drawn], engines={shown.model: state}, most_prefixes=5)
    )
    assert "15 of 40 draft tokens were accepted (ngram 15 of 30, draft_model 0 of 10)" in page
