"""ctypes declarations of the C interface of native/*.cpp."""

import ctypes
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..lora import LoraRows
from ..op_types import SCORINGS, ExpertOwners, Mixture, Routing
from .build import NativeUnavailable


class DeniedInstructions(NativeUnavailable):
    """The system denies this process the instructions of a level: any library of that level would fail."""


class Step(ctypes.Structure):
    """Mirror of `Step` in native/threads/command_buffer.h."""

    _fields_ = (
        ("rows", c_int32),
        ("sequences", c_int32),
        ("block_size", c_int32),
        ("table_width", c_int32),
        ("angle_width", c_int32),
        ("ids", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("query_starts", c_void_p),
        ("contexts", c_void_p),
        ("block_tables", c_void_p),
        ("slots", c_void_p),
        ("window_tables", c_void_p),
        ("window_slots", c_void_p),
        ("state_slots", c_void_p),
        ("save_starts", c_void_p),
        ("save_rows", c_void_p),
        ("save_slots", c_void_p),
        ("adapter_rows", c_void_p),
        ("adapter_starts", c_void_p),
        ("adapter_slots", c_void_p),
        ("adapter_runs", c_int32),
        ("spans", c_void_p),
    )

    def use_angles(self, cos: Tensor, sin: Tensor) -> None:
        """Use contiguous RoPE tables, [T, D] or several of them. They must stay alive until the step has
        run.
        """
        self.angle_width = cos.shape[-1]
        self.cos, self.sin = cos.data_ptr(), sin.data_ptr()

    def use_adapters(self, rows: LoraRows) -> None:
        """Use the rows of adapters. They must stay alive until the step has run."""
        self.adapter_rows, self.adapter_starts = rows.rows.data_ptr(), rows.starts.data_ptr()
        self.adapter_slots, self.adapter_runs = rows.slots.data_ptr(), len(rows.slots)


class NativeRouting(ctypes.Structure):
    """Mirror of `Routing` in native/moe/moe_routing.h."""

    _fields_ = (
        ("scoring", c_int32),
        ("groups", c_int32),
        ("top_groups", c_int32),
        ("group_best", c_int32),
        ("scale", c_float),
        ("jitter", c_float),
        ("correction", c_void_p),
        ("factors", c_void_p),
        ("scales_inputs", c_int32),
    )

    @classmethod
    def of(cls, routing: Routing) -> "NativeRouting":
        return cls(
            scoring=SCORINGS.index(routing.scoring),
            groups=routing.groups,
            top_groups=routing.top_groups,
            group_best=routing.group_best,
            scale=routing.scale,
            jitter=routing.jitter,
            correction=_pointer(routing.correction_X),
            factors=_pointer(routing.factors_X),
            scales_inputs=routing.scales_inputs,
        )


class NativeHeldExperts(ctypes.Structure):
    """Mirror of `HeldExperts` in native/moe/moe_routing.h. Arrays stay alive with `kept`."""

    _fields_ = (
        ("places", c_void_p),
        ("holders", c_void_p),
        ("loads", c_void_p),
        ("rank", c_int32),
        ("ranks", c_int32),
    )
    kept: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, mixture: Mixture, owners: ExpertOwners | None) -> "NativeHeldExperts":
        if owners is None:
            places = torch.full((mixture.count,), -1, dtype=torch.int32)
            places[list(mixture.here)] = torch.arange(len(mixture.here), dtype=torch.int32)
            here = cls(places=places.data_ptr())
            here.kept = (places,)
            return here
        here = cls(
            owners.places_X.data_ptr(),
            owners.holder_bits_X.data_ptr(),
            _pointer(owners.load_R),
            owners.rank,
            owners.ranks,
        )
        here.kept = (owners.places_X, owners.holder_bits_X, owners.load_R)
        return here


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeLoraSource(ctypes.Structure):
    """Mirror of `LoraSource` in native/linear/lora_packing.h."""

    _fields_ = (
        ("linears", c_int32),
        ("inputs", c_int32),
        ("rank", c_int32),
        ("count", c_int32),
        ("a", c_void_p),
        ("scales", c_void_p),
        ("parts", c_void_p),
    )


