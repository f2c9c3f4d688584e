"""Answers on disk: found after a restart, by their own caller alone; damaged files are dropped."""

import random
import time
from array import array

import pytest

from llmbox.engine.core.speculation import answer_files
from llmbox.engine.core.speculation.answer_files import HEADER_BYTES, SUFFIX, AnswerFiles
from llmbox.engine.core.speculation.text_drafting import RING, SuffixStores
from llmbox.engine.kv_store.folder import KVFolder
from support.lanes import examples
from support.real_engines import ask, draft_at_no_price, load, run
from support.tiny_models import make_tiny_model

MODEL = bytes(range(16))
SECONDS = 20.0


@pytest.fixture
def folder(tmp_path):
    folder = KVFolder(tmp_path / "kv", 1 << 30)
    folder.open()
    return folder


def stores_in(folder, model=MODEL, damage=lambda: None):
    stores = SuffixStores()
    stores.files = AnswerFiles(folder, model, {"model": "m", "format": "f", "origins": []}, damage)
    return stores


def files_of(folder):
    return sorted(folder.root.glob(f"*/*/*{SUFFIX}"))


def loaded(stores, tenant, namespace="", key=(3, 4, 5, 6)):
    """Return what follows `key`, once the caller's file has been read, or it is known that there is none."""
    end, files = time.monotonic() + SECONDS, stores.files
    stores.find(tenant, namespace)
    while time.monotonic() < end:
        with files._changed:
            files._changed.wait_for(lambda: not (files._loads or files._is_working), SECONDS)
        stores.find(tenant, namespace)
        if not (stores._loaded or files.has_loaded):
            store = stores.find(tenant, namespace)
            return store.follow(key, 3)[0] if store else []
    raise AssertionError("nothing was loaded")


def written(folder, tenant="key", namespace="", answers=(range(2, 40),)):
    stores = stores_in(folder)
    for answer in answers:
        stores.add(tenant, namespace, list(answer))
    stores.close(SECONDS)


def test_answers_are_found_after_a_restart(folder):
    written(folder, answers=[range(2, 40), range(100, 200), [9, 9]])
    stores = stores_in(folder)
    assert loaded(stores, "key") == [7, 8, 9]
    assert loaded(stores, "key", key=(150, 151, 152, 153)) == [154, 155, 156]
    (file,) = files_of(folder)
    assert file.stat().st_mode & 0o777 == 0o600


def test_they_are_those_of_the_caller_and_namespace_alone(folder):
    written(folder, "key", "")
    stores = stores_in(folder)
    assert loaded(stores, "other") == []
    assert loaded(stores, "key", "salt") == []
    assert loaded(stores_in(folder, model=bytes(16)), "key") == []
    assert loaded(stores, "key") == [7, 8, 9]


def test_an_answer_before_the_file_is_read_loses_neither(folder):
    written(folder)
    stores = stores_in(folder)
    stores.add("key", "", list(range(300, 340)))
    stores.close(SECONDS)
    again = stores_in(folder)
    assert loaded(again, "key") == [7, 8, 9]
    assert loaded(again, "key", key=(300, 301, 302, 303)) == [304, 305, 306]


def test_the_newest_answers_are_kept(folder):
    rng = random.Random(1)
    answers = [[rng.randrange(9, 90_000) for _ in range(4000)] for _ in range(20)]
    written(folder, answers=answers)
    written(folder, answers=[range(2, 40)])
    (file,) = files_of(folder)
    assert file.stat().st_size <= HEADER_BYTES + 4 * RING
    stores = stores_in(folder)
    assert loaded(stores, "key") == [7, 8, 9]
    assert loaded(stores, "key", key=answers[-1][10:14]) == answers[-1][14:17]
    assert loaded(stores, "key", key=answers[0][10:14]) == []


def test_damaged_files_are_dropped_and_counted(folder):
    written(folder)
    (file,) = files_of(folder)
    good, rng, damaged = file.read_bytes(), random.Random(2), []
    for _ in range(examples(300)):
        data = bytearray(good)
        match rng.randrange(3):
            case 0:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                del data[rng.randrange(len(data)) :]
            case 2:
                data += bytes(rng.randrange(1, 9))
        file.write_bytes(data)
        files = stores_in(folder, damage=lambda: damaged.append(1)).files
        files._read(("key", ""))
        assert files.take_loaded() is None
        assert not file.exists()
    assert len(damaged) == examples(300)


@pytest.mark.parametrize("tokens", [[], [1, 2, 3], [1, 2, -5, -1], [-2]])
def test_tokens_that_no_answers_can_be_are_damage(folder, tokens):
    written(folder)
    (file,) = files_of(folder)
    damaged = []
    files = stores_in(folder, damage=lambda: damaged.append(1)).files
    _, name = files._path(("key", ""))
    file.write_bytes(answer_files._encode(array("i", tokens).tobytes(), MODEL, name))
    files._read(("key", ""))
    assert files.take_loaded() is None
    assert damaged == [1]


def test_they_leave_with_the_key_and_the_model(folder):
    written(folder, "key")
    written(folder, "other")
    assert len(files_of(folder)) == 2
    assert folder.purge("key") > 0
    assert len(files_of(folder)) == 1
    folder.prune(everything=True)
    assert files_of(folder) == []
    written(folder, "key")
    assert len(files_of(folder)) == 1, "the folder is made again"


def test_all_files_together_are_bounded(folder, monkeypatch):
    monkeypatch.setattr(answer_files, "CHECKED", 1)
    monkeypatch.setattr(answer_files, "MOST_FILE", 400)
    monkeypatch.setattr(answer_files, "MOST_BYTES", 2000)
    for number in range(20):
        written(folder, f"key{number}", answers=[range(2, 82)])
        assert sum(file.stat().st_size for file in files_of(folder)) <= 2000
    assert loaded(stores_in(folder), "key0") == []


def test_a_disk_that_refuses_holds_up_nothing(folder, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    stores = stores_in(folder)
    monkeypatch.setattr(folder, "reserve", refuse)
    stores.add("key", "", list(range(2, 40)))
    stores.close(SECONDS)
    assert stores.files._paused_until > 0
    assert files_of(folder) == []
    assert stores.find("key", "").follow([3, 4, 5, 6], 2)[0] == [7, 8]


def test_a_link_in_the_place_of_a_file_is_not_followed(folder, tmp_path):
    written(folder)
    (file,) = files_of(folder)
    foreign = tmp_path / "foreign"
    foreign.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(foreign)
    assert loaded(stores_in(folder), "key") == []
    written(folder)
    assert foreign.exists()
    assert not file.is_symlink()


def test_a_new_engine_drafts_from_the_answers_of_the_last_one(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    monkeypatch.setenv("LLMBOX_KV_FOLDER", str(tmp_path / "kv"))
    monkeypatch.setenv("LLMBOX_KV_BYTES", str(1 << 30))
    draft_at_no_price(monkeypatch)
    model = make_tiny_model(tmp_path / "model", tokenizer=False)
    request = ask("a", range(5, 25), 40, temperature=1.0, seed=3)
    accepted = []
    answers = []
    for _ in range(2):
        engine = load(model, speculate="on")
        loaded(engine.scheduler.drafting.answers.stores, "")
        outputs = run(engine, [request])["a"]
        answers.append([token for output in outputs for token in output.token_ids])
        accepted.append(engine.stats().accepted_tokens)
        engine.close()
    assert answers[0] == answers[1]
    assert accepted[1] > accepted[0] + 10
