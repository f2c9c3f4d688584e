"""Planner of one rank: decides everything that its configuration leaves open."""

from dataclasses import replace
from functools import partial

from llmbox.kernels.cpu.isa import kv_width
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.support import WINDOW_MARGIN

from ..config import DRAFT_MODEL_ROWS, EngineConfig
from ..core.kv_cache.state_manager import pool_blocks
from ..core.step import ceil_div
from ..errors import DoesNotFit
from ..hardware.machine import show_bytes
from ..kv_store.block_file import segment_bytes
from ..kv_store.store_threads import BUFFER_BYTES
from ..model_config.shape import DTYPE_BYTES, ModelShape
from .disaggregation import PREFILL_RUNNING
from .memory_model import MOST_DRAFT_ROWS, Workspace, adapter_scratch, capture_sizes, weights_bytes
from .memory_plan import DraftModelSizes, MemoryBudget, MemoryPlan, resolve_dtypes

_SMALLEST_CONTEXT = 256
# An automatic context below this is useless; the model is reported as not fitting instead.
_CPU_SHARE, _CPU_MOST, _CUDA_SHARE = 0.5, 0.8, 0.85
# Fractions of the available memory, if no budget is set: a desktop runs other programs too. A model that
# would not reach a context of _COMFORTABLE_CONTEXT within _CPU_SHARE gets more, up to _CPU_MOST.
_COMFORTABLE_CONTEXT = 4096
_POOLS_PER_BUFFER = 8
# Share of the KV pool that buffers take at most, inverted.
_POOL_BYTES, _POOL_CONTEXTS = 512 << 20, 8
# Default KV pool on a CPU; see `Planner._default_pool`.
_KEPT_STATES, _MOST_KEPT_STATES, _KEPT_SHARE = 24, 4096, 0.05
# Slots of recurrent state for the prefix cache and for drafts, beside one for each running request: at least
# the first number, and more where they take at most that share of the KV cache.
_LEAST_SLOTS = 2
PREFILL_SLOTS = PREFILL_RUNNING + _KEPT_STATES
_STATES_SHARE = 0.5
# Fraction of the memory beside one whole context that recurrent state may take.


