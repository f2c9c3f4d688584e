"""Multipliers and softcaps of some architectures."""

from dataclasses import dataclass, replace

from .fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Multipliers and softcaps of one model."""

    attention: float | None = None
    """Multiplier of attention scores; None: 1 / sqrt(head_dim)."""
    embedding: float = 1.0
    """Multiplier of embeddings."""
    rounds_embedding: bool = False
    """True if the embedding multiplier is rounded to the model's dtype."""
    residual: float = 1.0
    """Multiplier of the outputs of attention and MLP. The residual stream is stored divided by it instead,
    and `embedding` too; norms are invariant to that except for their epsilon."""
    logits: float = 1.0
    """Multiplier of logits."""
    attention_cap: float | None = None
    """Softcap of scaled attention scores s: cap * tanh(s / cap)."""
    logits_cap: float | None = None
    """Softcap of logits."""
    mamba_in: tuple[float, ...] = ()
    """Multipliers of what the input linear of a Mamba-2 layer gives: (z, x, B, C, dt); empty: none."""
    mamba_out: float = 1.0
    attention_out: float = 1.0
    """Multipliers of the results of Mamba-2 and attention, where a layer has both."""
    mlp: tuple[float, float] | None = None
    """Multipliers of the gate and of the result of an MLP."""


def no_scales(_fields: Fields) -> Scales:
    return Scales()


def cohere_scales(fields: Fields) -> Scales:
    return Scales(logits=multiplier(fields, "logit_scale"))


def granite_scales(fields: Fields) -> Scales:
    residual = multiplier(fields, "residual_multiplier")
    return Scales(
        embedding=multiplier(fields, "embedding_multiplier") / residual,
        attention=multiplier(fields, "attention_multiplier"),
        residual=residual,
        logits=1 / multiplier(fields, "logits_scaling"),
    )


def hyperclova_scales(fields: Fields) -> Scales:
    """Return the multipliers of a Granite, but for logits, which are multiplied."""
    found = granite_scales(fields)
    attention = found.attention if fields.raw.get("attention_multiplier") is not None else None
    return replace(found, attention=attention, logits=multiplier(fields, "logits_scaling"))


def falcon_h1_scales(fields: Fields) -> Scales:
    """Return the multipliers of Falcon-H1. Those of attention's input and keys multiply its scores."""
    inside, width = multiplier(fields, "attention_in_multiplier"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // width or None)
    if inside != 1 and fields.flag("attention_bias", default=False):
        raise fields.error("attention_in_multiplier with attention_bias is not supported")
    mamba_in = multiplier(fields, "ssm_in_multiplier")
    if mamba_in != 1 and fields.flag("mamba_proj_bias", default=False):
        raise fields.error("ssm_in_multiplier with mamba_proj_bias is not supported")
    gate, down = multipliers(fields, "mlp_multipliers", 2)
    return Scales(
        embedding=multiplier(fields, "embedding_multiplier"),
        attention=head_dim**-0.5 * multiplier(fields, "key_multiplier") * inside**2,
        logits=multiplier(fields, "lm_head_multiplier"),
        mamba_in=tuple(each * mamba_in for each in multipliers(fields, "ssm_multipliers", 5)),
        mamba_out=multiplier(fields, "ssm_out_multiplier"),
        attention_out=inside * multiplier(fields, "attention_out_multiplier"),
        mlp=(gate, down),
    )


def multipliers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    values = fields.numbers(name) if fields.raw.get(name) is not None else (1.0,) * count
    if len(values) != count:
        raise fields.error(f"{name} must have {count} numbers, not {len(values)}")
    return tuple(_in_range(fields, name, value) for value in values)


def multiplier(fields: Fields, name: str) -> float:
    return _in_range(fields, name, fields.number(name, 1.0))


def _in_range(fields: Fields, name: str, value: float) -> float:
    if not 1e-6 <= value <= 1e6:
        raise fields.error(f"{name} {value} must be between 1e-6 and 1e6")
    return value
