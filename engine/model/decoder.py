"""Decoder-only transformer that all architectures share: embedding, layers, final norm, head.

T rows of the step, R rows whose logits are wanted, E hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from llmbox.kernels.lora import AdaptedRows
from llmbox.kernels.op_types import BatchLayout
from llmbox.kernels.ops import Ops, PackedLinear

from ..model_config.architecture import BIASED_NORMS
from ..model_config.config import ModelConfig
from ..weights.adapters import AdapterLayers
from ..weights.source import Weights, WeightSource, norm_bias, norm_weight
from .blocks import DecoderBlock
from .forward_context import ForwardContext
from .gemma import AltUpStreams, OwnEmbeddings
from .latent import KeySelection, LatentAttention


class TokenEmbedding:
    """Token embedding. With tensor parallelism each rank has a slice of the vocabulary: rows of ids outside
    it are zeros, and an all-reduce adds up the ranks' rows.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        self.ops = ops
        self.rank = weights.rank
        self.part = self.rank.layout.vocabulary(config.vocab_size)
        self._outside_T1: Tensor | None = None
        self._scale = config.scales.embedding
        if config.scales.rounds_embedding:
            self._scale = float(torch.tensor(self._scale, dtype=weights.dtype))
        self.packed = weights.embedding(
            "model.embed_tokens",
            self.part,
            config.hidden_size,
            tied=config.tie_word_embeddings and not config.is_bidirectional,
        )
        self.positions_PE: Tensor | None = None
        """Table of learned positions, where the first stage has one."""
        self._positions_T: Tensor | None = None
        if config.position_rows and self.rank.layout.is_first:
            shape = config.position_rows, config.hidden_size
            table_PE = weights.floats("model.embed_positions.weight", *shape).to(weights.dtype)
            # The first rows of OPT's table stand for padding.
            self.positions_PE = table_PE[-config.max_position_embeddings :]

    def place(self, layout: BatchLayout | None) -> None:
        """Take the positions of the rows that are looked up next."""
        if self.positions_PE is not None:
            assert layout is not None
            self._positions_T = layout.positions_T

    def localize_ids(self, forward: ForwardContext) -> ForwardContext:
        """Map token ids to rows of this rank's slice; ids outside it are clamped and masked later."""
        self.place(forward.layout)
        if self.part.is_whole:
            return forward
        local_T = forward.ids_T - self.part.start
        held = self.part.stop - self.part.start
        self._outside_T1 = ((local_T < 0) | (local_T >= held)).unsqueeze(1)
        return replace(forward, ids_T=local_T.clamp_(0, held - 1))

    def __call__(self, ids_T: Tensor) -> Tensor:
        x_TE = self.complete(self.ops.embedding(self.packed, ids_T, self._scale))
        if self.positions_PE is not None:
            self.ops.host_callback(self._add_positions, (x_TE,))
        return x_TE

    def _add_positions(self, x_TE: Tensor) -> None:
        assert self.positions_PE is not None
        assert self._positions_T is not None
        x_TE.add_(self.positions_PE[self._positions_T.long()])

    def complete(self, x_TE: Tensor) -> Tensor:
        """Add up the ranks' rows of a table that is sliced as this one."""
        if not self.part.is_whole:
            self.ops.host_callback(self._complete, (x_TE,))
        return x_TE

    def _complete(self, x_TE: Tensor) -> None:
        assert self._outside_T1 is not None
        x_TE.masked_fill_(self._outside_T1, 0)
        self.rank.communicator.all_reduce(x_TE)


MakeLayer = Callable[[int, Weights], DecoderBlock]
"""Builds a layer from its index and its weights."""


