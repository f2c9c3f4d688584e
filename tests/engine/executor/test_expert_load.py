"""Copies of hot experts: placed by what was counted, and no placement changes a token."""

import json
import random

import pytest

from llmbox.engine.errors import ParallelError
from llmbox.engine.executor import expert_load
from llmbox.engine.executor.expert_load import LoadHistory, place_experts, placed_imbalance
from llmbox.engine.model_config.parallel_layout import ParallelLayout
from support.rank_threads import load_threads
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

REQUESTS = [
    ask("long", range(3, 43), 8),
    ask("short", [5, 9, 11], 8, temperature=0.8, seed=3),
    ask("other", range(7, 30), 8, temperature=0.9, top_k=9, seed=5),
]


def contiguous(count, ranks):
    return ParallelLayout(ranks, expert_parallel=True).holders(count)


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant"),
    [(8, 2, 0), (8, 2, 2), (7, 2, 4), (8, 2, 8), (9, 4, 5), (5, 4, 15), (64, 8, 9)],
)
def test_experts_are_placed_evenly_and_no_copy_beside_another(experts, ranks, redundant):
    chance = random.Random(experts * redundant)
    for _ in range(20):
        load = [int(chance.paretovariate(0.8)) for _ in range(experts)]
        (placed,) = place_experts([load], ranks, redundant)
        held = [sum(rank in holders for holders in placed) for rank in range(ranks)]
        assert sum(held) == experts + redundant
        assert max(held) - min(held) <= 1
        assert all(holders == tuple(sorted(set(holders))) and holders for holders in placed)
        hot = sorted(range(experts), key=lambda expert: load[expert])
        assert len(placed[hot[-1]]) >= len(placed[hot[0]])


def test_one_hot_expert_is_divided_among_the_ranks():
    load = [900, 10, 10, 10, 10, 20, 20, 20]
    before = placed_imbalance([contiguous(8, 2)], [load], 2)
    assert before == pytest.approx(2 * 930 / 1000)
    assert placed_imbalance(place_experts([load], 2, 0), [load], 2) > 1.8, "a place alone does not help"
    placement = place_experts([load], 2, 1)
    assert placement[0][0] == (0, 1)
    assert placed_imbalance(placement, [load], 2) < 1.05


def test_counts_and_placements_are_kept_and_only_fitting_ones_are_taken(tmp_path):
    history = LoadHistory(tmp_path / "new" / "experts.json")
    assert history.counts(1, 3) == [[0, 0, 0]]
    assert history.placement(1, 3, 2, 1) == ()
    history.save([[5, 0, 7]])
    history.save(placement=(((0, 1), (0,), (1,)),))
    assert history.counts(1, 3) == [[5, 0, 7]]
    assert history.placement(1, 3, 2, 1) == (((0, 1), (0,), (1,)),)
    for layers, experts in ((2, 3), (1, 4)):
        assert not any(map(any, history.counts(layers, experts)))
        assert history.placement(layers, experts, 2, 1) == ()
    assert history.placement(1, 3, 2, 2) == (), "of another number of copies"
    assert history.placement(1, 3, 3, 1) == (), "of other ranks"


@pytest.mark.parametrize(
    "found",
    [
        "",
        "[1, 2",
        "[" * 100_000,
        "[]",
        '{"rows": 3, "placement": "all"}',
        '{"rows": [[1, -2, 3]], "placement": [[[0, 1], [0], [7]]]}',
        '{"rows": [[1, 2.5, 3]], "placement": [[[0, 1], [], [1]]]}',
        '{"rows": [[1, "2", 3]], "placement": [[[1, 0], [0], [1]]]}',
        '{"rows": [[1, null, 3]], "placement": [[[0, 0], [0], [1]]]}',
        '{"rows": [[1, true]], "placement": [[[true, 0], [0], [1]]]}',
    ],
)
def test_a_damaged_file_counts_as_none(tmp_path, found):
    file = tmp_path / "experts.json"
    file.write_text(found)
    history = LoadHistory(file)
    assert history.counts(1, 3) == [[0, 0, 0]]
    assert history.placement(1, 3, 2, 1) == ()
    history.save([[1, 2, 3]])
    assert history.counts(1, 3) == [[1, 2, 3]]


