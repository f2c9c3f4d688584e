"""Uploaded files: whose they are, how long they stay, how much of them."""

import asyncio
import io
import os
import time
from pathlib import Path

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.store.files import FileStore


def store(folder: Path, **options) -> FileStore:
    return FileStore(folder / "files", **{"most_bytes": 1000, "days": 30.0, **options})


async def read(files: FileStore, file) -> bytes:
    return b"".join([chunk async for chunk in files.chunks(file)])


async def test_a_file_is_its_owners(tmp_path: Path) -> None:
    files = store(tmp_path)
    file = await files.add(io.BytesIO(b"hello"), "key", "a.jsonl", "batch", None)
    assert await files.get("key", file.id) == file
    assert await read(files, file) == b"hello"
    assert await files.get("other", file.id) is None
    assert await files.get("", file.id) is None
    assert await files.all("other") == []
    assert not await files.delete("other", file.id)
    assert await store(tmp_path).all("key") == [file]  # a later daemon's
    assert await files.delete("key", file.id)
    assert await files.get("key", file.id) is None
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize("id_", ["", "file-", "../x", "file-../../../etc/passwd", "file-" + "g" * 24])
async def test_names_that_are_no_ids_lead_nowhere(tmp_path: Path, id_: str) -> None:
    assert await store(tmp_path).get("", id_) is None


async def test_each_owner_has_so_much_room(tmp_path: Path) -> None:
    files = store(tmp_path)
    await files.add(io.BytesIO(b"x" * 600), "a", "1", "batch", None)
    with pytest.raises(ApiError) as refused:
        await files.add(io.BytesIO(b"x" * 401), "a", "2", "batch", None)
    assert (refused.value.status, refused.value.code) == (400, "file_storage_full")
    await files.add(io.BytesIO(b"x" * 401), "b", "2", "batch", None)
    both = [files.add(io.BytesIO(b"x" * 300), "a", str(i), "batch", None) for i in range(2)]
    done = await asyncio.gather(*both, return_exceptions=True)  # at once: one of them fits
    assert sorted(isinstance(each, ApiError) for each in done) == [False, True]


async def test_a_disk_that_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = store(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llmbox.app.store.files.shutil.copyfileobj", full)
    with pytest.raises(ApiError) as refused:
        await files.add(io.BytesIO(b"x"), "a", "1", "batch", None)
    assert (refused.value.status, refused.value.code) == (503, "file_storage_unavailable")
    assert list((tmp_path / "files").iterdir()) == []


async def test_what_is_over_is_gone(tmp_path: Path) -> None:
    files = store(tmp_path, owners=lambda: frozenset({"kept"}))
    kept = await files.add(io.BytesIO(b"1"), "kept", "1", "batch", time.time() + 3600)
    keyless = await files.add(io.BytesIO(b"1"), "", "1", "batch", None)
    expired = await files.add(io.BytesIO(b"1"), "kept", "2", "batch", time.time() - 1)
    revoked = await files.add(io.BytesIO(b"1"), "gone", "3", "batch", None)
    assert await files.get("kept", expired.id) is None
    assert await files.get("gone", revoked.id) is not None
    leftover = tmp_path / "files" / f"file-{'0' * 24}.data"
    leftover.write_bytes(b"half")
    files.sweep(time.time())
    assert leftover.exists()  # perhaps somebody writes it
    old = time.time() - 2 * 86_400
    os.utime(leftover, (old, old))
    files.sweep(time.time())
    assert {path.stem for path in (tmp_path / "files").iterdir()} == {kept.id, keyless.id}
    assert await store(tmp_path, days=0.0).all("kept") == []
    assert await files.erase_before(time.time() + 1) == 2
    assert list((tmp_path / "files").iterdir()) == []
