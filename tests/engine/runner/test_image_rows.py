"""Requests with pictures give the same tokens alone, batched, cut anywhere, cached, preempted and resumed."""

from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from llmbox.engine.ipc.messages import PreparedImage
from llmbox.engine.runner.image_rows import extend_positions
from support.pictures import BREAK, IMAGE, SeeingModel, ask_about, picture, prompt_of
from support.real_engines import run, tokens
from support.tiny_models import make_tiny_model
from support.vision_models import MODELS, TEXT

RED, BLUE = picture(200), picture(90)
QUESTION = range(40, 50)
KINDS = {
    "plain": {},
    "M-RoPE": {"mrope_section": (4, 2, 2)},
    "interleaved M-RoPE": {"mrope_section": (4, 2, 2), "mrope_interleaved": True},
    "deepstack": {"deepstack": (0, 1)},
    "both directions": {"is_bidirectional": True},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    return make_tiny_model(folder, num_hidden_layers=3, tokenizer=False)


@pytest.fixture(scope="module")
def model(directory):
    return SeeingModel(directory, **KINDS["interleaved M-RoPE"], deepstack=(0, 1))


def about(color, name="a", **fields):
    return ask_about(name, range(20, 27), color, QUESTION, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_cut_at_every_place_gives_the_same_tokens(directory, kind):
    model = SeeingModel(directory, **KINDS[kind])
    asked = ask_about("a", range(20, 23), picture(1, 2, 3), [30], picture(2, 2, 2), QUESTION)
    whole = tokens(model.engine(cache=False), [asked])["a"]
    for budget in range(1, len(asked.prompt_ids)):
        assert tokens(model.engine(cache=False, max_running=1, token_budget=budget), [asked])["a"] == whole


def test_the_answer_depends_on_the_picture(model):
    red, blue = (tokens(model.engine(), [about(each)])["a"] for each in (RED, BLUE))
    assert red != blue


def test_pictures_and_texts_in_one_batch_give_what_they_give_alone(model):
    asked = [
        about(RED, "red"),
        ask_about("text", range(10, 30)),
        about(BLUE, "blue"),
        ask_about("two", BLUE, [9], RED, QUESTION),
        ask_about("lines", [8], picture(3, 2, 5, breaks=True), QUESTION),
    ]
    alone = {each.request_id: tokens(model.engine(cache=False), [each])[each.request_id] for each in asked}
    assert tokens(model.engine(), asked) == alone
    assert tokens(model.engine(token_budget=9), asked) == alone


def test_text_alone_is_not_changed_by_a_tower(model):
    asked = [ask_about("text", range(10, 30))]
    with_tower = tokens(model.engine(), asked)
    engine = model.engine()
    model.runner.images = None
    assert tokens(engine, asked) == with_tower


def test_a_second_question_about_a_picture_computes_nothing_of_it(model):
    engine = model.engine()
    long = picture(7, 8, 8)
    tokens(engine, [ask_about("first", range(16), long, [1, 2, 3])])
    steps = []
    execute = model.runner.execute
    model.runner.execute = lambda plan: steps.append(plan) or execute(plan)
    try:
        outputs = run(engine, [ask_about("second", range(16), long, QUESTION)])["second"]
    finally:
        del model.runner.execute
    assert len(model.encoder.encoded) == 1
    assert outputs[0].cached_tokens == 16 + 64
    assert steps[0].rows[0].start == 80
    fresh = tokens(model.engine(cache=False), [ask_about("second", range(16), long, QUESTION)])
    assert [token for output in outputs for token in output.token_ids] == fresh["second"]


def test_two_pictures_of_one_size_share_no_block(model):
    engine = model.engine()
    tokens(engine, [about(picture(1, 8, 8), "first")])
    outputs = run(engine, [about(picture(2, 8, 8), "second")])["second"]
    assert outputs[0].cached_tokens == 0  # the first block holds rows of the picture
    assert len(model.encoder.encoded) == 2


def test_the_same_picture_at_another_place_shares_no_block(model):
    engine = model.engine()
    tokens(engine, [ask_about("first", [5] * 15, RED, [1])])
    assert run(engine, [ask_about("second", [5] * 14, RED, [1, 1])])["second"][0].cached_tokens == 0


def test_a_picture_in_several_requests_is_encoded_once(model):
    engine = model.engine(cache=False)
    tokens(engine, [about(RED, str(number)) for number in range(4)])
    assert model.encoder.encoded == [RED.content_hash]


def test_a_preempted_request_goes_on_with_the_same_tokens(model):
    asked = [about(picture(number), str(number), max_tokens=40) for number in range(5)]
    alone = {each.request_id: tokens(model.engine(cache=False), [each])[each.request_id] for each in asked}
    engine = model.engine(num_blocks=12, image_bytes=1)
    assert tokens(engine, asked) == alone
    assert engine.stats().preemptions > 0


def test_a_request_resumed_in_a_new_engine_goes_on_with_the_same_tokens(model):
    asked = about(RED, max_tokens=12)
    whole = tokens(model.engine(), [asked])["a"]
    for done in (1, 5, 11):
        resumed = replace(asked, output_ids=whole[:done])
        assert tokens(model.engine(), [resumed])["a"] == whole[done:]


def test_decoding_goes_on_between_slices_of_the_tower(model):
    engine = model.engine()
    engine.add(ask_about("text", range(10), max_tokens=30))
    engine.step()
    engine.add(about(RED, "seeing"))
    slices, made = [], 0
    while model.encoder.encoded == []:
        made += sum(len(output.token_ids) for output in engine.step().outputs)
        slices.append(model.encoder.slices)
    assert made == len(slices)  # a token of the text for each step
    assert all(after - before <= 1 for before, after in pairwise(slices))


def test_embeddings_are_kept_within_the_cache_and_dropped_by_last_use(model):
    engine = model.engine(cache=False, image_bytes=2 * 12 * 3 * 64 * 4)
    for color in (1, 2, 1, 3):
        tokens(engine, [about(picture(color), str(color))])
    assert len(model.runner.images._levels) == 2
    before = len(model.encoder.encoded)
    tokens(engine, [about(picture(1), "again")])
    assert len(model.encoder.encoded) == before
    tokens(engine, [about(picture(2), "again")])
    assert len(model.encoder.encoded) == before + 1


def test_a_picture_that_cannot_be_encoded_ends_its_requests_alone(model):
    engine = model.engine()
    model.encoder.broken = True
    outputs = run(engine, [about(RED, "a"), about(RED, "b"), ask_about("text", range(10))])
    assert outputs["a"][-1].finish_reason == outputs["b"][-1].finish_reason == "error"
    assert "cannot be encoded" in outputs["a"][-1].error_message
    assert outputs["text"][-1].finish_reason == "length"
    model.encoder.broken = False
    assert run(engine, [about(RED, "c")])["c"][-1].finish_reason == "length"


def test_an_aborted_request_leaves_nothing_to_encode(model):
    engine = model.engine()
    engine.add(about(RED))
    engine.step()
    engine.step()
    engine.abort("a")
    assert not engine.has_work
    assert not engine._images.has_work
    assert model.runner.images._slices == {}


def test_many_requests_with_pictures_wait_without_being_encoded_at_once(model):
    engine = model.engine(cache=False, num_blocks=8, max_running=2, image_bytes=1)
    asked = [about(picture(number), str(number), max_tokens=2) for number in range(20)]
    most = 0
    for each in asked:
        engine.add(each)
    ended = set()
    while engine.has_work:
        ended |= {output.request_id for output in engine.step().outputs if output.finish_reason}
        most = max(most, len(model.runner.images._levels))
        engine.scheduler.check()
    assert len(ended) == 20
    assert most <= 9


def test_forks_with_other_pictures_do_not_share(model):
    asked = [about(RED, "a"), about(BLUE, "b", fork_of="a")]
    alone = {each.request_id: tokens(model.engine(cache=False), [each])[each.request_id] for each in asked}
    assert tokens(model.engine(), asked) == alone


WRONG = {
    "outside": {"start": 90},
    "no image token": {"start": 0},
    "rows": {"num_rows": 11},
    "grid": {"grid": (5, 5)},
    "hash": {"content_hash": b"x"},
    "pixels": {"pixels": b"xyz"},
    "negative": {"start": -1},
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_a_wrong_picture_is_refused_and_nothing_else_disturbed(model, fields):
    asked = about(RED, "wrong")
    wrong = replace(asked, images=[replace(asked.images[0], **fields)])
    outputs = run(model.engine(), [wrong, about(BLUE, "right")])
    assert outputs["wrong"][-1].error_code == "invalid_request"
    assert outputs["right"][-1].finish_reason == "length"


def test_positions_of_a_picture_count_rows_and_columns():
    _, images = prompt_of([1, 2], picture(1, 2, 3), [3], picture(2, 3, 2), [4, 5])
    whole = tuple([] for _ in range(3))
    extend_positions(whole, images, 0, 17)
    assert whole[0] == [0, 1, *[2] * 6, 5, *[6] * 6, 9, 10]
    assert whole[1] == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 7, 7, 8, 8, 9, 10]
    assert whole[2] == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 6, 7, 6, 7, 9, 10]
    for start in range(17):
        for end in range(start + 1, 18):
            part = tuple([] for _ in range(3))
            extend_positions(part, images, start, min(end, 17))
            assert [list(axis) for axis in part] == [axis[start:end] for axis in whole]


def test_positions_with_rows_and_columns_are_those_of_transformers() -> None:
    from transformers import Qwen3VLConfig, Qwen3VLModel

    config = Qwen3VLConfig(vision_config=MODELS["qwen3_vl"][1]["vision_config"], text_config=TEXT)
    pictures = [(3, (2, 4)), (13, (5, 3)), (29, (1, 1))]
    kinds = [0] * 34
    for start, (tall, wide) in pictures:
        kinds[start : start + tall * wide] = [1] * (tall * wide)
    grid = torch.tensor([[1, 2 * tall, 2 * wide] for _, (tall, wide) in pictures])
    model = type(
        "Stub", (), {"config": config, "get_vision_position_ids": Qwen3VLModel.get_vision_position_ids}
    )
    theirs, delta = Qwen3VLModel.get_rope_index(
        model(), torch.zeros(1, 34, dtype=torch.long), torch.tensor([kinds]), image_grid_thw=grid
    )
    images = [
        PreparedImage(
            content_hash=b"", tiles=[], pixels=b"", grid=grid, start=start, num_tokens=grid[0] * grid[1]
        )
        for start, grid in pictures
    ]
    ours: tuple[array[int], ...] = tuple(array("i") for _ in range(3))
    extend_positions(ours, images, 0, 35)
    assert [axis.tolist()[:34] for axis in ours] == theirs[:, 0].tolist()
    assert {axis[34] for axis in ours} == {34 + int(delta)}


def test_placeholders_that_are_no_picture_are_tokens(model):
    assert len(tokens(model.engine(), [ask_about("a", [1, IMAGE, BREAK, IMAGE, 2])])["a"]) == 6
