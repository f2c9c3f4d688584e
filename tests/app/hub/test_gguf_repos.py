"""Repositories of GGUF files on a hub on loopback: one quantization is chosen, fetched and served."""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest

from llmbox.app.errors import CliError
from llmbox.app.events import Events
from llmbox.app.hub.download import DownloadSettings
from llmbox.app.hub.download_queue import Downloads
from llmbox.app.hub.errors import HubError
from llmbox.app.hub.local_models import find_removable, remove
from llmbox.app.hub.model_info import local_facts, remote_facts
from llmbox.app.hub.repo_files import Hub
from llmbox.app.hub.transfer import Retries
from llmbox.app.models.catalog import check_name, describe, on_disk, resolve
from llmbox.app.models.gguf_folders import folder_of, quantizations, weights_of
from llmbox.app.models.registry import NameLookup, Registry
from llmbox.engine.gguf.folder import gguf_of
from support.gguf_models import q4_k_m, write_gguf
from support.hub_stub import StubHub, StubRepo, stub_hub
from support.tiny_models import make_tiny_model

REPO = "org/tiny-GGUF"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("gguf")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
    model = make_tiny_model(folder / "model", arch="llama", **sizes, num_key_value_heads=2)
    write_gguf(model, folder / "tiny-Q4_K_M.gguf", q4_k_m)
    write_gguf(model, folder / "tiny-Q8_0.gguf", "Q8_0", parts=2)
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    return {file.name: file.read_bytes() for file in folder.glob("*.gguf")} | {"README.md": b"words"}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[StubHub]:
    with stub_hub() as stub:
        stub.repos[REPO] = StubRepo(files)
        yield stub


