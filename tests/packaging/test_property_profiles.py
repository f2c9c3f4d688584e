"""Property tests draw as the profile says: a test that pins its examples would bind `make nightly` too."""

from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_test_pins_its_examples_by_itself():
    profiles = TESTS / "conftest.py"
    files = [file for file in TESTS.rglob("*.py") if file not in {profiles, Path(__file__)}]
    assert [str(file) for file in files if "derandomize" in file.read_text()] == []
