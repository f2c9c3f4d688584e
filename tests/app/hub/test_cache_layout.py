"""The cache's layout: snapshots appear whole, deletions free what nothing else uses."""

from pathlib import Path

import pytest

from llmbox.app.errors import CliError, Exit
from llmbox.app.hub.cache_layout import Repo, repositories
from llmbox.app.hub.local_models import disk_use, find_adoptable, find_removable, remove
from llmbox.app.models.registry import NameLookup, Registry

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """Two revisions that share one blob of 10 bytes; 100 and 1000 belong to one each."""
    repo = Repo(tmp_path / "hub", "org/name")
    for name, size in (("1" * 64, 10), ("2" * 64, 100), ("3" * 64, 1000)):
        repo.blob(name).parent.mkdir(parents=True, exist_ok=True)
        repo.blob(name).write_bytes(bytes(size))
    repo.publish(OLD, "v1", {"config.json": "1" * 64, "sub/model.safetensors": "2" * 64})
    repo.publish(NEW, None, {"config.json": "1" * 64, "model.safetensors": "3" * 64})
    return repo


def test_links_lead_to_blobs_and_refs_name_commits(repo: Repo):
    assert (repo.snapshot(OLD) / "sub" / "model.safetensors").stat().st_size == 100
    assert repo.refs() == {"v1": OLD, "main": NEW}
    assert [each.name for each in repositories(repo.cache)] == ["org/name"]
    assert repo.usage().size == 1110


def test_publishing_again_keeps_what_others_put_there(repo: Repo):
    (repo.snapshot(NEW) / "README.md").write_text("theirs")
    repo.publish(NEW, NEW, {"model.safetensors": "2" * 64})
    assert sorted(path.name for path in repo.snapshot(NEW).iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert (repo.snapshot(NEW) / "model.safetensors").stat().st_size == 100
    assert not list(repo.cache.rglob(".llmbox-*"))


def test_a_revision_goes_with_its_own_blobs_only(repo: Repo, tmp_path: Path):
    registry = Registry(tmp_path / "models.json")
    environ = {"HF_HUB_CACHE": str(repo.cache)}
    removed = remove(find_removable("org/name@v1", environ, NameLookup()), registry)
    assert removed.freed == 100
    assert repo.refs() == {"main": NEW}
    assert (repo.snapshot(NEW) / "config.json").stat().st_size == 10
    removed = remove(find_removable("org/name@main", environ, NameLookup()), registry)
    assert removed.freed == 1010
    assert not repo.folder.exists()


def test_the_whole_model_goes_and_is_counted(repo: Repo, tmp_path: Path):
    repo.partial("4" * 64).write_bytes(bytes(5))
    environ = {"HF_HUB_CACHE": str(repo.cache)}
    (taken,) = disk_use(environ, NameLookup())
    assert (taken.size, taken.partial, taken.revisions) == (1110, 5, 2)
    removed = remove(find_removable("org/name", environ, NameLookup()), Registry(tmp_path / "m.json"))
    assert removed.freed == 1115
    assert list(repo.cache.iterdir()) == [repo.cache / ".locks"] or not list(repo.cache.iterdir())


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("builtin", Exit.DENIED),
        ("org/other", Exit.NOT_FOUND),
        ("other", Exit.NOT_FOUND),
        ("org/name@v9", Exit.NOT_FOUND),
        ("/etc", Exit.USAGE),
        ("../hub", Exit.USAGE),
        ("org/na--me", Exit.USAGE),
        ("org/name@../../x", Exit.USAGE),
    ],
)
def test_nothing_else_can_be_deleted(repo: Repo, name: str, code: Exit):
    with pytest.raises(CliError) as caught:
        find_removable(name, {"HF_HUB_CACHE": str(repo.cache)}, NameLookup())
    assert caught.value.exit == code


def test_giving_up_a_download_keeps_what_others_use(repo: Repo):
    repo.partial("4" * 64).write_bytes(bytes(5))
    repo.blob("5" * 64).write_bytes(bytes(7))
    assert repo.drop(["1" * 64, "4" * 64, "5" * 64]) == 12
    assert repo.usage().size == 1110


def test_a_folder_without_models_is_named_with_the_reason(tmp_path: Path):
    with pytest.raises(CliError) as refused:
        find_adoptable(tmp_path)
    assert refused.value.exit == Exit.NOT_FOUND
    assert f"{tmp_path} has no model that can be served" in str(refused.value)


def test_a_folder_of_another_user_beside_models_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("lost+found", "qwen"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").touch()
    is_file, iterdir = Path.is_file, Path.iterdir

    def deny(path: Path) -> None:  # root, as whom tests may run, is denied nothing
        if "lost+found" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", lambda path: deny(path) or is_file(path))
    monkeypatch.setattr(Path, "iterdir", lambda path: deny(path) or iterdir(path))
    assert [each.name for each in find_adoptable(tmp_path, tmp_path / "home")] == ["qwen"]
