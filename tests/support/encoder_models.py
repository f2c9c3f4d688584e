"""Tiny random encoders of the BERT family, and folders that declare how their vectors are made."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.tiny_models import write_json

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
}
ROBERTA = {**SIZES, "max_position_embeddings": 82, "pad_token_id": 1, "type_vocab_size": 1}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES),
    "roberta": ("Roberta", ROBERTA),
    "xlm-roberta": ("XLMRoberta", ROBERTA),
    "mpnet": ("MPNet", {**SIZES, "max_position_embeddings": 82}),
    "distilbert": (
        "DistilBert",
        {
            "vocab_size": 320, "dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4,
            "max_position_embeddings": 80,
        },
    ),
    "modernbert": (
        "ModernBert",
        {
            **SIZES, "num_hidden_layers": 4, "local_attention": 16, "pad_token_id": 0, "eos_token_id": 1,
            "bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 1,
        },
    ),
    "nomic_bert": ("NomicBert", SIZES),
    "gte": ("Gte", {**SIZES, "type_vocab_size": 1}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", {**SIZES, "type_vocab_size": 1}),
}  # fmt: skip
"""Prefix of the classes in transformers, and values of the config."""
EMBEDDING_GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3TextModel"],
    "model_type": "gemma3_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 80,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": 20,
    "use_bidirectional_attention": True,
    "dtype": "float32",
}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def make_encoder(directory: Path, kind: str, end: str = "Model", **changes: Any) -> Any:
    """Write a checkpoint and return the model of transformers in float32."""
    import transformers

    name, values = ENCODERS[kind]
    config = getattr(transformers, f"{name}Config")(**{**values, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}{end}")(config).eval()
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 or "embed" in each else 1.2 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale + (each.endswith("orm.weight")))
    model.save_pretrained(directory)
    return model


def declare_vectors(
    directory: Path, mode: str = "mean_tokens", dense: tuple[tuple[int, int, str], ...] = ()
) -> list[torch.Tensor]:
    """Write what sentence-transformers writes. `dense`: inputs, outputs, activation of each layer."""
    modules, weights = list(MODULES), []
    for number, (inputs, outputs, activation) in enumerate(dense, 2):
        folder = directory / f"{number}_Dense"
        folder.mkdir()
        modules.append({"path": folder.name, "type": "sentence_transformers.models.Dense"})
        fields = {"in_features": inputs, "out_features": outputs, "bias": False}
        write_json(folder / "config.json", fields | {"activation_function": f"torch.nn.modules.{activation}"})
        weights.append(torch.randn(outputs, inputs) * inputs**-0.5)
        save_file({"linear.weight": weights[-1]}, folder / "model.safetensors")
    modules.append({"path": "9_Normalize", "type": "sentence_transformers.models.Normalize"})
    write_json(directory / "modules.json", modules)
    (directory / "1_Pooling").mkdir(exist_ok=True)
    write_json(directory / "1_Pooling" / "config.json", {f"pooling_mode_{mode}": True})
    return weights


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    write_json(file, json.loads(file.read_text()) | changes)


NOMIC_V2: dict[str, Any] = {
    "architectures": ["NomicBertModel"],
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "model_type": "nomic_bert",
    "activation_function": "gelu",
    "vocab_size": 320,
    "n_embd": 48,
    "n_inner": 80,
    "n_layer": 4,
    "n_head": 6,
    "n_positions": 2048,
    "layer_norm_epsilon": 1e-5,
    "rotary_emb_base": 10000,
    "type_vocab_size": 1,
    "num_experts": 8,
    "moe_top_k": 2,
    "moe_every_n_layers": 2,
    "dtype": "float32",
} | dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True)


def make_nomic_v2(directory: Path, hidden: int = 48, inner: int = 80) -> dict[str, torch.Tensor]:
    """Write a nomic v2, which transformers does not have, and return its weights."""
    norms, sizes = ["emb_ln"], {"n_embd": hidden, "n_inner": inner, "n_head": hidden // 8}
    linears: dict[str, tuple[int, int]] = {}
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (320, hidden),
        "embeddings.token_type_embeddings.weight": (1, hidden),
    }
    for number in range(4):
        layer = f"encoder.layers.{number}."
        linears |= {f"{layer}attn.Wqkv": (3 * hidden, hidden), f"{layer}attn.out_proj": (hidden, hidden)}
        norms += [f"{layer}norm1", f"{layer}norm2"]
        if number % 2:
            shapes |= {f"{layer}mlp.experts.mlp.w{part}": (8 * inner, hidden) for part in (1, 2)}
            shapes |= {f"{layer}mlp.router.layer.weight": (8, hidden), f"{layer}mlp.experts.bias": (hidden,)}
        else:
            linears |= {f"{layer}mlp.fc1": (inner, hidden), f"{layer}mlp.fc2": (hidden, inner)}
    return write_encoder(directory, NOMIC_V2 | sizes, shapes, linears, norms)


def write_encoder(
    directory: Path,
    config: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    linears: dict[str, tuple[int, int]],
    norms: list[str],
) -> dict[str, torch.Tensor]:
    """Write random weights: `linears` and `norms` have biases."""
    generator = torch.Generator().manual_seed(2)
    shapes = shapes | {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    hidden = config.get("hidden_size") or config["n_embd"]
    shapes |= {f"{name}.{part}": (hidden,) for name in norms for part in ("weight", "bias")}
    weights = {n: torch.randn(s, generator=generator) * s[-1] ** -0.5 for n, s in shapes.items()}
    weights |= {f"{name}.weight": 1 + weights[f"{name}.weight"] for name in norms}
    save_file(weights, directory / "model.safetensors")
    write_json(directory / "config.json", config)
    return weights


JINA_V3: dict[str, Any] = {
    **SIZES,
    "architectures": ["XLMRobertaModel"],
    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
    "model_type": "xlm-roberta",
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "max_position_embeddings": 82,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "lora_adaptations": ["retrieval.query", "retrieval.passage"],
    "task_instructions": {"retrieval.query": "w7 w8 ", "retrieval.passage": ""},
    "lora_rank": 2,
    "lora_alpha": 1,
    "load_trained_adapters": True,
    "dtype": "float32",
}
_JINA_V3_NAMES = {
    "embeddings.LayerNorm": "emb_ln",
    ".self_attn.o_proj": ".mixer.out_proj",
    ".post_attention_layernorm": ".norm1",
    ".post_mlp_layernorm": ".norm2",
}


def make_jina_v3(directory: Path) -> Any:
    """Write a jina-embeddings v3 as its repository has it, with adapters, and return that of transformers."""
    model = make_encoder(directory, "jina_embeddings_v3")
    torch.manual_seed(8)
    stored = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in _JINA_V3_NAMES.items():
            name = name.replace(ours, theirs)  # noqa: PLW2901
        name = f"roberta.{name.replace('layers.', 'encoder.layers.')}"  # noqa: PLW2901
        if "q_proj" in name:
            parts = [model.state_dict()[each] for each in _stack_of(name)]
            name, tensor = name.replace("self_attn.q_proj", "mixer.Wqkv"), torch.cat(parts)  # noqa: PLW2901
        elif "k_proj" in name or "v_proj" in name:
            continue
        if tensor.dim() > 1:
            module = name.removesuffix(".weight")
            rows, columns = tensor.shape
            a, b = torch.randn(2, 2, columns), torch.randn(2, rows, 2) / columns**0.5
            lora = f"{module}.parametrizations.weight.0.lora_"
            is_table = "embeddings" in name  # its factors come the other way around
            stored |= {f"{lora}A": b if is_table else a, f"{lora}B": a if is_table else b}
            name = f"{module}.parametrizations.weight.original"  # noqa: PLW2901
        stored[name] = tensor.contiguous()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", JINA_V3)
    return model


def with_task(model: Any, directory: Path, task: int) -> Any:
    """Return a copy of `make_jina_v3`'s model with the adapter of a task in its weights."""
    stored, merged = load_file(directory / "model.safetensors"), copy.deepcopy(model)
    weights = merged.state_dict()
    for name in weights:
        plain = f"roberta.{name}"
        for ours, theirs in _JINA_V3_NAMES.items():
            plain = plain.replace(ours, theirs)
        plain = plain.replace("roberta.layers.", "roberta.encoder.layers.").removesuffix(".weight")
        part = next((i for i, each in enumerate("qkv") if f"self_attn.{each}_proj" in name), None)
        plain = re.sub(r"self_attn\.[qkv]_proj", "mixer.Wqkv", plain)
        lora = f"{plain}.parametrizations.weight.0.lora_"
        if name.endswith(".weight") and f"{lora}A" in stored:
            a, b = stored[f"{lora}A"][task], stored[f"{lora}B"][task]
            added = (a @ b if "embeddings" in name else b @ a) / 2
            weights[name] += added if part is None else added.chunk(3)[part]
    merged.load_state_dict(weights)
    return merged.eval()


