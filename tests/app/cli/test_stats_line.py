"""The line of `llmbox stats`."""

from llmbox.app.cli.admin.doctor import _by_method


def test_acceptance_is_shown_by_method():
    models = [
        {"stats": {"draft_methods": {"ngram": {"accepted_tokens": 3, "draft_tokens": 4}}}},
        {
            "stats": {
                "draft_methods": {
                    "ngram": {"accepted_tokens": 0, "draft_tokens": 2},
                    "suffix": {"accepted_tokens": 1, "draft_tokens": 1},
                }
            }
        },
        {"stats": {}},
    ]
    assert _by_method({"models": models}) == " (ngram 50%, suffix 100%)"
    assert _by_method({"models": []}) == ""
