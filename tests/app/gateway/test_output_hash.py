"""Hashes of answers: the same ids give the same one, in this installation only."""

from llmbox.app.gateway.choice_stream import OutputHasher, same


def test_the_same_tokens_have_the_same_hash_across_restarts(tmp_path):
    file = tmp_path / "secret"
    one, other = OutputHasher(file), OutputHasher(file)
    assert one.of([[1, 2], [3]]) == other.of([[1, 2], [3]])
    assert same(one.of([[1, 2]]), other.of([[1, 2]])) is True
    assert file.stat().st_mode & 0o077 == 0


def test_choices_are_told_apart_by_their_place_and_length(tmp_path):
    hasher = OutputHasher(tmp_path / "secret")
    outputs = ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]], [[1, 2, 3]], [[1, 2]])
    assert len({hasher.of(each) for each in outputs}) == len(outputs)
    assert same(hasher.of([[1]]), hasher.of([[2]])) is False


def test_another_installation_has_other_hashes_which_are_not_compared(tmp_path):
    ours, theirs = OutputHasher(tmp_path / "a").of([[7]]), OutputHasher(tmp_path / "b").of([[7]])
    assert ours != theirs
    assert same(ours, theirs) is None


def test_no_answer_has_no_hash(tmp_path):
    hasher = OutputHasher(tmp_path / "secret")
    assert hasher.of([]) == hasher.of([[], []]) == ""
    assert same("", "") is None


def test_without_a_place_for_the_secret_there_are_no_hashes(tmp_path):
    assert OutputHasher(tmp_path / "missing" / "secret").of([[1]]) == ""
    (tmp_path / "short").write_bytes(b"123")
    assert OutputHasher(tmp_path / "short").of([[1]]) == ""
