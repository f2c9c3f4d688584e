"""The maths of draft heads beside transformers' layers, and beside the published formulas in plain torch."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from llmbox.engine.core.engine import Engine
from support.draft_heads import add_mtp, ask_always, make_eagle3, make_medusa, make_predictable, make_target
from support.families import make_family
from support.real_engines import ask, hf_model, load

PROMPT = [5 + i * 7 % 300 for i in range(20)]
DRAFTS = 3
MTP = {"qwen3_5_text": "qwen", "qwen3_next": "qwen", "glm4_moe": "deepseek", "deepseek_v3": "deepseek"}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    ask_always(monkeypatch, DRAFTS)


class Heard:
    """Logits from which an engine drew the first drafts after a prompt, and the tokens before each."""

    def __init__(self, engine: Engine) -> None:
        drafting = engine.scheduler.drafting
        drafting._rows = 16
        sampler: Any = drafting._models[0].proposer.executor.runner._sampler
        self.rows: list[Tensor] = []
        self.known: list[list[int]] = []
        sample = sampler.sample

        def hear(logits_RV: Tensor, requests: list[Any]) -> list[Any]:
            self.rows.append(logits_RV[0].clone())
            self.known.append(list(requests[0].token_ids))
            return sample(logits_RV, requests)

        sampler.sample = hear
        engine.add(ask("a", PROMPT, DRAFTS + 3))
        while len(self.rows) < DRAFTS:
            engine.step()


def check(rows: list[Tensor], wanted: Iterator[Tensor]) -> None:
    for row, logits in zip(rows[:DRAFTS], wanted, strict=True):
        finite = row.isfinite()
        assert finite.any()
        torch.testing.assert_close(row[finite], logits[: len(row)][finite], atol=1e-3, rtol=1e-3)
        assert int(row.argmax()) == int(logits.argmax())


@pytest.mark.parametrize("arch", MTP)
def test_mtp_beside_the_layers_of_transformers(tmp_path: Path, arch: str) -> None:
    """Layer and norm are those of a model of one layer in transformers, which has no MTP of its own."""
    style = MTP[arch]
    directory = add_mtp(make_predictable(make_family(tmp_path / arch, arch), 0.6), style, damping=0.6)
    weights = load_file(directory / "model.safetensors")
    heard = Heard(load(directory, dtype="float32"))
    target, head = hf_model(directory), one_layer(directory, weights, style, target_of=arch)
    prefix = "mtp." if style == "qwen" else "model.layers.2."
    names = (
        ("fc", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
        if style == "qwen"
        else ("eh_proj", "hnorm", "enorm")
    )
    fc, hidden_norm, embedding_norm = (weights[f"{prefix}{name}.weight"] for name in names)
    one, eps = float(style == "qwen"), target.config.rms_norm_eps

    def join(hidden: Tensor, ids: list[int], *, hides_first: bool) -> Tensor:
        embedded = target.get_input_embeddings()(torch.tensor(ids))
        if hides_first:
            embedded[0] = 0
        both = norm(embedded, embedding_norm + one, eps), norm(hidden, hidden_norm + one, eps)
        return torch.cat(both, 1) @ fc.T

    def logits() -> Iterator[Tensor]:
        known = heard.known[0]
        with torch.inference_mode():
            hidden = target.model(torch.tensor([known[:-1]])).last_hidden_state[0]
            rows = join(hidden, known[1:], hides_first=style == "deepseek")
            for draft in range(DRAFTS):
                last, before_norm = forward(head, rows)
                yield target.lm_head(last)
                if draft + 1 < DRAFTS:
                    following = last if style == "qwen" else before_norm
                    ids = heard.known[draft + 1][-1:]
                    rows = torch.cat([rows, join(following[None], ids, hides_first=False)])

    check(heard.rows, logits())


def one_layer(directory: Path, weights: dict[str, Tensor], style: str, target_of: str) -> Any:
    """The MTP layer and its norm as a model of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    config.num_hidden_layers = 1
    if style == "qwen":
        config.layer_types = ["full_attention"]
        prefix, last = "mtp.layers.0.", "mtp.norm.weight"
    else:
        config.first_k_dense_replace = 0
        config.mlp_layer_types = ["sparse"]
        prefix, last = "model.layers.2.", "model.layers.2.shared_head.norm.weight"
    own = {n.replace(prefix, "model.layers.0."): w for n, w in weights.items() if n.startswith(prefix)}
    folder = directory / f"{target_of}-layer"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    names = load_file(folder / "model.safetensors").keys()
    found = {name: own[name] for name in names if name in own} | {"model.norm.weight": weights[last]}
    found |= {n: weights[n] for n in ("model.embed_tokens.weight", "lm_head.weight")}
    assert found.keys() == names
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return hf_model(folder)


