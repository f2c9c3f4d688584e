"""What the admin API tells of a model whose engine is ready before its text side."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

from llmbox.app.engines.manager import EngineManager
from llmbox.app.http.admin.models import describe_all
from support.engines import config, until
from support.fake_engine import fake_launch


async def test_a_model_is_ready_when_it_takes_requests(tmp_path: Path) -> None:
    go = threading.Event()

    def slow_text(_: Path) -> object:
        go.wait(15)
        text = SimpleNamespace(chat_template=None, warnings=(), close=lambda: None)
        text.beside_embedding = lambda _rows: text
        return text

    manager = EngineManager(slow_text, fake_launch())
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