def test_quantizations_by_file_names() -> None:
    names = ["a/M-UD-Q4_K_XL.gguf", "M.IQ4_XS.gguf", "mmproj-M-F16.gguf", "m-bf16.gguf", "M-plain.gguf"]
    parts = [f"M-Q6_K-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    found = quantizations([*names, *parts, "M-Q5_0-00001-of-00002.gguf"])
    assert found == {
        "Q6_K": [parts], "IQ4_XS": [[names[1]]], "UD-Q4_K_XL": [[names[0]]], "BF16": [[names[3]]],
    }  # fmt: skip


def test_fit_reads_the_headers_of_one_quantization(hub: StubHub, files: dict[str, bytes]) -> None:
    for wanted, types in (("Q4_K_M", "GGUF Q4_K, Q6_K"), ("q8_0", "GGUF Q8_0")):
        facts = remote_facts(Hub(hub.url, None), REPO, None, wanted)
        assert facts.config.stored is not None
        assert facts.config.stored.label == types
        wanted_files = [name for name in files if wanted.upper() in name or name.startswith("mmproj")]
        assert facts.missing_bytes == sum(len(files[name]) for name in wanted_files)
        assert "mmproj-F16.gguf: its header is cut short" in facts.config.image_problem


def test_unknown_quantizations_and_bare_names_are_told_what_there_is(hub: StubHub) -> None:
    for wanted in ("Q3_K_S", None):
        with pytest.raises(HubError) as refused:
            remote_facts(Hub(hub.url, None), REPO, None, wanted)
        assert "Q4_K_M, Q8_0" in refused.value.why
        assert f"llmbox pull {REPO}:Q4_K_M" in refused.value.fix


def test_fit_of_the_hub_refuses_a_reranker_in_the_words_of_a_load(tmp_path: Path, hub: StubHub) -> None:
    model = make_tiny_model(tmp_path / "model", arch="llama")
    file = write_gguf(model, tmp_path / "tiny-F32.gguf", pooling_type=gguf.PoolingType.RANK.value)
    hub.repos["org/ranks"] = StubRepo({file.name: file.read_bytes()})
    with pytest.raises(HubError) as at_fit:
        remote_facts(Hub(hub.url, None), "org/ranks", None, "F32")
    with pytest.raises(CliError) as at_load:
        folder_of(file, tmp_path / "home")
    assert at_fit.value.why == at_load.value.why.removeprefix(f"{tmp_path}/")
    assert "rerankers of llama cannot be read from GGUF" in at_fit.value.why


async def pull(hub: StubHub, cache: Path, name: str) -> HubError | None:
    setup = DownloadSettings(
        cache=cache,
        state_file=cache.parent / "downloads.json",
        fit=lambda _: "",
        hub=lambda: Hub(hub.url, None),
        retries=Retries(tries=2, first=0.01, longest=0.02),
    )
    downloads = Downloads(setup, Events())
    try:
        download = downloads.start(name)
        async with asyncio.timeout(60):
            async for _ in downloads.follow(download):
                pass
        assert download.state in {"ready", "failed"}
        return download.error
    finally:
        await downloads.close()


async def test_one_quantization_is_fetched_found_and_listed(tmp_path: Path, hub: StubHub) -> None:
    cache, names = tmp_path / "hub", NameLookup(gguf_home=tmp_path / "gguf")
    environ = {"HF_HUB_CACHE": str(cache)}
    with pytest.raises(CliError, match="not on this disk"):
        resolve(f"{REPO}:Q8_0", environ, names)
    error = await pull(hub, cache, f"{REPO}:Q3_K_S")
    assert error is not None
    assert "Q4_K_M, Q8_0" in error.why
    assert await pull(hub, cache, f"{REPO}:Q8_0") is None
    assert hub.requests("hub", "resolve/" + "c" * 40 + "/mmproj")
    found = resolve(f"{REPO}:Q8_0", environ, names)
    file = gguf_of(found.path)
    assert file is not None
    assert file.name == "tiny-Q8_0-00001-of-00002.gguf"
    assert describe(found).servable
    assert check_name(found.name) == f"{REPO}:Q8_0"
    assert local_facts(found).missing_bytes == 0
    with pytest.raises(CliError) as absent:
        resolve(f"{REPO}:Q4_K_M", environ, names)
    assert absent.value.fix == f"get it first: llmbox pull {REPO}:Q4_K_M"
    assert await pull(hub, cache, f"{REPO}:Q4_K_M") is None
    listed = {model.ref.name for model in on_disk(environ, names)}
    assert {f"{REPO}:Q4_K_M", f"{REPO}:Q8_0"} <= listed


async def test_one_quantization_is_deleted_and_the_last_one_takes_the_rest(
    tmp_path: Path, hub: StubHub, files: dict[str, bytes]
) -> None:
    cache = tmp_path / "hub"
    names, environ = NameLookup(gguf_home=tmp_path / "gguf"), {"HF_HUB_CACHE": str(cache)}
    for wanted in ("Q8_0", "Q4_K_M"):
        assert await pull(hub, cache, f"{REPO}:{wanted}") is None
    with pytest.raises(CliError, match="not a model on this disk"):
        find_removable(f"{REPO}:Q3_K_S", environ, names)
    eight, four = (find_removable(f"{REPO}:{wanted}", environ, names) for wanted in ("q8_0", "Q4_K_M"))
    size = sum(len(data) for name, data in files.items() if "Q8_0" in name)
    assert eight.size == size
    loaded = resolve(f"{REPO}:Q4_K_M", environ, names).path
    assert weights_of(loaded) == four.links[0].resolve()
    registry = Registry(tmp_path / "models.json")
    assert remove(eight, registry).freed == size
    assert {model.ref.name for model in on_disk(environ, names)} == {"builtin", f"{REPO}:Q4_K_M"}
    assert resolve(f"{REPO}:Q4_K_M", environ, names).path == loaded
    remove(four, registry)
    assert {model.ref.name for model in on_disk(environ, names)} == {"builtin"}
    assert not four.folder.exists()


def cached(cache: Path, commit: str, **contents: bytes) -> None:
    """Put files into a snapshot of a cache; underscores stand for dots."""
    repo = cache / "models--org--tiny-GGUF"
    snapshot, blobs = repo / "snapshots" / commit, repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for name, content in contents.items():
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        (snapshot / f"{name}.gguf").symlink_to(f"../../blobs/{digest}")


def test_deletion_of_a_quantization_takes_nothing_else(tmp_path: Path) -> None:
    environ, names, registry = (
        {"HF_HUB_CACHE": str(tmp_path)},
        NameLookup(),
        Registry(tmp_path / "models.json"),
    )
    old, new = "a" * 40, "c" * 40
    cached(tmp_path, old, tiny_Q4_0=b"old four")
    cached(tmp_path, new, tiny_Q4_0=b"new four", tiny_Q8_0=b"eight", big_Q8_0=b"big eight")
    blobs = tmp_path / "models--org--tiny-GGUF/blobs"
    (blobs / "half.incomplete").write_bytes(b"half")
    (blobs / "part").write_bytes(b"finished part of a download")
    with pytest.raises(CliError, match="ambiguous"):
        find_removable(f"{REPO}:Q8_0", environ, names)
    assert remove(find_removable(f"{REPO}:Q4_0@{old}", environ, names), registry).freed == len("old four")
    assert (blobs.parent / "snapshots" / new / "tiny_Q4_0.gguf").read_bytes() == b"new four"
    for link in (blobs.parent / "snapshots" / new).glob("*_Q8_0.gguf"):
        link.unlink()
    assert remove(find_removable(f"{REPO}:Q4_0", environ, names), registry).freed == len("new four")
    assert {"half.incomplete", "part"} <= {path.name for path in blobs.iterdir()}
