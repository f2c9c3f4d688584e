import json
from pathlib import Path

import pytest

from llmbox.app.errors import CliError, Exit
from llmbox.app.models import catalog
from llmbox.app.models.catalog import HUB_ID, check_name, hub_cache, likely_id, on_disk, resolve
from llmbox.app.models.registry import NameLookup
from support.odd_files import KINDS, make_odd, no_hanging

COMMIT = "a" * 40


def write_repo(cache: Path, name: str = "org/model", commit: str = COMMIT, ref: str = "main") -> Path:
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    blobs = repo / "blobs"
    for folder in (snapshot, blobs, repo / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repo / "refs" / ref).write_text(commit)
    (blobs / "1").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (blobs / "2").write_bytes(b"0" * 1000)
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "model.safetensors").symlink_to("../../blobs/2")
    return snapshot


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path)}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a/b.git", "a/b"),
        ("a/b.git@main", "a/b@main"),
        ("https://hub.example/a/b", "a/b"),
        ("git@hub.example:a/b.git", "a/b"),
        ("a/b.github", None),
        ("a/b", None),
        ("a/b/c", None),
    ],
)
def test_the_address_of_a_repository_is_no_name_but_tells_one(text: str, meant: str | None) -> None:
    assert likely_id(text) == (f"did you mean {meant}? " if meant else "")
    assert bool(HUB_ID.fullmatch(text)) == (text in {"a/b", "a/b.github"})


def exit_of(text: str, environ: dict[str, str]) -> tuple[Exit, str]:
    with pytest.raises(CliError) as caught:
        resolve(text, environ)
    return caught.value.exit, f"{caught.value.what} {caught.value.why} {caught.value.fix}"


def test_a_hub_id_is_found_by_branch_tag_and_commit(cache: Path, environ: dict[str, str]):
    snapshot = write_repo(cache)
    write_repo(cache, commit="b" * 40, ref="v1")
    assert resolve("org/model", environ).path == snapshot
    assert resolve("org/model", environ).revision == COMMIT
    assert resolve("org/model@v1", environ).path.name == "b" * 40
    assert resolve(f"org/model@{COMMIT}", environ).path == snapshot
    assert resolve("org/model@v1", environ).ref == "org/model@v1"


def test_what_is_not_on_disk_exits_4_and_says_how_to_get_it(environ: dict[str, str]):
    code, text = exit_of("org/absent@v2", environ)
    assert code == Exit.NOT_FOUND
    assert "llmbox pull org/absent@v2" in text


def test_the_home_of_a_user_who_is_not_there_has_no_model(environ: dict[str, str]):
    code, text = exit_of("~nobody-of-this-name/model", environ)
    assert (code, "there is no such user" in text) == (Exit.NOT_FOUND, True)


@pytest.mark.parametrize(
    "text",
    ["org/../model", "a/b/c", "org/mo--del", "-x/y", "org/model@../../refs", "org/model@a b", "", "ä/b"],
)
def test_names_of_other_shapes_are_refused(text: str, environ: dict[str, str]):
    code, _ = exit_of(text, environ)
    assert code in {Exit.USAGE, Exit.NOT_FOUND}


def test_a_revision_never_leads_out_of_refs(cache: Path, environ: dict[str, str]):
    write_repo(cache)
    (cache / "models--org--model" / "refs" / "evil").symlink_to(cache)
    assert exit_of("org/model@evil", environ)[0] == Exit.NOT_FOUND


def test_a_snapshot_that_links_outside_is_refused(cache: Path, environ: dict[str, str], tmp_path: Path):
    snapshot = write_repo(cache)
    (tmp_path / "secret").write_text("x")
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "secret")
    code, text = exit_of("org/model", environ)
    assert code == Exit.INTEGRITY
    assert "tokenizer.json" in text


def test_directories_are_named_by_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    code, text = exit_of(str(folder), {})
    assert code == Exit.NOT_FOUND
    assert f"{folder} has no model" in text
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder), {}).name == "mine"
    monkeypatch.chdir(tmp_path)
    assert resolve("mine", {}).ref == str(folder)
    assert resolve("./mine/", {}).path == folder
    assert exit_of("./other", {})[0] == Exit.NOT_FOUND


def test_cache_place_follows_the_hubs_variables(tmp_path: Path):
    assert hub_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert hub_cache({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}) == Path("/b/hub")
    assert hub_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")


def test_the_cache_is_listed_and_broken_entries_are_skipped(
    cache: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(catalog, "BUILTIN_DIR", tmp_path / "none")
    write_repo(cache)
    (cache / "models--org--empty").mkdir()
    (cache / "datasets--org--data").mkdir()
    (found,) = on_disk(environ)
    assert (found.ref.name, found.architecture, found.servable) == ("org/model", "Qwen3ForCausalLM", True)
    assert found.size > 1000


def test_our_layout_reading_agrees_with_huggingface_hub(cache: Path, environ: dict[str, str]):
    from huggingface_hub import scan_cache_dir

    write_repo(cache)
    (repo,) = scan_cache_dir(cache).repos
    (found,) = [model for model in on_disk(environ) if model.ref.source == "hub"]
    assert found.ref.name == repo.repo_id
    assert found.size == repo.size_on_disk
    assert found.ref.revision == next(iter(repo.revisions)).commit_hash


@pytest.mark.parametrize("name", ["a b", "", "../x", "a/b/c", "a\n", "-a"])
def test_served_names_are_plain(name: str):
    with pytest.raises(CliError):
        check_name(name)


@pytest.mark.parametrize("name", ["mine", "org/model", "org/model@v1", "Qwen3-0.6B", "a"])
def test_usual_names_pass(name: str):
    assert check_name(name) == name


@pytest.mark.parametrize("written", ["absolute", "relative", "capital"])
def test_a_damaged_gguf_file_is_refused_by_its_name(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, written: str
):
    file = tmp_path / "a b" / ("Tiny.GGUF" if written == "capital" else "tiny.gguf")
    file.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    names = NameLookup(gguf_home=tmp_path / "home")
    text = str(file) if written == "absolute" else f"a b/{file.name}"
    file.write_bytes(b"GGUF")
    with pytest.raises(CliError, match=f"{file.name} cannot be served") as caught:
        resolve(text, environ, names)
    assert str(file) in caught.value.why
    file.write_bytes(b"GIF89a")
    with pytest.raises(CliError, match=f"{file} is not a GGUF file"):
        resolve(text, environ, names)


def test_other_files_are_no_folders_either(tmp_path: Path, environ: dict[str, str]):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CliError) as caught:
        resolve(str(file), environ)
    assert caught.value.what == f"{file} is not a directory"
    assert str(tmp_path) in caught.value.fix


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_does_not_hang_a_listing(cache: Path, environ: dict[str, str], kind: str):
    snapshot = write_repo(cache)
    write_repo(cache, "org/other")
    make_odd(snapshot / "config.json", kind)
    make_odd(cache / "models--org--other" / "refs" / "main", kind)
    with no_hanging():
        assert [model.ref.name for model in on_disk(environ) if model.servable] == ["builtin"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_that_is_no_file_is_said(tmp_path: Path, environ: dict[str, str], kind: str):
    make_odd(tmp_path / "config.json", kind)
    with no_hanging(), pytest.raises(CliError) as caught:
        resolve(str(tmp_path), environ)
    assert caught.value.why == "config.json is not a regular file"