class Decoder:
    """This rank's shard of the model: the layers of its pipeline stage, their tensor-parallel slices.

    The constructor reads every tensor of the shard from `source`. It raises ModelError for a missing or
    unused one.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        make_layer: MakeLayer,
        mixed_layers: int = 0,
        adapters: AdapterLayers | None = None,
    ) -> None:
        """`adapters`: those of `source`, where the kernels can apply some."""
        self.config = config
        self.dtype = source.dtype
        self.ops = ops = source.ops if adapters is None else adapters.ops
        self.rank = source.rank
        layout = source.rank.layout
        weights = Weights(source, names=config.names, mixed_layers=mixed_layers, adapters=adapters)
        self.is_first = layout.is_first
        self.is_last = layout.is_last
        self._skip_what_others_have(weights)
        self.embedding = TokenEmbedding(config, weights, ops) if self._has_table else None
        self.own = None
        if config.per_layer_width:
            assert self.embedding is not None
            self.own = OwnEmbeddings(config, weights, ops, self.embedding.part)
        self.altup = None if config.altup is None else AltUpStreams(config, weights, ops)
        here = layout.layers(config.num_layers)
        self._first_layer = here.start
        self.layers = [make_layer(i, weights.at(f"model.layers.{i}")) for i in here]
        self.selection = self._share_selection()
        self.norm_E, self.head = self._norm_and_head(weights)
        self._norm = ops.before(self.head).add_rms_norm
        if config.block == "parallel" or config.block in BIASED_NORMS:
            self._norm = partial(ops.layer_norm, bias_E=self._norm_bias(weights))
        source.finish()
        self.mixtures = weights.mixtures
        self.times_head = False
        """Run the head by itself, so that it can be timed apart from the layers."""
        self.clamps_ids = False
        """Read the last row of the table for ids beyond it, as texts of a draft model's target may have."""
        self._tapped: tuple[int, ...] = ()
        self._taps: dict[int, list[Tensor]] = {}
        self._run_layers = self._layers if config.is_bidirectional else ops.graph(self._layers)
        self._run_scored = {best: ops.graph(partial(self._scored, with_best=best)) for best in (False, True)}
        self.adapters = adapters
        self._run_adapted = ops.graph(self._layers)
        """Layers of a step in which rows have an adapter: captured as a separate graph."""

    @property
    def _has_table(self) -> bool:
        return self.is_first or (self.is_last and self.config.tie_word_embeddings)

    def _share_selection(self) -> KeySelection | None:
        """Give the layers of sparse attention one selection of keys; None: there are none."""
        if (index := self.config.sparse_index) is None:
            return None
        selection = KeySelection(index.top)
        for layer in self.layers:
            assert isinstance(layer.attention, LatentAttention)
            layer.attention.selection = selection
        return selection

    def _skip_what_others_have(self, weights: Weights) -> None:
        config = self.config
        here = self.rank.layout.layers(config.num_layers)
        for i in set(range(config.num_layers + config.extra_layers)) - set(here):
            weights.skip(f"model.layers.{i}.")
        weights.skip("model.mtp_layers.")  # of a MiMo
        weights.skip("model.mtp.")
        weights.skip("mtp.")  # `draft_heads.py` reads it from a source of its own
        if not self._has_table:
            weights.skip("model.embed_tokens.weight")
        if not self.is_first:
            weights.skip("model.embed_positions.weight")
        if not self.is_last:
            weights.skip("model.norm.weight")
            weights.skip("model.norm.bias")
            weights.skip("lm_head.bias")
        if not self.is_last or config.tie_word_embeddings:
            weights.skip("lm_head.weight")

    def _norm_and_head(self, weights: Weights) -> tuple[Tensor | None, PackedLinear]:
        config = self.config
        if not self.is_last:
            return None, None
        if config.has_plain_last_norm:
            norm_E = weights.vector("model.norm.weight", config.hidden_size)
        else:
            norm_E = norm_weight(config, weights, "model.norm", config.hidden_size)
        if config.tie_word_embeddings:
            assert self.embedding is not None
            return norm_E, self.embedding.packed
        vocab = self.rank.layout.vocabulary(config.vocab_size)
        return norm_E, weights.head("lm_head", vocab, config.hidden_size, bias=config.head_bias)

    def _norm_bias(self, weights: Weights) -> Tensor | None:
        return None if self.norm_E is None else norm_bias(self.config, weights, "model.norm", self.norm_E)

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers in each later forward pass. None is the first layer; one may occur
        twice. Call it before the first pass, which may be recorded.
        """
        self._tapped, self._taps = tuple(layers), {layer: [] for layer in layers}

    def take_tapped(self) -> Tensor:
        """Return the inputs of tapped layers in the last forward pass, side by side: [T, layers E]."""
        inputs = {layer: kept.pop() for layer, kept in self._taps.items()}
        return torch.cat([inputs[layer] for layer in self._tapped], 1)

    def hidden(self, forward: ForwardContext, rows_R: Tensor | None) -> Tensor:
        """Run the forward pass, writing KV for every row; return final normed hidden states [R, E].

        `rows_R` selects the wanted rows; None: all. Stages other than the last return no rows.
        """
        if self.selection is not None:
            self.selection.begin(forward.layout)
        if self.is_first:
            assert self.embedding is not None
            if self.clamps_ids:
                forward = replace(forward, ids_T=forward.ids_T.clamp(max=self.config.vocab_size - 1))
            forward = self.embedding.localize_ids(forward)
        run_layers = self._layers if forward.images is not None else self._run_layers
        if forward.layout is None or forward.layout.adapters is None:
            x_TE, residual_TE = run_layers(forward)
        else:
            assert self.adapters is not None
            if forward.images is None:
                run_layers = self._run_adapted
            with self.adapters.applied(forward.layout.adapters):
                x_TE, residual_TE = run_layers(forward)
        if self.norm_E is None:
            return x_TE[:0]
        if rows_R is not None:
            x_TE, residual_TE = x_TE[rows_R], residual_TE[rows_R]
        return self._norm(x_TE, residual_TE, self.norm_E, self.config.rms_norm_eps)

    @property
    def has_scores(self) -> bool:
        """True if `scores` can be called: the whole model is here, and its operations can all be recorded."""
        return self.rank.layout.ranks == 1 and self.config.scales.logits == 1.0 and not self.times_head

    def scores(self, forward: ForwardContext, *, with_best: bool) -> tuple[Tensor, ...]:
        """Run the forward pass of a step in which every row samples, none has an image or an adapter.

        Returns logits [T, V], and `Ops.best_of` them with `with_best`, the same as from `hidden` and
        `logits`, and valid until the next call. Threads are woken once, and nothing is made between the
        last layer and the sampler.
        """
        assert self.has_scores
        assert self.embedding is not None
        self.embedding.place(forward.layout)
        if self.selection is not None:
            self.selection.begin(forward.layout)
        if self.clamps_ids:
            forward = replace(forward, ids_T=forward.ids_T.clamp(max=self.config.vocab_size - 1))
        return self._run_scored[with_best](forward)

    def _scored(self, forward: ForwardContext, *, with_best: bool) -> tuple[Tensor, ...]:
        assert self.norm_E is not None
        x_TE, residual_TE = self._layers(forward)
        logits_TV = self.logits(self._norm(x_TE, residual_TE, self.norm_E, self.config.rms_norm_eps))
        if not with_best:
            return (logits_TV,)
        assert self.ops.best_of is not None
        return logits_TV, *self.ops.best_of(logits_TV[:, : self.config.vocab_size])

    def _layers(self, forward: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the layers; return the last layer's output and the residual before it, [T, E] each."""
        x_TE, residual_TE = self._begin(forward)
        if self.own is not None:
            forward = replace(forward, own_TLP=self._own_embeddings(forward.ids_T, residual_TE))
        if self.altup is not None:
            x_TE = self.altup.expand(residual_TE)
        if self.config.shared is not None:  # a copy, as the residual grows in place
            embedding_TE = self.ops.concat((residual_TE.unsqueeze(1),)).flatten(1)
            forward = replace(forward, embedding_TE=embedding_TE)
        level = self._first_layer
        for layer, after in zip(self.layers, self.layers[1:], strict=False):
            level += 1
            x_TE = layer(x_TE, residual_TE, forward)
            if forward.images is not None:
                forward.images.add_level(level, residual_TE)
            if type(after) is type(layer):
                x_TE = after.enter(x_TE, residual_TE)
            else:
                x_TE = after.resume(layer.complete(x_TE), residual_TE)
            if level in self._taps:
                self.ops.host_callback(partial(_keep_copy, self._taps[level]), (residual_TE,))
        last = self.layers[-1]
        x_TE = last.complete(last(x_TE, residual_TE, forward))
        if forward.images is not None:
            forward.images.add_level(level + 1, residual_TE)
        if self.altup is not None:
            return self.altup.contract(x_TE)
        if not self.is_last:
            self.ops.host_callback(self.rank.communicator.send, (x_TE, residual_TE))
        return x_TE, residual_TE

    def _norm_embedding(self, x_TE: Tensor) -> Tensor:
        ones_E = torch.ones(x_TE.shape[1], dtype=self.dtype, device=x_TE.device)
        normed_TE = self.ops.rms_norm(x_TE, ones_E, self.config.rms_norm_eps)
        # A copy, as the next norm may give its result where this one has.
        return self.ops.concat((normed_TE.unsqueeze(1),)).flatten(1)

    def _own_embeddings(self, ids_T: Tensor, x_TE: Tensor) -> Tensor:
        assert self.own is not None
        assert self.embedding is not None
        rows = self.embedding.complete(self.own.look_up(ids_T))
        return self.own.add_projection(rows, x_TE)

    def _begin(self, forward: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return the first layer's input and the residual, from the embedding or the previous stage."""
        if self.is_first:
            assert self.embedding is not None
            residual_TE = self.embedding(forward.ids_T)
            if forward.images is not None:
                residual_TE[forward.images.rows_R] = forward.images.levels_LRE[0]
            if self.config.norms_embedding:
                residual_TE = self._norm_embedding(residual_TE)
            return self.layers[0].first(residual_TE), residual_TE
        ops, width = self.ops, self.config.hidden_size
        x_TE = ops.scratch("x", forward.ids_T, width, self.dtype)
        residual_TE = ops.scratch("residual", forward.ids_T, width, self.dtype)
        ops.host_callback(self.rank.communicator.receive, (x_TE, residual_TE))
        return self.layers[0].resume(x_TE, residual_TE), residual_TE

    def logits(self, hidden_RE: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Compute logits [R, V] in float32 or the model's dtype; V is this rank's padded vocabulary shard.
        `adapted`: rows of R that have an adapter.
        """
        if not self.is_last:
            return hidden_RE
        if adapted is not None:
            assert self.adapters is not None
            with self.adapters.applied(adapted):
                return self.logits(hidden_RE)
        scales, logits_RV = self.config.scales, self.ops.logits(self.head, hidden_RE)
        if scales.logits != 1.0:
            logits_RV.mul_(scales.logits)
        cap = scales.logits_cap
        return logits_RV if cap is None else self.ops.softcap(logits_RV, cap)


def _keep_copy(kept: list[Tensor], x_TE: Tensor) -> None:
    kept[:] = [x_TE.clone()]
