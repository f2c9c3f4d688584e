"""Tiny vision-language models as two GGUF files, as llama.cpp's converter writes them: model and mmproj."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.numpy import load_file, save_file

from llmbox.engine.checkpoint.names import inner_name

from .gguf_families import LLAMA4, write_family
from .gguf_models import add_tokenizer, named, side_by_side, write_all, write_gguf
from .tiny_models import write_json, write_tokenizer
from .vision_models import MODELS, make_vision_model

SINGLE = "model.safetensors"
SEEING: dict[str, tuple[str, str, str]] = {
    "gemma3": ("gemma3", "gemma3", "<image_soft_token>"),
    "gemma4": ("gemma4", "gemma4v", "<|image|>"),
    "gemma4_unified": ("gemma4", "gemma4uv", "<|image|>"),
    "qwen2_vl": ("qwen2vl", "qwen2vl_merger", "<|image_pad|>"),
    "qwen2_5_vl": ("qwen2vl", "qwen2.5vl_merger", "<|image_pad|>"),
    "qwen3_vl": ("qwen3vl", "qwen3vl_merger", "<|image_pad|>"),
    "qwen3_5": ("qwen35", "qwen3vl_merger", "<|image_pad|>"),
    "glm4v": ("glm4", "glm4v", "<|image|>"),
    "internvl": ("qwen3", "internvl", "<IMG_CONTEXT>"),
    "llama4": ("llama4", "llama4", "<|patch|>"),
    "mistral3": ("llama", "pixtral", "[IMG]"),
    "llava": ("llama", "pixtral", "[IMG]"),
    "lighton_ocr": ("qwen3", "lightonocr", "<|image_pad|>"),
    "idefics3": ("llama", "idefics3", "<image>"),
    "lfm2_vl": ("lfm2", "lfm2", "<image>"),
}
"""Architecture, projector type and image token of families that llama.cpp has projectors for."""
FAMILIES = {"qwen3_5": "qwen35", "glm4v": "glm4", "llama4": "llama4"}
"""Language models that `write_family` writes, beside Gemma 4."""
SUFFIXES = (".weight", ".bias", ".input_min", ".input_max", ".output_min", ".output_max")
CHANGES: dict[str, dict[str, Any]] = {
    # Files cannot say that every second layer from the first on sees all of a picture, nor other windows.
    "qwen2_5_vl": {"window_size": 36, "fullatt_block_indexes": [1]},
    "mistral3": {"hidden_act": "silu"},
    "llava": {"hidden_act": "silu"},
    "lighton_ocr": {"hidden_act": "silu"},
}


def make_seeing_model(directory: Path, kind: str, **changes: Any) -> Any:
    """Write a checkpoint that GGUF files can describe, with a tokenizer that has its image token as id 10."""
    values = MODELS[kind][1]
    text = values["text_config"] | {"vocab_size": 288, "query_pre_attn_scalar": 16}
    text |= {"rope_parameters": changes.pop("rope")} if "rope" in changes else {}
    if kind.startswith("gemma4"):  # as of models without embeddings of layers
        text["use_bidirectional_attention"] = "vision"
    if kind == "llama4":  # files are always of a model with experts
        text |= LLAMA4
    tower = values["vision_config"] | CHANGES.get(kind, {})
    model = make_vision_model(directory, kind, vision_config=tower, text_config=text, **changes)
    write_tokenizer(directory)
    add_image_token(directory, kind)
    rules = json.loads((directory / "preprocessor_config.json").read_text())
    if kind == "lfm2_vl":  # files do not say how many tokens a picture has: as of the published models
        rules = {"image_processor_type": rules["image_processor_type"], "encoder_patch_size": 8}
    if kind.startswith("gemma4"):
        rules.pop("max_soft_tokens")
    write_json(
        directory / "preprocessor_config.json", {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} | rules
    )
    return model


def add_image_token(directory: Path, kind: str) -> None:
    """Make the token 10 of a tokenizer the image token of a family."""
    raw = json.loads((directory / "tokenizer.json").read_text())
    vocabulary, mark = raw["model"]["vocab"], SEEING[kind][2]
    (old,) = (word for word, number in vocabulary.items() if number == 10)
    del vocabulary[old]
    vocabulary[mark] = 10
    raw["model"]["merges"] = [pair for pair in raw["model"]["merges"] if old not in (*pair, "".join(pair))]
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 10, "content": mark})
    write_json(directory / "tokenizer.json", raw)


def write_seeing_gguf(directory: Path, file: Path, kind: str, **metadata: Any) -> Path:
    """Write the language model of a checkpoint."""
    config, arch = json.loads((directory / "config.json").read_text()), SEEING[kind][0]
    inner = directory / "text"
    inner.mkdir(exist_ok=True)
    stored = load_file(directory / SINGLE)
    arrays = {inner_name(name): array for name, array in stored.items()}
    text = {
        n: a
        for n, a in arrays.items()
        if n.startswith(
            ("lm_head.", "model.layers.", "model.embed_tokens", "model.embedding_norm", "model.norm")
        )
    }
    save_file(text, inner / SINGLE)
    settings = config["text_config"]
    rope = settings.get("rope_parameters") or {}
    if not kind.startswith("gemma4"):
        settings |= {"rope_parameters": rope.get("full_attention", rope)}
    write_json(inner / "config.json", settings)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (inner / name).write_bytes((directory / name).read_bytes())
    if sections := rope.get("mrope_section"):
        metadata["rope__dimension_sections"] = [*sections, 0]
    if kind == "glm4v":
        save_file({name: halved(name, array, settings) for name, array in text.items()}, inner / SINGLE)
    if kind.startswith("gemma4") or kind in FAMILIES:
        return write_family(inner, file, FAMILIES.get(kind, kind.replace("_", "-")), **metadata)
    return write_gguf(inner, file, arch=arch, **metadata)


def halved(name: str, array: Any, config: dict[str, Any]) -> Any:
    """Move the RoPE pairs of queries and keys half of the rotated part apart, as the converter of GLM-4V."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return array
    width = config["head_dim"]
    rotated = int(width * config["rope_parameters"]["partial_rotary_factor"])
    by_head = array.reshape(-1, width, *array.shape[1:])
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, width)]
    return np.ascontiguousarray(by_head[:, order].reshape(array.shape))


