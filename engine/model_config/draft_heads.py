"""Draft heads that are published in folders of their own.

EAGLE-3 is one layer that reads the hidden states of three of the target's layers and the next token (Li et
al., "EAGLE-3", 2025). Medusa has several output heads, each for a later token (Cai et al., "Medusa", 2024).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.files import read_json
from ..checkpoint.index import list_tensors
from ..errors import ModelError
from .config import ModelConfig, parse_fields
from .fields import MAX_LAYERS, MAX_WIDTH, Fields
from .shape import ModelShape

EAGLE3_CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Names of its class in `architectures` of config.json."""
MAX_MEDUSA_HEADS = 64
_MEDUSA_SPELLINGS = (
    (r"^medusa_head\.", ""),
    (r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """EAGLE-3 head of a folder."""

    directory: Path
    layer: ModelConfig
    """Its decoder layer, as a model of one layer."""
    vocab: int
    """Tokens that it can propose."""
    target_hidden: int
    """Width of the target's hidden states."""
    tapped: tuple[int, ...] | None
    """Layers of the target whose inputs it reads; None: the usual ones."""
    norm_before_residual: bool

    def taps(self, layers: int) -> tuple[int, ...]:
        """Return the layers of a target of so many whose inputs it reads."""
        return self.tapped or (2, layers // 2, layers - 3)

    def shape(self) -> ModelShape:
        hidden, target = self.layer.hidden_size, self.target_hidden
        # Queries, keys and values read the embedding too, three hidden states are joined, and there is one
        # table: the output head.
        q_kv = (self.layer.num_heads + 2 * self.layer.num_kv_heads) * self.layer.head_dim
        params = self.layer.num_parameters - 2 * self.layer.vocab_size * hidden
        params += q_kv * hidden + 3 * target * hidden + hidden + self.vocab * hidden
        shape = replace(self.layer, tie_word_embeddings=False).shape()
        return replace(shape, vocab=self.vocab, tied=True, exact_params=params)


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Medusa heads of a folder."""

    directory: Path
    heads: int
    blocks: int
    """Residual blocks of each head."""
    hidden: int
    vocab: int

    def rename(self, name: str) -> str:
        """Return the name that published heads have, for the spellings of other programs."""
        for pattern, replacement in _MEDUSA_SPELLINGS:
            name = re.sub(pattern, replacement, name)
        return re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{self.blocks}.", name)

    def shape(self) -> ModelShape:
        hidden = self.hidden
        params = self.heads * (self.blocks * (hidden + 1) * hidden + self.vocab * hidden)
        return ModelShape(
            layers=1,
            hidden=hidden,
            heads=1,
            kv_heads=0,
            head_dim=2,
            ffn=hidden,
            vocab=self.heads * self.vocab,
            tied=True,
            context_limit=1,
            exact_params=params,
        )


DraftHeadConfig = Eagle3Config | MedusaConfig


def is_draft_head(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a draft head, and of no model."""
    named = raw.get("architectures")
    is_eagle3 = isinstance(named, list) and any(name in EAGLE3_CLASSES for name in named)
    return is_eagle3 or "medusa_num_heads" in raw or raw.get("model_type") == "medusa"


def read_draft_head(directory: Path) -> DraftHeadConfig | None:
    """Return the draft head of a folder; None for a model. Raises ModelError for a head that is damaged."""
    file = directory / "config.json"
    fields = Fields(read_json(file), str(file))
    if not is_draft_head(fields.raw):
        return None
    is_medusa = "medusa_num_heads" in fields.raw or fields.raw.get("model_type") == "medusa"
    return _read_medusa(fields, directory) if is_medusa else _read_eagle3(fields, directory)


def _read_eagle3(fields: Fields, directory: Path) -> Eagle3Config:
    if fields.integer("num_hidden_layers", 1) != 1:
        raise fields.error("only EAGLE-3 heads of one layer are supported")
    own = fields.mapping("eagle_config") or {}
    for key in own.keys() & {"use_aux_hidden_state"}:
        if own[key] is not True:
            raise fields.error("use_aux_hidden_state must be true: heads without it are not EAGLE-3")
    tapped = own.get("eagle_aux_hidden_state_layer_ids", fields.raw.get("eagle_aux_hidden_state_layer_ids"))
    is_list = isinstance(tapped, list) and len(tapped) == 3
    if tapped is not None and not (is_list and all(type(i) is int and 0 < i < MAX_LAYERS for i in tapped)):
        raise fields.error("eagle_aux_hidden_state_layer_ids must name three layers")
    raw = {**fields.raw, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "auto_map": None}
    layer = parse_fields(Fields({**raw, "tie_word_embeddings": False}, fields.where), directory)
    return Eagle3Config(
        directory=directory,
        layer=layer,
        vocab=fields.integer("draft_vocab_size", layer.vocab_size, most=16 * MAX_WIDTH),
        target_hidden=fields.integer("target_hidden_size", layer.hidden_size, most=MAX_WIDTH),
        tapped=tuple(tapped) if tapped else None,
        norm_before_residual=fields.flag("norm_before_residual", default=False),
    )


def _read_medusa(fields: Fields, directory: Path) -> MedusaConfig:
    """Read the heads. Some published config.json tell another number than there is, so tensors decide."""
    key = "medusa_num_layers" if "medusa_num_layers" in fields.raw else "num_hidden_layers"
    found = MedusaConfig(
        directory=directory, heads=0, blocks=fields.integer(key, 1, most=MAX_LAYERS), hidden=0, vocab=0
    )
    shapes = {found.rename(name): entry.shape for name, entry in list_tensors(directory).items()}
    heads = 0
    while heads < MAX_MEDUSA_HEADS and f"{heads}.{found.blocks}.weight" in shapes:
        heads += 1
    first = shapes.get(f"0.{found.blocks}.weight", ())
    if not heads or len(first) != 2:
        raise ModelError(f"{directory}: tensor 0.{found.blocks}.weight of the first Medusa head is missing")
    vocab, hidden = first
    return replace(found, heads=heads, hidden=hidden, vocab=vocab)
