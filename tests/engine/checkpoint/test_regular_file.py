import pytest

from llmbox.engine.checkpoint.files import open_regular, read_regular
from support.odd_files import KINDS, make_odd, no_hanging


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path, kind, linked):
    path = tmp_path / "odd"
    make_odd(path, kind)
    if linked:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    with no_hanging(), pytest.raises(OSError, match=f"it is {kind} and not a regular file") as caught:
        open_regular(path)
    assert caught.value.strerror is not None


@pytest.mark.parametrize("buffering", [-1, 0])
def test_a_file_is_read_through_links_too(tmp_path, buffering):
    (tmp_path / "blob").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("blob")
    with open_regular(tmp_path / "link", buffering) as stream:
        assert stream.read() == b"abc"


def test_a_file_larger_than_the_bound_is_an_error(tmp_path):
    (tmp_path / "f").write_bytes(bytes(1001))
    assert len(read_regular(tmp_path / "f", 1001)) == 1001
    with pytest.raises(OSError, match="more than"):
        read_regular(tmp_path / "f", 1000)


def test_absence_is_told_as_always(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