def forward(head: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The last row after the norm, and before it."""
    before: list[Tensor] = []
    handle = head.model.norm.register_forward_pre_hook(lambda _module, inputs: before.append(inputs[0]))
    try:
        last = head.model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0, -1]
    finally:
        handle.remove()
    return last, before[0][0, -1]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("before_residual", [False, True])
def test_eagle3_beside_its_formula(tmp_path: Path, before_residual: bool) -> None:
    target = make_target(tmp_path / "target")
    directory = make_eagle3(tmp_path / "head", target, norm_before_residual=before_residual)
    heard = Heard(load(target, dtype="float32", draft_path=str(directory)))
    config, own = (
        json.loads((directory / "config.json").read_text()),
        load_file(directory / "model.safetensors"),
    )
    model = hf_model(target)
    eps, layer = config["rms_norm_eps"], {n.removeprefix("midlayer."): w for n, w in own.items()}

    def run_layer(hidden: Tensor, ids: list[int]) -> tuple[Tensor, Tensor]:
        embedded = norm(model.get_input_embeddings()(torch.tensor(ids)), layer["input_layernorm.weight"], eps)
        normed = norm(hidden, layer["hidden_norm.weight"], eps)
        x = torch.cat((embedded, normed), 1)
        residual = normed if before_residual else hidden
        residual = residual + attend(x, layer, config)
        x = norm(residual, layer["post_attention_layernorm.weight"], eps)
        gated = silu(x @ layer["mlp.gate_proj.weight"].T) * (x @ layer["mlp.up_proj.weight"].T)
        residual = residual + gated @ layer["mlp.down_proj.weight"].T
        logits = torch.full((320,), -torch.inf)
        ids_of_drafts = own["d2t"] + torch.arange(len(own["d2t"]))
        logits[ids_of_drafts] = norm(residual[-1], own["norm.weight"], eps) @ own["lm_head.weight"].T
        return residual[-1:], logits

    def wanted() -> Iterator[Tensor]:
        known = heard.known[0]
        with torch.inference_mode():
            states = model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
            hidden = torch.cat([states[layer][0] for layer in (1, 2, 3)], 1) @ own["fc.weight"].T
            ids = known[1:]
            for draft in range(DRAFTS):
                last, logits = run_layer(hidden, ids)
                yield logits
                if draft + 1 < DRAFTS:
                    hidden, ids = torch.cat([hidden, last]), [*ids, heard.known[draft + 1][-1]]

    check(heard.rows, wanted())


def attend(x: Tensor, layer: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """Causal attention with RoPE of halves, as in Llama."""
    heads, width = config["num_attention_heads"], config["head_dim"]
    q, k, v = (
        (x @ layer[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, width).transpose(0, 1)
        for name in "qkv"
    )
    inverse = config["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(len(x))[:, None] * inverse
    cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
    q, k = (
        each * cos + torch.cat((-each[..., width // 2 :], each[..., : width // 2]), -1) * sin
        for each in (q, k)
    )
    k, v = (each.repeat_interleave(heads // len(each), 0) for each in (k, v))
    out = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    return out.transpose(0, 1).flatten(1) @ layer["self_attn.o_proj.weight"].T


def test_medusa_beside_its_formula(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    directory = make_medusa(tmp_path / "heads", target)
    heard = Heard(load(target, dtype="float32", draft_path=str(directory)))
    own, model = load_file(directory / "medusa_lm_head.safetensors"), hf_model(target)
    with torch.inference_mode():
        hidden = model.model(torch.tensor([heard.known[0][:-1]])).last_hidden_state[0, -1]

    def wanted() -> Iterator[Tensor]:
        for head in range(DRAFTS):
            block = hidden @ own[f"{head}.0.linear.weight"].T + own[f"{head}.0.linear.bias"]
            yield (hidden + silu(block)) @ own[f"{head}.1.weight"].T

    check(heard.rows, wanted())


def test_heads_of_other_spellings_are_the_same(tmp_path: Path) -> None:
    """Medusa as vLLM has it, and EAGLE-3 with `model.` before its names."""
    target = make_target(tmp_path / "target")
    medusa, eagle3 = make_medusa(tmp_path / "medusa", target), make_eagle3(tmp_path / "eagle3", target)
    first = [Heard(load(target, dtype="float32", draft_path=str(each))).rows for each in (medusa, eagle3)]
    weights = load_file(medusa / "medusa_lm_head.safetensors")
    (medusa / "medusa_lm_head.safetensors").unlink()
    spelled = {
        f"blocks.{name[0]}.layers.0.{name.rpartition('.')[2]}"
        if "linear" in name
        else f"lm_heads.{name[0]}.weight": each
        for name, each in weights.items()
    }
    save_file(spelled, medusa / "model.safetensors")
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1}
    (medusa / "config.json").write_text(json.dumps(config))
    weights = load_file(eagle3 / "model.safetensors")
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    spelled = {f"model.{n}" if n.startswith("midlayer") else n: each for n, each in weights.items()}
    save_file(spelled | {"model.embed_tokens.weight": embedding}, eagle3 / "model.safetensors")
    for head, rows in zip((medusa, eagle3), first, strict=True):
        for row, other in zip(
            rows, Heard(load(target, dtype="float32", draft_path=str(head))).rows, strict=True
        ):
            assert torch.equal(row, other)


def test_its_packed_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = add_mtp(make_predictable(make_family(tmp_path / "qwen", "qwen3_5_text")), "qwen")
    monkeypatch.setenv("LLMBOX_REPACKED", str(tmp_path / "packed"))
    monkeypatch.setenv("LLMBOX_REPACKED_GB", "1")
    rows = Heard(load(directory, dtype="float32")).rows
    for thread in threading.enumerate():
        if thread.name == "keep packed weights":
            thread.join(30)
    monkeypatch.setattr("llmbox.engine.executor.load_model.from_checkpoint", None)
    again = Heard(load(directory, dtype="float32")).rows
    assert all(torch.equal(row, other) for row, other in zip(rows, again, strict=True))
