"""How near rounded weights of the built-in model stay to it: bounds that worse ways of rounding miss."""

from pathlib import Path

import pytest

from bench.quality import TEXT
from bench.quality_beside_gguf import Predictions, difference, predictions
from llmbox.engine.executor.build import load_engine
from llmbox.engine.quantize.calibration import config_for, sequences_of
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.quant_formats import QUANTS
from support.builtin_model import ASSETS

pytestmark = pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
SEQUENCES = sequences_of(ASSETS, TEXT.read_text(encoding="utf-8"))[::3]


def predicted(model: Path, **options: str) -> Predictions:
    return predictions(load_engine(config_for(model, None, **options), lambda _: None), SEQUENCES)


@pytest.fixture(scope="module")
def plain() -> Predictions:
    return predicted(ASSETS)


def divergence(plain: Predictions, model: Path, **options: str) -> float:
    return difference(plain, predicted(model, **options)).divergence


def test_eight_bits_where_errors_show_most_are_nearer(plain: Predictions) -> None:
    four, mix = (divergence(plain, ASSETS, quant=quant) for quant in ("int4", "int4-mix"))
    assert mix < 0.8 * four


@pytest.mark.nightly
def test_calibration_on_its_own_text_is_nearer(plain: Predictions, tmp_path: Path) -> None:
    quantize(ASSETS, tmp_path / "out", QUANTS["int4"], 1, nothing, nothing)
    assert divergence(plain, tmp_path / "out") < 0.85 * divergence(plain, ASSETS, quant="int4")


def nothing(_done: int, _total: int) -> None:
    pass
