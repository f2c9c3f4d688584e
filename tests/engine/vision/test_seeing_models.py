"""Whole models with pictures in prompts: cut, cached, batched and resumed; what their plans count."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmbox.engine.core.engine import Engine
from llmbox.engine.core.kv_cache.state_manager import pool_blocks
from llmbox.engine.ipc.messages import AddRequest, PreparedImage
from llmbox.engine.model_config.vision.families import vision_shape
from llmbox.engine.sampling_params import SamplingParams
from support.real_engines import load, run, tokens
from support.vision_models import MODELS, draw_picture, make_vision_model, prepare, read_vision

IMAGE, BREAK, END = 10, 11, 12
"""Ids of the image token, and of the two that Pixtral has at the ends of rows and pictures."""


def picture_of(directory: Path, width: int, height: int) -> tuple[list[int], PreparedImage]:
    """Return the ids of a picture and the picture, which starts at the first of them."""
    vision = read_vision(directory)
    assert vision is not None
    layout, image = prepare(vision, draw_picture(width, height))
    text = layout.text.replace("[IMG_BREAK]", chr(BREAK)).replace("[IMG_END]", chr(END))
    text = text.replace("\n", "").replace(vision.image_text, chr(IMAGE))
    ids = [ord(each) for each in text if ord(each) < 20]
    places = [number for number, token in enumerate(ids) if token == IMAGE]
    tokens = places[-1] - places[0] + 1
    image = replace(
        image, content_hash=bytes([width]) * 32, start=places[0], num_tokens=tokens, num_rows=layout.num_rows
    )
    return ids, image


def seeing(directory: Path, name: str = "a", size: tuple[int, int] = (50, 40), ask: int = 40) -> AddRequest:
    """A request of text, a picture, and text again."""
    ids, image = picture_of(directory, *size)
    before = list(range(20, 26))
    prompt = [*before, *ids, *range(ask, ask + 7)]
    placed = replace(image, start=image.start + len(before))
    params = SamplingParams(max_tokens=6, temperature=0.0)
    return AddRequest(request_id=name, prompt_ids=prompt, images=[placed], params=params)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_plain_kernels_give_the_tokens_of_the_cpp_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    change = {"use_bidirectional_attention": "vision"}
    text = MODELS[kind][1]["text_config"] | (change if kind == "gemma4" else {})
    make_vision_model(tmp_path, kind, text_config=text)
    asked = [seeing(tmp_path, "a"), seeing(tmp_path, "b", (131, 70))]
    options: dict[str, Any] = {"dtype": "float32", "context": 512, "token_budget": 24}
    expected = tokens(load(tmp_path, **options), asked)
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    assert tokens(load(tmp_path, **options), asked) == expected


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "lfm3_vl"])
def test_chunks_caches_and_batches_change_no_token(tmp_path: Path, kind: str) -> None:
    make_vision_model(tmp_path, kind)
    asked = [seeing(tmp_path, "a"), seeing(tmp_path, "b", (131, 70)), seeing(tmp_path, "c", ask=60)]
    asked.append(AddRequest(request_id="text", prompt_ids=list(range(30, 60)), params=asked[0].params))

    def fresh(**options: Any) -> Engine:
        return load(tmp_path, dtype="float32", context=512, **options)

    plain = fresh(prefix_cache=False)
    alone = {each.request_id: tokens(plain, [each])[each.request_id] for each in asked}
    engine = fresh(token_budget=32)
    assert tokens(engine, asked) == alone
    again = run(engine, [replace(asked[0], request_id="again")])["again"]
    assert again[0].cached_tokens > 0
    assert [token for output in again for token in output.token_ids] == alone["a"]
    resumed = replace(asked[1], output_ids=alone["b"][:3])
    assert tokens(fresh(token_budget=7, max_running=4), [resumed])["b"] == alone["b"][3:]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chunked_prefill": False}, "load it without --no-chunked-prefill"),
        ({"batching": "static"}, "load it without --batching static"),
    ],
)
def test_a_model_without_chunks_says_why_it_reads_no_pictures(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    make_vision_model(tmp_path, "qwen3_vl")
    engine = load(tmp_path, dtype="float32", context=512, **options)
    assert reason in engine.info.image_problem
    refusal = run(engine, [seeing(tmp_path)])["a"][0]
    assert refusal.error_code == "invalid_request"
    assert "cannot read images" in refusal.error_message


def test_the_plan_counts_the_tower_and_the_cache_of_pictures(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "qwen3_vl")
    info = load(tmp_path, dtype="float32", context=512).info
    vision = read_vision(tmp_path)
    assert vision is not None
    assert info.vision_bytes == vision.num_params * 4
    assert info.image_cache_bytes == 4096 * 64 * 3 * 4
    assert info.weights_bytes > info.vision_bytes
    assert info.workspace_bytes > info.image_cache_bytes


def test_the_plan_counts_the_tiles_of_the_largest_canvas(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "llava_next")
    vision = read_vision(tmp_path)
    assert vision is not None
    rules = vision.processor
    one_tile = replace(vision, processor=replace(rules, canvases=((48, 48),)))
    more = vision_shape(vision).slice_numbers - vision_shape(one_tile).slice_numbers
    assert more == 2 * (4 - 1) * 36 * vision.hidden_size  # tiles, and the same in lines; 36 rows a tile


def test_the_plan_counts_the_shares_of_visual_tokens(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "ovis2")
    vision = read_vision(tmp_path)
    assert vision is not None
    without = replace(vision, tower=replace(vision.tower, indicators=0))
    more = vision_shape(vision).slice_numbers - vision_shape(without).slice_numbers
    assert more == 5 * 9 * 35  # rows of a tile, visual tokens


def test_a_picture_larger_than_a_step_has_room_in_sliding_windows(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "gemma3")
    asked = [seeing(tmp_path, str(number), ask=40 + number) for number in range(3)]
    engine = load(tmp_path, dtype="float32", context=512, token_budget=3, max_running=3)
    assert engine.scheduler.config.window > 0
    assert engine.scheduler.kv_cache.windows is not None
    pool = engine.scheduler.kv_cache.windows.pool.num_blocks
    assert pool == pool_blocks(engine.scheduler.config.window, engine.info.block_size, 3, 3 + 9)
    plain = load(tmp_path, dtype="float32", context=512)
    assert tokens(engine, asked) == {
        each.request_id: tokens(plain, [each])[each.request_id] for each in asked
    }