def _stack_of(name: str) -> list[str]:
    plain = name.removeprefix("roberta.encoder.")
    return [plain.replace("q_proj", f"{part}_proj") for part in "qkv"]


_JINA_RERANKER_NAMES = {
    "embeddings.LayerNorm": "emb_ln",
    "encoder.layer.": "encoder.layers.",
    ".attention.output.dense": ".mixer.out_proj",
    ".attention.output.LayerNorm": ".norm1",
    ".output.LayerNorm": ".norm2",
    ".intermediate.dense": ".mlp.fc1",
    ".output.dense": ".mlp.fc2",
}


def make_jina_reranker(directory: Path) -> Any:
    """Write a jina-reranker-v2 as its repository has it, and return the XLM-R of transformers."""
    model = make_encoder(directory, "xlm-roberta", "ForSequenceClassification", num_labels=1)
    stored, weights = {}, model.state_dict()
    for name, tensor in weights.items():
        if ".self.key" in name or ".self.value" in name:
            continue
        plain = name
        for ours, theirs in _JINA_RERANKER_NAMES.items():
            plain = plain.replace(ours, theirs)
        if ".self.query" in name:
            parts = [weights[name.replace("query", part)] for part in ("query", "key", "value")]
            plain, tensor = plain.replace("attention.self.query", "mixer.Wqkv"), torch.cat(parts)  # noqa: PLW2901
        stored[plain] = tensor.contiguous()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    code = "modeling_xlm_roberta.XLMRoberta"
    change_config(
        directory,
        auto_map={
            "AutoModel": f"{code}Model",
            "AutoModelForSequenceClassification": f"{code}ForSequenceClassification",
        },
        position_embedding_type="absolute",
    )
    return model