def write_mmproj(
    directory: Path,
    file: Path,
    kind: str,
    width: str = "F32",
    change: Callable[[str, Any], Any] | None = None,
) -> Path:
    """Write the tower of a checkpoint. `change` gets each tensor, and returns another or None."""
    config = json.loads((directory / "config.json").read_text())
    tower, rules = config["vision_config"], json.loads((directory / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(file, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    if kind.startswith("gemma4"):  # a file with a tower for sound too has a projector of each
        writer.add_clip_vision_projector_type(SEEING[kind][1])
    else:
        writer.add_clip_projector_type(SEEING[kind][1])
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    if kind == "gemma4_unified":  # has no layers
        empty = ("intermediate_size", "num_hidden_layers", "num_attention_heads")
        tower |= {"hidden_size": tower["mm_embed_dim"], **dict.fromkeys(empty, 0)}
    hidden = tower.get("embed_dim", tower["hidden_size"])
    layers = tower.get("depth", tower.get("num_hidden_layers"))
    heads = tower.get("num_heads", tower.get("num_attention_heads"))
    writer.add_vision_image_size(_edge(tower.get("image_size", 560)))
    writer.add_vision_patch_size(_edge(tower["patch_size"]))
    writer.add_vision_embedding_length(hidden)
    # The converter takes the width of the embeddings for that of Qwen2-VL's MLP.
    writer.add_vision_feed_forward_length(tower.get("intermediate_size", tower["hidden_size"]))
    writer.add_vision_block_count(layers)
    writer.add_vision_head_count(heads)
    writer.add_vision_attention_layernorm_eps(
        1e-5 if kind in {"mistral3", "llava", "lighton_ocr", "glm4v"} else 1e-6
    )
    writer.add_vision_image_mean(rules["image_mean"])
    writer.add_vision_image_std(rules["image_std"])
    _add_rules(writer, kind, config, rules)
    for name, array in _tensors(directory, kind, config, heads):
        found = array if change is None else change(name, array)
        if found is None:
            continue
        if width == "F32" or found.ndim == 1 or found.shape[-1] % 32:
            writer.add_tensor(name, np.ascontiguousarray(found.astype(np.float32)))
        elif width == "F16":
            writer.add_tensor(name, found.astype(np.float16))
        else:
            qtype = gguf.GGMLQuantizationType[width]
            writer.add_tensor(name, quantize(found.astype(np.float32), qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _edge(size: Any) -> int:
    return size[0] if isinstance(size, list) else size


def _add_rules(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any], rules: dict[str, Any]) -> None:
    tower = config["vision_config"]
    if kind.startswith(("qwen", "glm")):
        size = rules.get("size", {})
        writer.add_uint32("clip.vision.image_min_pixels", rules.get("min_pixels") or size["shortest_edge"])
        writer.add_uint32("clip.vision.image_max_pixels", rules.get("max_pixels") or size["longest_edge"])
        writer.add_vision_spatial_merge_size(2)
    match kind:
        case "qwen2_5_vl":
            writer.add_vision_use_silu(True)
            writer.add_vision_n_wa_pattern(tower["fullatt_block_indexes"][0] + 1)
            writer.add_uint32("clip.vision.window_size", tower["window_size"])
        case "qwen3_vl":
            writer.add_vision_use_gelu(True)
            levels = tower["deepstack_visual_indexes"]
            writer.add_vision_is_deepstack_layers([layer in levels for layer in range(tower["depth"])])
        case "qwen3_5":
            writer.add_vision_use_gelu(True)
            writer.add_vision_is_deepstack_layers([False] * tower["depth"])
        case "glm4v":
            writer.add_vision_use_silu(True)
        case "gemma3":
            writer.add_vision_use_gelu(True)
            writer.add_vision_projector_scale_factor(2)
        case "internvl" | "llama4":
            writer.add_vision_use_gelu(True)
            writer.add_vision_projector_scale_factor(2)
            if kind == "internvl":
                writer.add_uint32("clip.vision.preproc_min_tiles", 1)
                writer.add_uint32("clip.vision.preproc_max_tiles", rules["max_patches"])
        case "idefics3":
            writer.add_vision_use_gelu(True)
            writer.add_vision_projector_scale_factor(config["scale_factor"])
            writer.add_vision_preproc_image_size(rules["size"]["longest_edge"])
        case "lfm2_vl":
            writer.add_vision_use_gelu(True)
            writer.add_vision_projector_scale_factor(config["downsample_factor"])
        case "mistral3" | "llava" | "lighton_ocr":
            writer.add_vision_use_silu(True)
            if kind != "llava":
                writer.add_vision_spatial_merge_size(config["spatial_merge_size"])


def _tensors(
    directory: Path, kind: str, config: dict[str, Any], heads: int
) -> Iterator[tuple[str, np.ndarray]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    levels = config["vision_config"].get("deepstack_visual_indexes", [])
    for stored, array in load_file(directory / SINGLE).items():
        if "language_model" in stored or not any(
            part in stored for part in ("vision", "visual", "multi_modal", "connector")
        ):
            continue
        name = stored if kind == "idefics3" else stored.removeprefix("model.")
        name = f"model.{name}" if kind == "internvl" else name
        if kind in {"internvl", "llama4"}:
            yield _placed_plain(names, name), array
            continue
        if kind == "gemma3":
            name = name.replace("_weight", ".weight")
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
            array = array + 1 if "soft_emb_norm" in name else array  # noqa: PLW2901
        if kind == "gemma4_unified":
            yield _placed_unified(name, array)
            continue
        if kind == "gemma4":
            name = stored.replace("model.vision_tower.encoder.", "vision_model.model.")
            name = name.replace(".linear.weight", ".weight")
            name += ".weight" * name.endswith("position_embedding_table")
            array = array.reshape(1) if array.ndim == 0 else array  # noqa: PLW2901
            if name.endswith("patch_embedder.input_proj.weight"):
                array = colors_first(array)  # noqa: PLW2901
        if kind == "lfm2_vl":
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
            name = name.replace("vision_model.vision_model.", "vision_model.")
            if name.endswith("patch_embedding.weight"):
                array = colors_first(array)  # noqa: PLW2901
        if kind == "lighton_ocr":
            name = name.replace("vision_encoder.", "vision_tower.")
            name = name.replace("vision_projection.", "multi_modal_projector.")
        if kind in {"mistral3", "llava", "lighton_ocr"} and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = side_by_side(array, heads)  # noqa: PLW2901
        if name == "visual.patch_embed.proj.weight":
            yield "v.patch_embd.weight", array[:, :, 0]
            yield "v.patch_embd.weight.1", array[:, :, 1]
        elif ".attn.qkv." in name and kind in {"qwen2_vl", "qwen2_5_vl"}:
            for part, rows in zip("qkv", np.split(array, 3), strict=True):
                yield _placed(names, name.replace("qkv", part)), rows
        elif name.startswith("visual.deepstack_merger_list."):
            level, part, suffix = name.split(".")[2:]
            yield f"v.deepstack.{levels[int(level)]}.{part.removeprefix('linear_')}.{suffix}", array
        elif kind in {"qwen3_vl", "qwen3_5"} and name.startswith("visual.merger."):
            part, suffix = name.split(".")[2:]
            place = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[part]
            yield f"{place}.{suffix}", array
        elif name.endswith("patch_merger.merging_layer.weight"):
            yield "mm.patch_merger.weight", array
        else:
            yield _placed(names, name), array


def _placed_plain(names: gguf.TensorNameMap, name: str) -> str:
    """Return the name of a tensor of InternVL or Llama 4: the latter has one linear after two others."""
    places = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
    if name.endswith("multi_modal_projector.linear_1.weight") and not name.startswith("model."):
        return "mm.model.fc.weight"
    if "multi_modal_projector." in name:
        part, kind = name.split(".")[-2:]
        name = f"{places[part]}.{kind}"
    if name.endswith(("lambda_1", "lambda_2", "position_embeddings", "positional_embedding_vlm")):
        name += ".weight"
    return _placed(names, name)


def _placed_unified(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Return a tensor of Gemma 4 12B, which the `gguf` package has no names for."""
    module, _, kind = name.rpartition(".")
    places = {
        "vision_embedder.patch_dense": "v.patch_embd",
        "vision_embedder.patch_ln1": "v.patch_norm.1",
        "vision_embedder.patch_ln2": "v.patch_norm.2",
        "vision_embedder.pos_norm": "v.patch_norm.3",
        "embed_vision.embedding_projection": "mm.input_projection",
    }
    if name == "vision_embedder.pos_embedding":
        return "v.position_embd.weight", array.transpose(1, 0, 2)
    if module.endswith("patch_ln1"):
        array = colors_first(array.reshape(1, -1)).reshape(-1)
    if name == "vision_embedder.patch_dense.weight":
        array = colors_first(array).reshape(len(array), -1)
    return f"{places[module]}.{kind}", array


def colors_first(array: np.ndarray) -> np.ndarray:
    """Make a kernel of a matrix of patches, whose pixels have their colors side by side."""
    side = round((array.shape[1] / 3) ** 0.5)
    return array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)


def _placed(names: gguf.TensorNameMap, name: str) -> str:
    place = names.get_name(name, try_suffixes=SUFFIXES)
    assert place is not None, name
    return place


OLLAMA = {
    "embeddings.": "",
    "encoder.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "input_projection_weight": "input_projection.weight",
    "multi_modal_projector": "mm",
    "vision_tower": "v",
}


def write_ollama_gemma3(directory: Path, file: Path) -> Path:
    """Write a Gemma 3 as Ollama's library has it: one file, with the keys and names of its own converter."""
    config = json.loads((directory / "config.json").read_text())
    text, tower = config["text_config"], config["vision_config"]
    inner = write_seeing_gguf(directory, file.with_name("text.gguf"), "gemma3").parent / "model" / "text"
    writer = gguf.GGUFWriter(file, "gemma3")
    numbers = {
        "block_count": text["num_hidden_layers"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": text["head_dim"],
        "attention.value_length": text["head_dim"],
        "attention.sliding_window": text["sliding_window"],
        "vision.block_count": tower["num_hidden_layers"],
        "vision.embedding_length": tower["hidden_size"],
        "vision.feed_forward_length": tower["intermediate_size"],
        "vision.image_size": tower["image_size"],
        "vision.patch_size": tower["patch_size"],
        "vision.num_channels": 3,
        "vision.attention.head_count": tower["num_attention_heads"],
        "mm.tokens_per_image": config["mm_tokens_per_image"],
    }
    for key, number in numbers.items():
        writer.add_uint32(f"gemma3.{key}", number)
    writer.add_float32("gemma3.vision.attention.layer_norm_epsilon", 1e-6)
    add_tokenizer(writer, inner)
    for name, array in named(inner, text, "gemma3"):
        writer.add_tensor(name, np.ascontiguousarray(array.astype(np.float32)))
    for stored, array in load_file(directory / SINGLE).items():
        if "vision_tower" in stored or "multi_modal" in stored:
            name = stored.removeprefix("model.").replace("vision_model.", "")
            for ours, theirs in OLLAMA.items():
                name = name.replace(ours, theirs)
            writer.add_tensor(name, array + 1 if "soft_emb_norm" in name else array)
    write_all(writer)
    (file.parent / "text.gguf").unlink()
    return file
