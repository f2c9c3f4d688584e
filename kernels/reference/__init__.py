"""Reference backend: the definition of every operation in plain torch, for any device and dtype."""

import torch
from torch import Tensor

from ..ops import Ops
from .attention import attention, build_attention_metadata, write_kv
from .elementwise import (
    ALTUP,
    add_rms_norm,
    concat,
    embedding,
    gate_mul,
    layer_norm,
    linear,
    make_linear_by_head,
    pack_embedding,
    pack_linear,
    rms_norm,
    rotary,
    softcap,
    weight_memory,
)
from .kv_cache import clear_blocks, copy_blocks, make_kv_cache, read_keys
from .lora import reference_lora
from .moe import ExpertLayer
from .recurrent import RECURRENT

__all__ = ["REFERENCE"]

EXPERTS = ExpertLayer(linear)

REFERENCE = Ops(
    name="reference",
    pack_embedding=pack_embedding,
    embedding=embedding,
    pack_linear=pack_linear,
    weight_memory=weight_memory,
    pack_head=pack_linear,
    pack_router=pack_linear,
    linear=linear,
    logits=linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    layer_norm=layer_norm,
    scale=Tensor.mul_,
    rotary=rotary,
    gate_mul=gate_mul,
    softcap=softcap,
    concat=concat,
    linear_by_head=make_linear_by_head(linear),
    experts=EXPERTS.experts,
    expert_results=EXPERTS.expert_results,
    combine_experts=EXPERTS.combine_experts,
    make_kv_cache=make_kv_cache,
    plan_attention=build_attention_metadata,
    write_kv=write_kv,
    read_keys=read_keys,
    attention=attention,
    copy_blocks=copy_blocks,
    clear_blocks=clear_blocks,
    block_tensors=lambda cache: cache.tensors,
    graph=lambda body: body,
    kv_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int8}),
    recurrent=RECURRENT,
    altup=ALTUP,
    lora=reference_lora(),
)