def test_a_folder_that_cannot_be_written_to_costs_the_counts_alone(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    LoadHistory(tmp_path / "file" / "experts.json").save([[1]])
    assert "is not saved" in caplog.text


@pytest.fixture
def model(tmp_path, monkeypatch):
    """With a folder for what is kept of models, on the plain kernels: ranks are threads."""
    monkeypatch.setenv("LLMBOX_REPACKED", str(tmp_path / "kept"))
    monkeypatch.setenv("LLMBOX_REPACKED_GB", "1")
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    sizes = {"num_key_value_heads": 4, "mlp_only_layers": [], "intermediate_size": 256}
    return make_tiny_model(tmp_path / "model", arch="qwen3_moe", tokenizer=False, **sizes)


def keep(model, rows):
    history = LoadHistory.of_model(model)
    history.save(rows)
    return history


@pytest.mark.parametrize("tp", [2, 4])
def test_no_placement_changes_a_token(model, tp):
    """Without copies, with some wherever they were counted to be hot, and with all experts on all ranks."""
    cut = {"tp": tp, "expert_parallel": True, "dtype": "bfloat16"}
    wanted = tokens(load_threads(model, **cut), REQUESTS)
    placements = []
    for redundant, hot in ((1, 0), (3, 2), (3, 6), (8 * (tp - 1), 1)):
        keep(model, [[1000 if expert == hot else 10 + expert for expert in range(8)]] * 2)
        LoadHistory.of_model(model).save(placement=[[[9]]])  # of nobody
        engine = load_threads(model, redundant_experts=redundant, **cut)
        placements.append(engine.executor.runner.plan.expert_placement)
        assert placements[-1][0][hot] == tuple(range(min(tp, redundant + 1)))
        assert tokens(engine, REQUESTS) == wanted
    assert len(set(placements)) == len(placements)


def test_what_one_load_counts_places_the_experts_of_the_next(model, monkeypatch):
    monkeypatch.setattr(expert_load, "READ_SECONDS", 0.0)
    cut = {"tp": 2, "expert_parallel": True, "redundant_experts": 2}
    first = load_threads(model, **cut)
    assert any("nothing was counted yet" in note for note in first.info.notes)
    wanted = tokens(first, REQUESTS)
    stats = first.stats()
    assert stats.expert_rank_imbalance >= 1
    assert stats.expert_rank_imbalance_without_copies >= 1
    first.close()
    counted = LoadHistory.of_model(model).counts(2, 8)
    assert sum(map(sum, counted)) == stats.expert_rows
    second = load_threads(model, **cut)
    assert any(f"placed by {stats.expert_rows} rows counted before" in note for note in second.info.notes)
    assert tokens(second, REQUESTS) == wanted
    second.close()
    after = LoadHistory.of_model(model).counts(2, 8)
    assert after == [[rows // 2 + rows for rows in load] for load in counted], "half of those before"


def test_one_process_counts_for_ranks_too(model):
    engine = load(model)
    tokens(engine, REQUESTS)
    engine.close()
    assert sum(map(sum, LoadHistory.of_model(model).counts(2, 8))) > 0


def test_a_placement_stays_until_another_is_much_better(model):
    """Packed weights are those of one placement."""
    cut = {"tp": 2, "expert_parallel": True, "redundant_experts": 1}

    def placed(hot):
        keep(model, [[100 + 30 * (expert == 0) + hot * (expert == 5) for expert in range(8)]] * 2)
        return load_threads(model, **cut).executor.runner.plan.expert_placement

    first = placed(0)
    assert first[0][0] == (0, 1)
    assert placed(40) == first
    later = placed(4000)
    assert later[0][5] == (0, 1)
    assert placed(4000) == later


def test_counts_are_saved_while_an_engine_runs(model, monkeypatch):
    monkeypatch.setattr(expert_load, "SAVE_SECONDS", 0.0)
    tokens(load_threads(model, tp=2, expert_parallel=True), REQUESTS)
    file = next((model.parent / "kept").glob("experts-*.json"))
    assert file.stat().st_mode & 0o777 == 0o600
    assert sum(map(sum, json.loads(file.read_text())["rows"])) > 0


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"tp": 2}, "ask for --expert-parallel and --tp 2 too"),
        ({}, "ask for --expert-parallel and --tp 2 too"),
        ({"expert_parallel": True}, "ask for --tp 2, or load without"),
        ({"tp": 2, "pp": 2, "expert_parallel": True}, "use --tp without --pp"),
        (
            {"tp": 2, "expert_parallel": True, "redundant_experts": 9},
            "2 ranks hold at most 8 copies of 8 experts",
        ),
    ],
)
def test_copies_that_cannot_be_are_refused(model, options, refusal):
    with pytest.raises(ParallelError, match=refusal):
        load(model, **{"redundant_experts": 1, **options})


def test_copies_of_no_experts_are_refused(tmp_path):
    model = make_tiny_model(tmp_path, arch="llama", tokenizer=False)
    with pytest.raises(ParallelError, match="this model has none"):
        load(model, tp=2, expert_parallel=True, redundant_experts=1)
