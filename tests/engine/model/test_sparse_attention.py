"""Sparse attention of DeepSeek V3.2 and GLM-5 beyond what every family is tested for."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DeviceError, ParallelError
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.estimator import MemoryBudget, estimate
from llmbox.engine.planning.runnable import RunnablePlan, require_runnable
from llmbox.kernels.support import KernelSite
from support.families import SPARSE, make_family
from support.real_engines import ask, load, tokens

TOP: int = SPARSE["index_topk"]
LONG = ask("long", range(40, 90), 8)


def as_dense(sparse: Path) -> Path:
    """Return the same model as a DeepSeek V3, without its indexers."""
    dense = make_family(sparse.parent / "dense", "deepseek_v3")
    raw = json.loads((sparse / "config.json").read_text())
    raw |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (dense / "config.json").write_text(json.dumps(raw))
    weights = load_file(sparse / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".indexer." not in name}
    save_file(kept, dense / "model.safetensors", metadata={"format": "pt"})
    return dense


def test_it_is_dense_up_to_the_number_of_selected_keys(tmp_path: Path) -> None:
    sparse = make_family(tmp_path / "sparse", "deepseek_v32")
    dense = as_dense(sparse)
    short = ask("short", range(40, 40 + TOP - 5), 5)
    assert tokens(load(sparse), [short]) == tokens(load(dense), [short])
    assert tokens(load(sparse), [LONG]) != tokens(load(dense), [LONG])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_long_rows_are_the_same_alone_in_chunks_and_in_a_batch(tmp_path: Path, kv_dtype: str) -> None:
    model = make_family(tmp_path, "glm_moe_dsa", indexer_types=["full", "shared"], num_hidden_layers=2)
    options = {"dtype": "bfloat16", "kv_dtype": kv_dtype}
    alone = tokens(load(model, **options), [LONG])["long"]
    others = [ask(str(number), range(3 + number, 30 + number), 8) for number in range(32)]
    for asked in ({"max_running": 40}, {"max_running": 4, "token_budget": 7}):
        assert tokens(load(model, **options, **asked), [LONG, *others])["long"] == alone, asked


def test_gpus_run_contexts_of_which_all_keys_are_selected(tmp_path: Path) -> None:
    config = parse_config(make_family(tmp_path, "deepseek_v32"))
    budget = MemoryBudget(device="cpu", available=64 << 30, cores=8, native_kernels=True)
    for context, runs in ((TOP, True), (TOP + 1, False)):
        asked = EngineConfig(model_path="", name="", context=context)
        plan = RunnablePlan.of(estimate(config.shape(), budget, asked), config)
        if runs:
            require_runnable(plan, KernelSite(device="cuda"), asked)
        else:
            with pytest.raises(DeviceError, match="sparse attention of this model run on CPUs only"):
                require_runnable(plan, KernelSite(device="cuda"), asked)


def test_layers_that_share_a_selection_stay_on_one_stage(tmp_path: Path) -> None:
    with pytest.raises(ParallelError, match=r"--pp 2: layers of this model .* keys that others selected"):
        load(make_family(tmp_path, "glm_moe_dsa"), pp=2)