class Planner:
    """Computes the memory plan of one rank."""

    def __init__(
        self,
        shape: ModelShape,
        budget: MemoryBudget,
        config: EngineConfig,
        stages: int,
        ranks: int = 1,
        draft: DraftModelSizes | None = None,
    ) -> None:
        """`stages`: pipeline-parallel size. `ranks`: number of ranks in the memory of `budget`, this one
        included. `draft`: draft model or head, which shares the block tables.
        """
        self.shape, self.budget, self.config = shape, budget, config
        self.stages, self.ranks = stages, ranks
        self.dtype, self.kv_dtype = resolve_dtypes(
            shape, budget.device, config, native_kernels=budget.native_kernels
        )
        self.weights = weights_bytes(shape, self.dtype, QUANTS.get(config.quant))
        self.max_running = config.max_running or budget.default_max_running(shape, config)
        self.token_budget = config.token_budget or budget.default_token_budget(shape, self.max_running)
        self.window = self._bounded_window()
        sliding = shape.sliding if self.window else None
        kv_bytes = partial(shape.kv_bytes_per_token, self.kv_dtype, self._stored_width)
        self.kv_bytes_per_token = kv_bytes("all" if sliding is None else "full")
        if shape.latent is not None and not self._is_native:  # values are a part of the keys
            self.kv_bytes_per_token //= 2
        self.draft = draft
        self.notes: list[str] = []
        if draft is not None:
            self._add_draft(draft)
        self.block_bytes = config.block_size * self.kv_bytes_per_token
        self.window_bytes_per_token = 0 if sliding is None else kv_bytes("sliding")
        self.wanted_slots = self.max_running + _KEPT_STATES if shape.slot_bytes else 0
        self.least_slots = min(_LEAST_SLOTS, self.wanted_slots)

    def _add_draft(self, draft: DraftModelSizes) -> None:
        """Count the weights and the KV cache of the draft model. Of ranks in one memory the first has it."""
        weights = weights_bytes(draft.shape, self.dtype, QUANTS.get(draft.quant))
        kv = draft.shape.kv_bytes_per_token(self.kv_dtype, self._stored_width)
        self.weights += ceil_div(weights, self.ranks)
        self.kv_bytes_per_token += ceil_div(kv, self.ranks)
        self.notes.append(
            f"{draft.name}: {show_bytes(weights)} of the weights and {kv:,} bytes of the KV cache per "
            "token are its own"
        )

    def plan(self) -> MemoryPlan:
        """Return the plan, with a lowered context if none was requested. Raises `DoesNotFit`."""
        limit, have = self._wanted_context(), self._usable()
        context = self._choose_context(limit, have)
        prefill = self._prefill_bytes(context)
        have -= prefill
        spare = have - self._own_need(context)
        slots = self._slots(spare, context)
        window_blocks = self._shared_window_blocks(spare - (slots - self.least_slots) * self.shape.slot_bytes)
        workspace = self._workspace(context)
        beside = slots * self.shape.slot_bytes + self._window_bytes(window_blocks)
        wanted = self._pool_blocks(context)
        room = wanted
        if self.block_bytes:
            room = (have - self.weights - workspace - beside) // self.block_bytes
        if wanted < min(room, self.max_running * self._blocks(context)) and self.config.kv_tokens is None:
            self.notes.append(
                f"the KV cache holds {wanted / self._blocks(context):.1f} whole contexts: by default at most "
                "512 MiB, or as much as the weights if these are more, and one context in any case; more "
                "with --memory or --max-running"
            )
        blocks = self.config.shrink_pool(min(room, wanted), self._blocks(context))
        spare = have - self.weights - workspace - beside - blocks * self.block_bytes
        return MemoryPlan(
            device=self.budget.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            quant=self.config.quant,
            weights_bytes=self.weights,
            workspace_bytes=workspace,
            kv_bytes_per_token=self.kv_bytes_per_token,
            block_size=self.config.block_size,
            num_blocks=blocks,
            buffer_bytes=self._buffers(spare, blocks * self.block_bytes),
            prefill_bytes=prefill,
            budget_bytes=have + prefill,
            context=context,
            max_running=self.max_running,
            token_budget=self.token_budget,
            mixed_budget=self.budget.default_mixed_budget(self.shape, self.config, self.max_running),
            window=self.window,
            window_blocks=window_blocks,
            window_bytes_per_token=self.window_bytes_per_token,
            least_window_blocks=self._window_blocks(1),
            state_slots=slots,
            slot_bytes=self.shape.slot_bytes,
            notes=tuple(self.notes),
            is_lowered=context < limit,
            draft_quant="none" if self.draft is None else self.draft.quant,
            draft_method=None if self.draft is None else self.draft.method,
        )

    def _choose_context(self, limit: int, have: int) -> int:
        """Return the requested context, or as much of `limit` as fits if none was requested."""
        if self._need(limit) <= have:
            return limit
        if self.config.context is not None:
            raise DoesNotFit(self._refusal(limit, have))
        context = self._largest_context(limit, have)
        if context < min(limit, _SMALLEST_CONTEXT):
            raise DoesNotFit(self._refusal(min(limit, _SMALLEST_CONTEXT), have))
        self.notes.append(f"context lowered from {limit} to {context} tokens to fit in {show_bytes(have)}")
        return context

    def _stored_width(self, head_dim: int) -> int:
        return kv_width(head_dim, self.kv_dtype, self.budget.level) if self._is_native else head_dim

    def _bounded_window(self) -> int:
        """Return the tokens behind which blocks of sliding-window layers are freed; 0: they keep all blocks,
        as prompts that are computed at once need.
        """
        sliding, config = self.shape.sliding, self.config
        if sliding is None or self.shape.is_bidirectional or config.batching == "static":
            return 0
        window = sliding.window + WINDOW_MARGIN
        is_bounded = config.chunked_prefill and window + self.token_budget < self._wanted_context()
        return window if is_bounded else 0

    def _window_blocks(self, running: int) -> int:
        if not self.window:
            return 0
        step = max(self.token_budget, self.max_running) + self._image_rows
        return pool_blocks(self.window, self.config.block_size, running, step)

    def _window_bytes(self, blocks: int) -> int:
        return blocks * self.config.block_size * self.window_bytes_per_token

    def _shared_window_blocks(self, spare: int) -> int:
        """Return the blocks of sliding-window layers. Lowers `max_running` where `spare` bytes are too few
        for the windows of all.
        """
        if not self.window:
            return 0
        least, running = self._window_bytes(self._window_blocks(1)), self.max_running
        most = least + spare * _STATES_SHARE
        while running > 1 and self._window_bytes(self._window_blocks(running)) > most:
            running -= 1
        each = self._window_bytes(self._window_blocks(2)) - least
        if running < self.max_running:
            self.notes.append(
                f"{running} requests run at once, not {self.max_running}: the sliding windows of each take "
                f"{show_bytes(each)}"
            )
            self.max_running = running
        self.notes.append(
            f"sliding-window layers keep {self.window} tokens of a request: {show_bytes(each)} each"
        )
        return self._window_blocks(running)

    def _buffers(self, spare: int, pool: int) -> int:
        """Return the bytes of `spare` for blocks on their way between a `pool` of so many bytes and the disk.
        On a GPU they are in main memory. A prefill engine leaves the disk to its decode engine.
        """
        if (
            self.config.prefill_role is not None
            or not self.config.prefix_cache
            or self.shape.is_bidirectional
            or self.budget.device == "cuda"
        ):
            return 0
        return max(0, min(2 * BUFFER_BYTES // self.ranks, pool // _POOLS_PER_BUFFER, spare))

    def _slots(self, spare: int, context: int) -> int:
        """Return the slots of recurrent state, of which `spare` bytes may hold more than the fewest. Lowers
        `max_running` where there are too few.
        """
        if not self.wanted_slots:
            return 0
        more = int(spare * _STATES_SHARE) // self.shape.slot_bytes
        kept = int(self._pool_blocks(context) * self.block_bytes * _KEPT_SHARE) // self.shape.slot_bytes
        wanted = self.wanted_slots + max(0, min(kept, _MOST_KEPT_STATES) - _KEPT_STATES)
        slots = min(wanted, self.least_slots + more)
        each = show_bytes(self.shape.slot_bytes)
        if slots <= self.max_running:
            self.notes.append(
                f"{slots - 1} requests run at once, not {self.max_running}: the recurrent state of each "
                f"takes {each}"
            )
            self.max_running = slots - 1
        self.notes.append(
            f"recurrent state: {slots} slots of {each}, for running requests, known prefixes and drafts"
        )
        return slots

    def _wanted_context(self) -> int:
        limit, asked = self.shape.context_limit, self.config.context
        if asked is not None and asked > limit:
            raise DoesNotFit(
                f"context of {asked} tokens requested, but the model's limit is {limit}: request at most that"
            )
        pool = self.config.kv_tokens
        if asked is not None and pool is not None and asked > pool:
            raise DoesNotFit(
                f"context of {asked} tokens requested, but the KV cache holds {pool} tokens: request at most "
                "that"
            )
        return min(asked or limit, pool or limit)

    def _usable(self) -> int:
        asked, available = self.config.memory_bytes, self.budget.available
        if asked is None:
            return self._automatic_budget()
        if asked > available:
            self.notes.append(
                f"memory budget lowered from {show_bytes(asked)} to the available {show_bytes(available)}"
            )
        return min(asked, available)

    def _automatic_budget(self) -> int:
        available = self.budget.available
        if self.budget.device == "cuda":
            return int(available * _CUDA_SHARE)
        comfortable = self._need(min(self._wanted_context(), _COMFORTABLE_CONTEXT))
        return max(int(available * _CPU_SHARE), min(comfortable, int(available * _CPU_MOST)))

    def _pool_blocks(self, context: int) -> int:
        """Return the wanted number of blocks: the requested one, or the default, at most `max_running` full
        contexts.
        """
        if self.config.kv_tokens is not None:
            return self._blocks(self.config.kv_tokens)
        return min(self.max_running * self._blocks(context), self._default_pool(context))

    def _default_pool(self, context: int) -> int:
        """Return the maximum blocks of a pool without a requested size.

        A GPU only serves models, so the pool takes what the budget leaves. Main memory is shared with other
        programs: the pool takes _POOL_BYTES, or as much as the weights up to _POOL_CONTEXTS whole contexts,
        and one whole context in any case.
        """
        config, one = self.config, self._blocks(context)
        if not self.block_bytes:  # blocks without keys and values only count tokens
            return self.max_running * one
        asked = config.memory_bytes is not None and not config.memory_is_limit
        if self.budget.device == "cuda" or asked or config.max_running is not None:
            return self.max_running * one
        by_weights = min(_POOL_CONTEXTS * one, self.weights // self.block_bytes)
        return max(one, _POOL_BYTES // self.ranks // self.block_bytes, by_weights)

    def _blocks(self, context: int) -> int:
        return -(-context // self.config.block_size)

    @property
    def _image_rows(self) -> int:
        """Rows that a step may have beyond its budget."""
        return 0 if self.shape.vision is None else self.shape.vision.whole_rows

    def _workspace(self, context: int) -> int:
        rows = ceil_div(max(self.token_budget, self.max_running), self.stages)
        is_whole = self.shape.is_bidirectional or not self.config.chunked_prefill
        rows += context if is_whole else self._image_rows
        is_native = self._is_native and not self.shape.is_bidirectional
        threads = self.config.threads or self.budget.cores if is_native else None
        workspace = Workspace(self.budget.device, self.dtype, context, self.max_running, threads)
        drafting = adapters = 0
        if self.draft is not None:  # a draft head shares the model's vocabulary, and keeps rows of the step
            vocab = max(self.draft.shape.vocab, self.shape.vocab)
            own, graphs = replace(self.draft.shape, vocab=vocab), self._graphs() * self.draft.has_layers
            is_whole = self.budget.device == "cuda" and self.draft.features > 0  # a head takes a whole step
            own_rows = rows if is_whole else DRAFT_MODEL_ROWS
            drafting = workspace.peak_bytes(own, own_rows, graphs=graphs, is_alone=False)
            drafting += 2 * rows * self.draft.features * DTYPE_BYTES[self.dtype]
            drafting = ceil_div(drafting, self.ranks)
        if self.config.plans_adapters:
            experts = self.shape.experts.per_token if self.shape.experts else 1
            adapters = self.config.lora_bytes + adapter_scratch(self.budget.device, rows, experts)
        return drafting + adapters + workspace.peak_bytes(self.shape, rows, graphs=self._graphs())

    def _graphs(self) -> int:
        """Return the maximum number of CUDA graphs to reserve memory for. Steps with adapters have others."""
        config, on_cpu = self.config, self.budget.device == "cpu"
        if on_cpu or not config.cuda_graphs or config.overlap is False or self.shape.is_bidirectional:
            return 0
        drafts = MOST_DRAFT_ROWS * (config.deterministic and config.speculate != "off" and self.stages == 1)
        sizes = capture_sizes(max(ceil_div(self.max_running, self.stages), drafts))
        return (1 + config.plans_adapters) * len(sizes)

    @property
    def _is_native(self) -> bool:
        """True if the C++ kernels compute attention; they do not support float16."""
        return self.budget.native_kernels and self.dtype != "float16"

    def _need(self, context: int) -> int:
        """Return the bytes needed to serve one request of this context."""
        return self._own_need(context) + self._prefill_bytes(context)

    def _prefill_bytes(self, context: int) -> int:
        """Return the bytes of a prefill engine that has room for one whole context, and of the segment.

        Both engines map one copy of the weights where the file system has them in large pages, and each has
        its own elsewhere: they count twice.
        """
        if self.config.disaggregate is None:
            return 0
        largest = max(self.block_bytes, self.config.block_size * self.window_bytes_per_token)
        slots = min(self.wanted_slots, PREFILL_SLOTS) * self.shape.slot_bytes
        windows = self._window_bytes(self._window_blocks(PREFILL_RUNNING))
        beside = slots + windows + segment_bytes(max(largest, self.shape.slot_bytes))
        return self.weights + self._workspace(context) + beside + self._blocks(context) * self.block_bytes

    def _own_need(self, context: int) -> int:
        beside = self.least_slots * self.shape.slot_bytes + self._window_bytes(self._window_blocks(1))
        return self.weights + self._workspace(context) + beside + self._blocks(context) * self.block_bytes

    def _largest_context(self, limit: int, have: int) -> int:
        """Return the largest context that fits, in whole blocks; 0 if none. The need grows with the context,
        so bisection finds it.
        """
        low, high = 0, limit // self.config.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self._need(middle * self.config.block_size) <= have:
                low = middle
            else:
                high = middle - 1
        return low * self.config.block_size

    def _refusal(self, context: int, have: int) -> str:
        need = self._need(context)
        kv = self._blocks(context) * self.block_bytes + self._window_bytes(self._window_blocks(1))
        return (
            f"the model needs {show_bytes(need)} and has {show_bytes(have)} "
            f"(weights {show_bytes(self.weights)} in {self.dtype}, "
            f"workspace {show_bytes(self._workspace(context))}, "
            f"{self._show_states()}"
            f"KV {show_bytes(kv)} for a context of {context} tokens); {self._remedy(need, context, have)}"
        )

    def _show_states(self) -> str:
        states = self.least_slots * self.shape.slot_bytes
        return f"recurrent state {show_bytes(states)}, " if states else ""

    def _remedy(self, need: int, context: int, have: int) -> str:
        smaller = self._largest_context(context, have)
        if smaller >= min(context, _SMALLEST_CONTEXT):
            return f"a context of {smaller} tokens would fit"
        if need <= self.budget.available:
            where = "GPU memory" if self.budget.device == "cuda" else "memory"
            return (
                f"it would fit with a {where} budget of {show_bytes(need, up=True)}: "
                f"{show_bytes(self.budget.available)} are available"
            )
        if DTYPE_BYTES[self.dtype] > 2 and need - self.weights // 2 <= self.budget.available:
            return "bfloat16 weights would fit"
        return "a smaller model, or a machine with more memory, is needed"
