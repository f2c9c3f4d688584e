"""What the admin API tells of a model whose engine is ready before its text side."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from llmbox.app.engines.engine_process import SupervisorOptions
from llmbox.app.engines.manager import EngineManager
from llmbox.app.http.admin.models import describe_all
from llmbox.app.models.registry import Alias, NameLookup
from llmbox.app.text.tokenizer.text_loader import load_model_text
from support.engines import config, until
from support.fake_engine import fake_launch
from support.tokenizers_zoo import byte_level, write_text_files


async def test_a_model_is_ready_when_it_takes_requests(tmp_path: Path) -> None:
    go = threading.Event()

    def slow_text(_: Path) -> object:
        go.wait(15)
        text = SimpleNamespace(chat_template=None, encoder=None, warnings=(), close=lambda: None)
        text.beside_embedding = lambda _rows: text
        return text

    manager = EngineManager(slow_text, SupervisorOptions(launch=fake_launch()))
    control = SimpleNamespace(services=SimpleNamespace(engines=manager), failure_codes={}, asked={})
    load = asyncio.ensure_future(manager.load(config(tmp_path)))
    try:
        await until(lambda: any(each.state == "ready" for each in manager.loading()))
        assert [model.state for model in describe_all(control)] == ["loading"]
        go.set()
        await load
        assert [model.state for model in describe_all(control)] == ["ready"]
    finally:
        go.set()
        await manager.close()


async def test_adapters_in_memory_are_named_beside_their_base(tmp_path: Path) -> None:
    write_text_files(tmp_path / "fake", byte_level())
    manager = EngineManager(load_model_text, SupervisorOptions(launch=fake_launch()))
    one, two = "1" * 32, "2" * 32
    names = {"pirate": Alias("a", adapter=one), "poet": Alias("a", adapter=two), "plain": Alias("a")}
    names["other"] = Alias("b", adapter=one)
    control = SimpleNamespace(
        services=SimpleNamespace(engines=manager),
        failure_codes={},
        asked={},
        residency=SimpleNamespace(real_name=lambda name: names[name].model),
        library=SimpleNamespace(registry=SimpleNamespace(read_or_nothing=lambda: NameLookup(names))),
    )
    try:
        model = await manager.load(replace(config(tmp_path), name="a"))
        assert describe_all(control)[0].adapters == []
        model.supervisor.stats.adapters.append(one)
        assert describe_all(control)[0].adapters == ["pirate"]
    finally:
        await manager.close()


async def test_slower_kernels_are_a_warning(tmp_path: Path) -> None:
    write_text_files(tmp_path / "fake", byte_level())
    manager = EngineManager(load_model_text, SupervisorOptions(launch=fake_launch()))
    control = SimpleNamespace(services=SimpleNamespace(engines=manager), failure_codes={}, asked={})
    try:
        supervisor = (await manager.load(config(tmp_path))).supervisor
        (described,) = describe_all(control)
        assert not any("slower" in warning for warning in described.warnings)
        assert supervisor.info is not None
        supervisor.info = replace(supervisor.info, kernels_problem="no room")
        (described,) = describe_all(control)
        assert described.warnings[-1] == "slower kernels run: no room"
    finally:
        await manager.close()
