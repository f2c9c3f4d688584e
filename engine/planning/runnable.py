"""Checks before a load that the kernels of a machine can run a plan, and that a draft model or head can
propose tokens of its target.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.support import (
    KernelSite,
    is_row_invariant,
    why_no_kv_dtype,
    why_no_quant,
    why_unknown_kernels,
)

from ..checkpoint.files import MAX_BYTES, read_json, read_regular
from ..checkpoint.index import list_tensors
from ..config import EngineConfig
from ..core.speculation.proposer import DraftMethod
from ..errors import DeviceError, ModelError
from ..model_config.config import ModelConfig, parse_config
from ..model_config.draft_heads import DraftHeadConfig, Eagle3Config, read_draft_head
from .memory_plan import MemoryBudget, MemoryPlan

_VOCABULARY_FILES: Final = ("tokenizer.json", "tekken.json", "tokenizer.model", "vocab.json")
"""Files that a vocabulary is read from, in the order of precedence."""


def check_drafts(target: ModelConfig, config: EngineConfig) -> None:
    """Raise ModelError if what `config` asks for cannot propose tokens of the target."""
    if config.mtp == "on" and target.mtp is None:
        raise ModelError(
            f"{config.model_path} has no layer for multi-token prediction that is known here: load without "
            "--draft mtp"
        )
    if config.draft_path is None:
        return
    directory = Path(config.draft_path)
    head = read_draft_head(directory)
    if head is None:
        require_draft_for(target, Path(config.model_path), parse_config(directory), directory)
    else:
        require_head_for(target, Path(config.model_path), head)


def require_head_for(target: ModelConfig, target_directory: Path, head: DraftHeadConfig) -> None:
    """Raise ModelError if a draft head was not made for the target."""
    directory, what = head.directory, "the Medusa heads"
    hidden, vocab, layers = target.hidden_size, target.vocab_size, target.num_layers
    if target.is_bidirectional or target.altup is not None:
        raise ModelError(f"{target_directory} cannot have draft heads: load it without --draft")
    widths = [("hidden states of {} numbers", head.shape().hidden, hidden)]
    if isinstance(head, Eagle3Config):
        what = "the EAGLE-3 head"
        widths += [("hidden states of {} numbers", head.target_hidden, hidden)]
        widths += [("a vocabulary of {} tokens", head.layer.vocab_size, vocab)]
        taps = head.taps(layers)
        if not all(0 < layer < layers for layer in taps):
            raise ModelError(
                f"{what} {directory} reads layers {', '.join(map(str, taps))} of its target, but "
                f"{target_directory} has {layers}: choose the head of this model with --draft"
            )
    else:
        widths += [("a vocabulary of {} tokens", head.vocab, vocab)]
    for text, own, wanted in widths:
        if own != wanted:
            raise ModelError(
                f"{what} {directory} was made for {text.format(own)}, but {target_directory} has {wanted}: "
                "choose the head of this model with --draft"
            )
    if isinstance(head, Eagle3Config):
        _check_eagle3_tensors(head)


def _check_eagle3_tensors(head: Eagle3Config) -> None:
    """Raise ModelError if tensors that decide what the head reads and proposes have other shapes."""
    tensors = {name.removeprefix("model."): each for name, each in list_tensors(head.directory).items()}
    wanted: dict[str, tuple[int, ...]] = {
        "fc.weight": (head.layer.hidden_size, 3 * head.target_hidden),
        "lm_head.weight": (head.vocab, head.layer.hidden_size),
    }
    if head.vocab != head.layer.vocab_size or "d2t" in tensors:
        wanted["d2t"] = (head.vocab,)
    for name, shape in wanted.items():
        found = tensors.get(name)
        if found is None or found.shape != shape:
            problem = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise ModelError(
                f"{head.directory}: tensor {name} of the EAGLE-3 head {problem}, config.json asks for "
                f"{list(shape)}: fetch the head again"
            )


def require_draft_for(
    target: ModelConfig, target_directory: Path, draft: ModelConfig, directory: Path
) -> None:
    """Raise ModelError if the model in `directory` cannot propose tokens of the target."""
    if draft.is_bidirectional or target.is_bidirectional:
        raise ModelError("a draft model and its target write text: models of embeddings and rankings do not")
    if draft.recurrent is not None or draft.sliding_heads is not None or draft.layer_sizes:
        raise ModelError(
            f"the draft model {directory} has recurrent layers or layers of several sizes, which a draft "
            "model must not have: choose another with --draft"
        )
    if draft.latent is not None:
        raise ModelError(
            f"the draft model {directory} has latent attention, which draft models must not have: choose "
            "another with --draft"
        )
    if (difference := _vocabulary_difference(target_directory, directory)) is not None:
        raise ModelError(
            f"the draft model {directory} has another vocabulary than {target_directory} ({difference}): a "
            "draft must be of the same family, such as a smaller size of the same model"
        )


def _vocabulary_difference(target: Path, draft: Path) -> str | None:
    """Return how the vocabularies differ, or None."""
    for name in _VOCABULARY_FILES:
        ours, theirs = (each / name for each in (target, draft))
        if not ours.is_file() or not theirs.is_file():
            continue
        if not name.endswith(".json"):
            same = read_regular(ours, MAX_BYTES) == read_regular(theirs, MAX_BYTES)
            return None if same else f"{name} differs"
        return _token_difference(_tokens(read_json(ours)), _tokens(read_json(theirs)))
    return "they have no tokenizer file in common"


def _tokens(vocabulary: dict[str, Any]) -> dict[int, Any]:
    """Return what each id stands for. Raises ModelError."""
    try:
        if "config" in vocabulary:  # tekken.json
            return {each["rank"]: each["token_bytes"] for each in vocabulary["vocab"]}
        tokens = vocabulary.get("model", {}).get("vocab", vocabulary)
        pairs = enumerate(each[0] for each in tokens) if isinstance(tokens, list) else None
        found = dict(pairs or ((number, text) for text, number in tokens.items()))
        return found | {each["id"]: each["content"] for each in vocabulary.get("added_tokens", ())}
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ModelError(f"the vocabulary of the draft model cannot be compared: {error!r}") from None


def _token_difference(ours: dict[int, Any], theirs: dict[int, Any]) -> str | None:
    common = ours.keys() & theirs.keys()
    if len(common) < max(len(ours), len(theirs)) * 0.99:
        return f"{len(ours)} and {len(theirs)} tokens"
    different = [number for number in common if ours[number] != theirs[number]]
    if not different:
        return None
    first = min(different)
    return f"{len(different)} tokens differ, id {first} is {ours[first]!r} and {theirs[first]!r}"


@dataclass(frozen=True, slots=True)
class RunnablePlan:
    """Fields of a plan that decide which kernels it needs."""

    dtype: str
    kv_dtype: str
    quant: str
    ranks: int = 1
    stages: int = 1
    is_stored: bool = False
    """True if the checkpoint holds weights of this format, which no option can change."""

    cpu_part: str = ""
    """Part of the model that only CPUs run, one step at a time (`ModelConfig.cpu_part`); empty: none."""

    is_bidirectional: bool = False
    """True for a model that keeps no keys and values: an encoder."""

    has_experts: bool = False
    has_host_experts: bool = False
    """True if the CPU computes the experts, beside a GPU."""
    has_latent: bool = False
    """True for attention over a compressed latent (MLA)."""
    is_plain: bool = True
    """True for a dense decoder of RMSNorms, gated MLPs and attention alone, which cannot read images."""
    draft_method: DraftMethod | None = None
    """Proposer of draft tokens that runs a model; None: there is none."""

    @classmethod
    def of(cls, plan: MemoryPlan, model: ModelConfig) -> "RunnablePlan":
        return cls(
            plan.dtype,
            plan.kv_dtype,
            plan.quant,
            plan.ranks,
            plan.pp,
            is_stored=model.quant is not None,
            cpu_part=_cpu_part(plan, model),
            is_bidirectional=model.is_bidirectional,
            has_experts=model.experts is not None,
            has_host_experts=plan.expert_bytes > 0,
            has_latent=model.latent is not None,
            is_plain=_is_plain(model),
            draft_method=plan.draft_method,
        )


def _cpu_part(plan: MemoryPlan, model: ModelConfig) -> str:
    """Return what only CPUs run of a model: sparse attention of a context that it selects whole is dense."""
    index = model.sparse_index
    return "" if index is not None and plan.context <= index.top else model.cpu_part


def _is_plain(model: ModelConfig) -> bool:
    others = model.experts, model.latent, model.recurrent, model.altup, model.encoder, model.vision
    gates = model.attention_gate or model.has_head_gate or model.activation == "xielu"
    norms = model.block in {"pre_norm", "post_norm", "sandwich"} and not model.norms_values
    norms = norms and not model.norms_embedding and not model.has_sub_norms
    return norms and not gates and not model.layer_sizes and all(other is None for other in others)


def kernel_site(budget: MemoryBudget, plan: MemoryPlan) -> KernelSite:
    """Return the device properties that select kernels for the ranks of a plan."""
    known = [budget.capabilities[gpu] for gpu in plan.gpus if gpu < len(budget.capabilities)]
    capability = min((each for each in known if each is not None), default=None)
    return KernelSite(device=budget.device, has_native=budget.native_kernels, capability=capability)


def require_runnable(plan: RunnablePlan, site: KernelSite, config: EngineConfig) -> None:
    """Raise DeviceError, with a remedy, if no kernels on this machine can run the plan."""
    if reason := why_unknown_kernels(site):
        raise DeviceError(reason)
    quant = QUANTS.get(plan.quant)
    if quant is not None and (reason := why_no_quant(quant, plan.dtype, plan.kv_dtype, site)):
        instead = (
            "take this model's bfloat16 checkpoint, with --quant int8 if it is too large"
            if plan.is_stored
            else "load with --quant none, or another checkpoint"
        )
        raise DeviceError(f"{reason}: {instead}")
    if plan.is_bidirectional and (plan.ranks > 1 or config.overlap):
        raise DeviceError(
            "models that attend in both directions run on one rank, one step at a time: load without --tp, "
            "--pp and --overlap"
        )
    if reason := why_no_kv_dtype(plan.kv_dtype, site):
        raise DeviceError(f"{reason}: use --kv-dtype int8, which is as small")
    invariant = is_row_invariant(plan.dtype, plan.kv_dtype, site, deterministic=config.deterministic)
    if config.deterministic and not invariant:
        raise not_deterministic(f"{site.device}, {plan.dtype}")
    if config.exact == "portable" and (reason := _why_not_portable(plan, site)):
        raise DeviceError(f"exact portable was requested, but {reason}")
    overlaps = config.overlaps_on(site.device)
    if plan.cpu_part and (overlaps or site.device == "cuda" or site.uses_triton):
        raise DeviceError(
            f"the {plan.cpu_part} of this model run on CPUs only, one step at a time: load with --device cpu "
            "and without --overlap"
        )
    _require_drafts(plan, config, site.device, overlaps=overlaps, row_invariant=invariant)


def not_deterministic(kernels: str) -> DeviceError:
    """Make the error of `deterministic` with kernels (where and in which dtype) that cannot keep it."""
    return DeviceError(
        f"deterministic was requested, but the kernels that run here ({kernels}) may compute a row "
        "differently in another batch. It needs the Triton kernels on a GPU, or the C++ kernels on a CPU, in "
        "bfloat16 or float32; see `llmbox doctor`"
    )


def _require_drafts(
    plan: RunnablePlan, config: EngineConfig, device: str, *, overlaps: bool, row_invariant: bool
) -> None:
    """Raise DeviceError if draft tokens, or what proposes them, were asked for and cannot be verified."""
    beside = plan.has_host_experts
    reason = why_no_drafts(plan.stages, overlaps=overlaps, row_invariant=row_invariant, host_experts=beside)
    if config.speculate == "on" and reason:
        raise DeviceError(f"speculate was requested, but {reason}: load with --speculate auto or off")
    wanted = ""
    if config.mtp == "on":
        wanted = "the MTP layer"
    elif config.draft_path is not None:
        wanted = "a draft model" if plan.draft_method in {None, "draft_model"} else "a draft head"
    if wanted and config.speculate == "off":
        raise DeviceError(f"{wanted} cannot be combined with --speculate off: leave one of them out")
    reason = why_no_draft_model(plan.draft_method, plan.ranks, device) or reason
    if wanted and reason:
        raise DeviceError(f"{wanted} was requested, but {reason}: load without --draft")


def why_no_draft_model(method: DraftMethod | None, ranks: int, device: str) -> str:
    """Return the reason why a draft model or head cannot run beside a model; empty if it can.

    A draft model runs on rank 0 alone. A head reads hidden states of layers that other ranks may have.
    """
    if ranks == 1 or (device == "cpu" and method == "draft_model"):
        return ""
    others = "lookups and draft models" if device == "cpu" else "lookups"
    return f"the model runs on {ranks} ranks, which verify drafts of {others} only"


def why_no_drafts(stages: int, *, overlaps: bool, row_invariant: bool, host_experts: bool = False) -> str:
    """Return the reason why an engine cannot verify drafts; empty if it can.

    `overlaps`: steps are launched before the results of earlier ones. `row_invariant`: see `Ops`.
    `host_experts`: the CPU computes the experts, beside a GPU.
    """
    if host_experts:
        return "the CPU computes the experts of every row, which makes rows of drafts dear"
    if overlaps and stages > 1:
        return "stages launch steps ahead, which do not know how many tokens a draft before them gives"
    if not row_invariant:
        return (
            "the kernels that run here may compute a row differently beside others, so that drafts could "
            "change tokens: GPUs need --deterministic; see `llmbox doctor`"
        )
    return ""


_PORTABLE_QUANTS = frozenset({"int8", "int8-g32", "int4", "int4-g128", "int4-mix"})
_PORTABLE_RANKS = (1, 2, 4)


def _why_not_portable(plan: RunnablePlan, site: KernelSite) -> str:
    """Return the reason why other machines or ranks may compute other bits, with a remedy; empty if none
    does.
    """
    tp = plan.ranks // plan.stages
    if site.uses_triton and site.device == "cpu":
        return _why_not_portable_triton(plan)
    if site.device != "cpu" or not site.has_native:
        return "it needs the C++ kernels on a CPU: load with --device cpu; see `llmbox doctor`"
    if plan.quant not in _PORTABLE_QUANTS:
        return f"weights are {plan.quant}, not integers of llmbox's own: load with --quant int8"
    if plan.kv_dtype != "int8":
        return f"keys and values are {plan.kv_dtype}: load with --kv-dtype int8"
    if plan.has_experts and plan.dtype != "bfloat16":
        return f"routers are {plan.dtype}: load with --dtype bfloat16"
    if plan.has_latent or plan.is_bidirectional or plan.cpu_part:
        return "not all operations of this model are integers: load without --exact"
    if tp not in _PORTABLE_RANKS:
        return f"--tp {tp} adds in another order: use --tp 1, 2 or 4, or --pp"
    if tp > 1 and plan.has_experts:
        return "ranks round the results of experts: load this mixture without --tp; --pp works"
    return ""


def _why_not_portable_triton(plan: RunnablePlan) -> str:
    """Do as `_why_not_portable` for Triton's interpreter."""
    rounded_alike = {"int8", "int8-g32"} | ({"int4", "int4-g128"} if plan.is_stored else set())
    if plan.quant not in rounded_alike:
        return (
            f"weights are {plan.quant}, which Triton's interpreter rounds otherwise or was not compared "
            "with: load with --quant int8, or an int4 folder of `llmbox quantize`"
        )
    if plan.kv_dtype != "int8":
        return f"keys and values are {plan.kv_dtype}: load with --kv-dtype int8"
    if plan.dtype == "float16":
        return "the C++ kernels have no float16: load with --dtype bfloat16"
    if not plan.is_plain:
        return "Triton's kernels have the same bits for dense decoders only: unset LLMBOX_KERNELS"
    return "" if plan.ranks == 1 else "Triton's interpreter was compared on one rank only: load without --tp"