class NativeDrawRow(ctypes.Structure):
    """Mirror of `DrawRow` in native/sampling/sample_row.h.

    It ends with the `Edits` of native/sampling/logits_processors.h.
    """

    _fields_ = (
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("top_k", c_int64),
        ("seed", c_uint64),
        ("position", c_uint64),
        ("bias_ids", c_void_p),
        ("biases", c_void_p),
        ("bias_count", c_int64),
        ("counted_ids", c_void_p),
        ("counts", c_void_p),
        ("counted_count", c_int64),
        ("repetition", c_double),
        ("frequency", c_double),
        ("presence", c_double),
        ("forbidden", c_void_p),
        ("forbidden_count", c_int64),
        ("allowed", c_void_p),
        ("allowed_count", c_int64),
    )


class Address(c_void_p):
    """Address as an argument of a function: a tensor stands for that of its first number."""

    @classmethod
    def from_param(cls, value: Any) -> Any:
        return c_void_p.from_param(value.data_ptr() if isinstance(value, Tensor) else value)


P, INT, LONG, FLOAT = c_void_p, c_int, c_int64, c_float

FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "llmbox_usable": (INT, ()),
    "llmbox_threads": (None, (INT, POINTER(c_int))),
    "llmbox_threads_running": (INT, ()),
    "llmbox_linear_new": (P, (INT, INT, INT, P, P)),
    "llmbox_quant_new": (P, (INT, INT, INT, INT, INT, INT, P, P)),
    "llmbox_quant_from": (P, (INT, INT, INT, INT, INT, P, P, P, P, P)),
    "llmbox_quant_blocks": (P, (INT, INT, INT, INT, P, P, P, P, P, P)),
    "llmbox_quantize": (None, (INT, INT, INT, INT, INT, P, P, P, P)),
    "llmbox_linear_at": (P, (INT, INT, INT, P, P)),
    "llmbox_quant_at": (P, (INT, INT, INT, INT, INT, INT, P, P)),
    "llmbox_packed": (P, (P,)),
    "llmbox_packed_bytes": (LONG, (P,)),
    "llmbox_bias": (P, (P, POINTER(c_int64))),
    "llmbox_linear_free": (None, (P,)),
    "llmbox_cache_new": (P, (INT, INT, INT, INT, INT, INT, INT)),
    "llmbox_cache_free": (None, (P,)),
    "llmbox_cache_copy": (None, (P, INT, INT)),
    "llmbox_cache_clear": (None, (P, POINTER(c_int), INT)),
    "llmbox_cache_populate": (INT, (P, INT, INT, POINTER(c_int))),
    "llmbox_copy_runs": (None, (P, LONG, P, LONG, LONG, INT)),
    "llmbox_cache_data": (P, (P,)),
    "llmbox_cache_block_bytes": (LONG, (P,)),
    "llmbox_linear_op": (P, (INT, P, P, LONG, P, LONG, INT)),
    "llmbox_linear_by_head_op": (P, (INT, INT, INT, P, P, LONG, LONG, P, LONG, LONG, INT)),
    "llmbox_embedding_op": (P, (INT, P, FLOAT, P, LONG)),
    "llmbox_quant_op": (P, (INT, P, P, LONG, P, LONG, INT)),
    "llmbox_shared_quant_op": (P, (INT, P, P, LONG, P, LONG, INT, INT)),
    "llmbox_quant_embedding_op": (P, (INT, P, FLOAT, P, LONG)),
    "llmbox_lora_bytes": (LONG, (INT, INT, POINTER(NativeLoraSource))),
    "llmbox_lora_pack": (None, (INT, INT, POINTER(NativeLoraSource), P)),
    "llmbox_lora_memory": (P, (LONG,)),
    "llmbox_lora_memory_data": (P, (P,)),
    "llmbox_lora_memory_free": (None, (P,)),
    "llmbox_lora_op": (P, (INT, INT, P, P, LONG, INT, P, LONG)),
    "llmbox_lora_embedding_op": (P, (INT, P, FLOAT, P, LONG, INT)),
    "llmbox_norm_op": (P, (INT, INT, P, LONG, P, INT, INT, FLOAT, P)),
    "llmbox_add_norm_op": (P, (INT, INT, P, LONG, P, P, INT, FLOAT, P)),
    "llmbox_layer_norm_op": (P, (INT, INT, P, LONG, P, P, P, INT, FLOAT, P)),
    "llmbox_rotary_op": (P, (INT, P, LONG, INT, INT, INT)),
    "llmbox_gate_mul_op": (P, (INT, INT, FLOAT, P, LONG, INT)),
    "llmbox_xielu_op": (P, (INT, P, LONG, INT, FLOAT, FLOAT, FLOAT, FLOAT)),
    "llmbox_copy_op": (P, (INT, P, LONG, LONG, INT, INT, P, LONG, LONG)),
    "llmbox_scale_op": (P, (INT, P, LONG, INT, FLOAT)),
    "llmbox_softcap_op": (P, (P, LONG, INT, FLOAT)),
    "llmbox_experts_op": (
        P,
        (
            *(INT, INT, INT, POINTER(NativeHeldExperts), INT, P, P, P, P, LONG, P, LONG, INT, INT),
            *(POINTER(NativeRouting), INT, FLOAT, P, LONG, P, LONG, P, LONG, P, P, P, P),
        ),
    ),
    "llmbox_combine_op": (P, (INT, P, P, INT, INT, P, LONG, P, LONG, P, LONG)),
    "llmbox_write_kv_op": (P, (INT, INT, P, INT, P, LONG, P, LONG)),
    "llmbox_heads_op": (P, (INT, INT, INT, P, INT, P, LONG, INT, P, FLOAT, INT)),
    "llmbox_attention_op": (P, (INT, INT, P, INT, P, LONG, INT, INT, FLOAT, FLOAT, P, P)),
    "llmbox_short_conv_op": (P, (INT, P, LONG, INT, P, P, INT, INT, P, P)),
    "llmbox_scan_op": (
        P,
        (INT, INT, P, LONG, P, LONG, P, P, P, INT, INT, INT, INT, FLOAT, FLOAT, FLOAT, P, P),
    ),
    "llmbox_gated_norm_op": (P, (INT, P, LONG, P, LONG, P, INT, INT, FLOAT, INT, P)),
    "llmbox_gate_rows_op": (P, (INT, INT, P, LONG, P, LONG, INT)),
    "llmbox_mul_add_op": (P, (INT, P, LONG, P, P, INT, P)),
    "llmbox_predict_streams_op": (P, (INT, P, P, P, INT, INT, P)),
    "llmbox_correct_streams_op": (P, (INT, P, P, P, P, INT, INT, INT, P)),
    "llmbox_add_to_streams_op": (P, (INT, P, P, INT, INT)),
    "llmbox_match_size_op": (P, (INT, P, P, LONG, INT, INT, FLOAT)),
    "llmbox_gate_sums_op": (P, (INT, P, LONG, INT, P)),
    "llmbox_cut_gates_op": (P, (INT, P, LONG, INT, P, INT, FLOAT)),
    "llmbox_turn": (None, (P, LONG, P, P)),
    "llmbox_best_op": (P, (P, LONG, INT, P, P)),
    "llmbox_draw_op": (P, (P, LONG, INT, P, P)),
    "llmbox_rank_op": (P, (P, LONG, INT, P, P, INT, P, P, P)),
    "llmbox_profile": (P, (INT, c_double, c_double)),
    "llmbox_read_op": (P, (P, LONG)),
    "llmbox_checksums": (INT, (P, LONG, POINTER(c_uint32), POINTER(c_uint32))),
    "llmbox_op_free": (None, (P,)),
    "llmbox_run": (None, (POINTER(c_void_p), INT, POINTER(Step))),
}


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library. Its calls release the interpreter lock. Raises NativeUnavailable."""
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = [Address if each is P else each for each in arguments]
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path} cannot be loaded: {error}") from None
    if not library.llmbox_usable():
        raise DeniedInstructions(f"{path.name} needs instructions that the system keeps from this process")
    return library
