"""An engine that ends while packed weights are written: they are kept, or nothing of them stays."""

import subprocess
import sys
from pathlib import Path

import pytest

from llmbox.engine.weights.packed_cache import source
from llmbox.engine.weights.packed_cache.cache import PackedWeightCache, PackKey
from llmbox.engine.weights.packed_cache.file import PackedContent
from support.tiny_models import make_tiny_model

PROGRAM = """
import sys, threading
from pathlib import Path
from llmbox.engine.weights.packed_cache import cache as module, source
from llmbox.engine.weights.packed_cache.cache import PackedWeightCache
from llmbox.engine.weights.packed_cache.file import PackedContent, write
from llmbox.engine.weights.packed_cache.cache import PackKey

model, folder, how = sys.argv[1:]
begun, ending = threading.Event(), threading.Event()

def slow(out, *rest, **named):
    write(out, *rest, **named)
    begun.set()
    ending.wait(60 if how == "soon" else None)

end = source.PackedWeightWriter._end

def told(self, thread):
    ending.set() if how == "soon" else None
    end(self, thread)

module.write, source.PackedWeightWriter._end = slow, told
source.END_S = 60.0 if how == "soon" else 0.1
source.forget_pages = lambda _: None
key = PackKey(directory=Path(model), dtype="torch.bfloat16", quant="int8", layout="avx512 1234")
keeper = source.PackedWeightWriter(PackedWeightCache(Path(folder), 10**9), key, None)
keeper._contents = [PackedContent("item", (5000,), "linear", memoryview(bytes(5000)))]
keeper.start()
begun.wait(60)
"""


@pytest.mark.parametrize(("how", "kept"), [("soon", 1), ("never", 0)])
def test_an_end_during_the_write(tmp_path: Path, how: str, kept: int) -> None:
    model, folder = make_tiny_model(tmp_path / "model"), tmp_path / "repacked"
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(model), str(folder), how],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("*.weights"))) == kept
    assert not list(folder.glob("*.part"))
    assert ("not kept: the engine ended" in done.stderr) is not bool(kept)
    assert len(list(folder.glob("*.interrupted"))) == 1 - kept


def test_what_was_interrupted_is_written_before_the_next_load_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "forget_pages", lambda _: None)
    folder = tmp_path / "repacked"
    key = PackKey(
        directory=make_tiny_model(tmp_path / "model"), dtype="torch.bfloat16", quant="int8", layout="1"
    )
    cache = PackedWeightCache(folder, 10**9)
    folder.mkdir(mode=0o700)
    cache.note_interrupted(key)
    keeper = source.PackedWeightWriter(cache, key, None)
    keeper._contents = [PackedContent("item", (5000,), "linear", memoryview(bytes(5000)))]
    keeper.start()
    assert cache.find(key) is not None
    assert not cache.take_interrupted(key)


def test_pruning_forgets_interruptions(tmp_path: Path) -> None:
    cache = PackedWeightCache(tmp_path, 10**9)
    tmp_path.chmod(0o700)
    key = PackKey(directory=tmp_path, dtype="torch.bfloat16", quant="int8", layout="1")
    cache.note_interrupted(key)
    cache.prune()
    assert not cache.take_interrupted(key)
