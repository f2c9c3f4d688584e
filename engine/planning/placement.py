"""Placement: parallel sizes of a model, the GPUs of its ranks, and experts in main memory beside one GPU.

A model that fits on one GPU goes to the first one with room: the others stay free for other models, and one
GPU needs no communication. A larger model is tensor-parallel over as few NVLink peers as it needs. GPUs that
are connected by PCIe get pipeline stages: a stage sends two rows of hidden states per token, while a
tensor-parallel layer has two all-reduces over its ranks. NVLink peers share a stage where there are some.

A mixture may have its experts in main memory, where the CPU computes them, and all else on one GPU.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, Literal, cast

from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.support import NATIVE_DTYPES

from ..config import EngineConfig, QuantChoice
from ..errors import DeviceError, DoesNotFit, EngineError, ParallelError
from ..hardware.machine import show_bytes
from ..model_config.parallel_layout import can_split, check_copies, check_layout
from ..model_config.shape import DTYPE_BYTES, ModelShape
from .memory_model import EXPERT_ROWS, weights_bytes
from .memory_plan import MemoryBudget, MemoryPlan, resolve_dtypes

_MOST_MIXED: Final = 8
"""Maximum number of GPUs for which every subset is tried."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Parallel sizes and the GPUs of the ranks."""

    tp: int = 1
    pp: int = 1
    gpus: tuple[int, ...] = ()
    """GPU of each rank; empty on a CPU."""
    reason: str = ""
    """Explanation for the user; empty where there was no choice."""

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


def candidate_placements(
    shape: ModelShape,
    nvlink: tuple[frozenset[int], ...],
    num_gpus: int,
    config: EngineConfig,
    device: Literal["cpu", "cuda"],
) -> Iterator[Placement]:
    """Yield placements to try, best first; those of the same sizes on other GPUs follow each other. Sizes and
    GPUs that `config` sets are the only ones. Raises ParallelError if they are not possible.
    """
    placements = _all_placements(shape, nvlink, num_gpus, config, device)
    if config.gpus is None or device == "cpu":
        yield from placements
        return
    here = [cut for cut in placements if set(cut.gpus) == set(config.gpus)]
    if not here:
        raise ParallelError(
            f"GPUs {_format_gpus(tuple(config.gpus))} were chosen, but the number of visible GPUs is "
            f"{num_gpus}"
        )
    yield from here


def _all_placements(
    shape: ModelShape,
    nvlink: tuple[frozenset[int], ...],
    num_gpus: int,
    config: EngineConfig,
    device: Literal["cpu", "cuda"],
) -> Iterator[Placement]:
    if config.tp is not None or config.pp is not None or asks_for_experts(config) or device == "cpu":
        yield from _requested_placements(shape, nvlink, num_gpus, config, device)
        return
    quant = QUANTS.get(config.quant)
    for gpu in range(num_gpus):  # other models may have filled the first ones
        where = f"on GPU {gpu}, " if gpu else "on "
        yield Placement(
            gpus=(gpu,), reason=f"{where}one of {num_gpus} GPUs: the rest is for others" * (num_gpus > 1)
        )
    for size in range(2, max(map(len, nvlink), default=1) + 1):
        if can_split(shape, size, 1, quant):
            for gpus in _peers(nvlink, size):
                yield Placement(
                    size, 1, gpus, f"shared by {size} GPUs, which are NVLink peers: {_format_gpus(gpus)}"
                )
    for size in range(2, num_gpus + 1):
        for tp in range(size // 2, 1, -1):
            if size % tp == 0 and can_split(shape, tp, size // tp, quant):
                text = f"{_format_sizes(tp, size // tp)} that are NVLink peers"
                for gpus in _stages_of_peers(nvlink, tp, size // tp):
                    yield Placement(tp, size // tp, gpus, f"{text}, on GPUs {_format_gpus(gpus)}")
        if can_split(shape, 1, size, quant):
            for gpus in _sets(range(num_gpus), size):
                why = "NVLink does not join enough of them" if nvlink else "they are joined by PCIe"
                text = f"cut into {size} stages, on GPUs {_format_gpus(gpus)}: {why}"
                yield Placement(1, size, gpus, text)


def asks_for_experts(config: EngineConfig) -> bool:
    return config.expert_parallel or config.redundant_experts > 0


def _requested_placements(
    shape: ModelShape,
    nvlink: tuple[frozenset[int], ...],
    num_gpus: int,
    config: EngineConfig,
    device: Literal["cpu", "cuda"],
) -> Iterator[Placement]:
    tp, pp = config.tp or 1, config.pp or 1
    whole, copies = config.expert_parallel, config.redundant_experts
    check_layout(shape, tp, pp, QUANTS.get(config.quant), expert_parallel=whole)
    if copies:
        check_copies(shape, tp, pp, copies, device, expert_parallel=whole)
    experts = f", experts whole{f' and {copies} copies of hot ones' * bool(copies)}" if whole else ""
    asked = f"{_format_sizes(tp, pp)}{experts}, as asked" if tp * pp > 1 else ""
    if device == "cpu":
        yield Placement(tp, pp, reason=asked)
        return
    if tp * pp > num_gpus:
        raise ParallelError(
            f"--tp {tp} and --pp {pp} need {tp * pp} GPUs, but {num_gpus} are visible: ask for fewer, or "
            "check CUDA_VISIBLE_DEVICES"
        )
    peers = _stages_of_peers(nvlink, tp, pp) if tp > 1 else []
    for gpus in peers or _sets(range(num_gpus), tp * pp):
        if not asked:
            yield Placement(gpus=gpus)
            continue
        slow = tp > 1 and not peers
        remark = ", which are not NVLink peers: sums go over PCIe, --pp may be faster" if slow else ""
        yield Placement(tp, pp, gpus, f"{asked}, on GPUs {_format_gpus(gpus)}{remark}")


def _format_sizes(tp: int, pp: int) -> str:
    if pp == 1:
        return f"every layer shared by {tp} ranks"
    return f"cut into {pp} stages" + (f" of {tp} ranks" if tp > 1 else "")


def describe_interconnect(nvlink: tuple[frozenset[int], ...], num_gpus: int) -> str:
    """Describe the interconnect of the GPUs, and how a model that needs several is split, for the user."""
    if not nvlink:
        return f"{num_gpus} GPUs without NVLink: a model that needs several is cut into stages (--pp)"
    sets = " and of ".join(_format_gpus(tuple(sorted(island))) for island in nvlink)
    return f"NVLink peers are GPUs {sets}: a model that needs several is shared by peers (--tp)"


def are_nvlink_peers(gpus: Sequence[int], nvlink: tuple[frozenset[int], ...]) -> bool:
    """Return True if all of them are NVLink peers."""
    return any(set(gpus) <= island for island in nvlink)


def _consecutive(gpus: Iterable[int], size: int) -> list[tuple[int, ...]]:
    """Return consecutive, disjoint runs of `size` GPUs; the last one overlaps if `size` does not divide."""
    each = tuple(gpus)
    if len(each) < size:
        return []
    starts = [*range(0, len(each) - size + 1, size)]
    if starts[-1] != len(each) - size:
        starts.append(len(each) - size)
    return [each[start : start + size] for start in starts]


def _sets(gpus: Iterable[int], size: int) -> list[tuple[int, ...]]:
    """Return sets of `size` GPUs: consecutive ones first, then all others, because unloaded models leave free
    GPUs anywhere.
    """
    each = tuple(gpus)
    runs = _consecutive(each, size)
    if len(each) > _MOST_MIXED:
        return runs
    return [*runs, *(some for some in combinations(each, size) if some not in runs)]


def _peers(nvlink: tuple[frozenset[int], ...], size: int) -> list[tuple[int, ...]]:
    """Return sets of `size` NVLink peers, those of the smallest islands first."""
    return [gpus for island in sorted(nvlink, key=len) for gpus in _sets(sorted(island), size)]


def _stages_of_peers(nvlink: tuple[frozenset[int], ...], tp: int, pp: int) -> list[tuple[int, ...]]:
    """Return GPUs for `pp` stages of `tp` peers each, in rank order; empty if there are too few peers."""
    if pp == 1:
        return _peers(nvlink, tp)
    islands = [sorted(island) for island in sorted(nvlink, key=min)]
    stages = [island[i : i + tp] for island in islands for i in range(0, len(island) - tp + 1, tp)]
    places = _consecutive(range(len(stages)), pp)
    return [tuple(gpu for stage in run for gpu in stages[stage]) for run in places]


def _format_gpus(gpus: tuple[int, ...]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, gpus[:-1])), str(gpus[-1])]))


# ---------------------------------------------------------------------------- experts in main memory

HOST_MOST = 0.8
"""Fraction of the free main memory that a model on a GPU may take."""
_AUTO: tuple[QuantChoice, ...] = ("none", "int8", "int4")


def why_no_host_experts(shape: ModelShape, budget: MemoryBudget, config: EngineConfig) -> EngineError | None:
    """Return the error of a request for experts in main memory that cannot be followed; None: it can be."""
    ask = "--cpu-experts on was asked for, but "
    if shape.experts is None:
        return DeviceError(f"{ask}this model has no experts: load it without --cpu-experts")
    if budget.device == "cpu":
        return DeviceError(
            f"{ask}the model runs on the CPU, and its experts too: load it without --cpu-experts"
        )
    if (config.tp or 1) * (config.pp or 1) > 1 or asks_for_experts(config):
        return ParallelError(
            f"{ask}experts in main memory are for a model on one GPU: load it without --tp, --pp and "
            "--expert-parallel, or with --cpu-experts off"
        )
    if config.gpus is not None and len(config.gpus) > 1:
        return ParallelError(f"{ask}the model was given {len(config.gpus)} GPUs: choose one")
    if config.draft_path is not None or config.mtp == "on":
        return DeviceError(
            f"{ask}drafts cannot be combined with experts in main memory: load it without --draft, or with "
            "--cpu-experts off"
        )
    if not budget.host_native:
        return DeviceError(
            f"{ask}the CPU computes experts with the C++ kernels, and there is no compiler for them: see "
            "`llmbox doctor`"
        )
    if config.dtype == "float16":
        return DeviceError(f"{ask}the CPU computes experts in bfloat16 or float32: use --dtype bfloat16")
    return None


@dataclass(frozen=True, slots=True)
class HostPart:
    """Experts of a model in main memory."""

    quant: QuantChoice
    nbytes: int
    """Bytes of their weights."""


def device_options(shape: ModelShape, config: EngineConfig) -> EngineConfig:
    """Return the options of the part on the GPU: no graphs, as a step waits for the host, and no drafts."""
    options = replace(config, cuda_graphs=False, mtp="off")
    dtype, _ = resolve_dtypes(shape, "cuda", config, native_kernels=False)
    return options if dtype in NATIVE_DTYPES else replace(options, dtype="bfloat16")


def add_host_experts(
    plan: MemoryPlan, whole: ModelShape, budget: MemoryBudget, config: EngineConfig
) -> MemoryPlan:
    """Return the plan of the part on a GPU with the experts of `whole`, the shape as the checkpoint stores
    it, in main memory. Raises DoesNotFit and DeviceError.
    """
    experts = whole.experts
    assert experts is not None
    have = int(HOST_MOST * budget.host_available)
    workspace = _workspace(plan, whole)
    parts = list(_formats(whole, plan.dtype, config))
    part = next((each for each in parts if each.nbytes + workspace <= have), None)
    if part is None:
        need, form = parts[-1].nbytes + workspace, _show_format(parts[-1].quant, plan.dtype)
        remedy = "more main memory is needed"
        if parts[-1].quant == "none":
            remedy = f"--quant {'auto' if whole.quant else 'int8 or int4'} takes less"
        raise DoesNotFit(
            f"experts in main memory need {show_bytes(need, up=True)} as {form} and have {show_bytes(have)}, "
            f"{HOST_MOST:.0%} of what is free: {remedy}"
        )
    note = (
        f"experts are in main memory, where the CPU computes them: {show_bytes(part.nbytes)} as "
        f"{_show_format(part.quant, plan.dtype)}; all else is on the GPU, and CUDA graphs are off"
    )
    return replace(
        plan,
        expert_bytes=part.nbytes + workspace,
        expert_quant=part.quant,
        notes=(*plan.notes, note),
    )


def _formats(whole: ModelShape, dtype: str, config: EngineConfig) -> Iterator[HostPart]:
    """Yield the formats to try: the checkpoint's own where the C++ kernels have it, or what was asked for."""
    stored = whole.quant
    keeps_blocks = whole.blocks is None or config.quant in {"none", "auto", "gguf"}
    if stored is not None and QUANTS[stored].on_cpu and keeps_blocks:
        tries: tuple[str, ...] = (stored,)
    else:
        whole = replace(whole, quant=None, blocks=None, wide_params=0)
        tries = _AUTO if config.quant == "auto" else (config.quant if config.quant != stored else "none",)
    for name in tries:
        quant = QUANTS.get(name)
        if quant is not None and not quant.on_cpu:
            raise DeviceError(
                f"experts in main memory cannot be {name}, which runs on GPUs only: load with --quant "
                "int8 or int4, or with --cpu-experts off"
            )
        nbytes = weights_bytes(whole, dtype, quant) - weights_bytes(whole.without_routed(), dtype, quant)
        yield HostPart(cast("QuantChoice", name), nbytes)


def _show_format(quant: str, dtype: str) -> str:
    return dtype if quant == "none" else quant


def _workspace(plan: MemoryPlan, whole: ModelShape) -> int:
    """Return the bytes of rows, logits and results on their way (float32 logits), and of the copies of rows
    that the C++ kernels make: see `Workspace`.
    """
    experts = whole.experts
    assert experts is not None
    size, rows, width = DTYPE_BYTES[plan.dtype], plan.step_tokens, experts.latent or whole.hidden
    copies = rows * experts.per_token + EXPERT_ROWS * experts.count
    results = rows * experts.per_token * width if experts.shared else 0
    moved = rows * (4 * width * size + 4 * (experts.count + 1))
    return moved + (results + copies * (2 * width + 3 * experts.inner)) * size
