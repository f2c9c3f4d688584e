"""A server whose keys store answers, for the tests of that."""

import time
from pathlib import Path
from typing import Any

from llmbox.app.security.keys import ApiKey, KeySpec
from support.deferred_module import DeferredModule
from support.fake_engine import write_model
from support.openai_server import Server
from support.tokenizers_zoo import byte_level, write_text_files

openai = DeferredModule("openai")

SECRET = "zanzibar-asked"


class Place:
    """A server with an empty log and two keys."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.services = server.services
        server.call(self.services.request_log.purge(time.time() + 1))
        for key in self.services.security.keys.list():
            self.services.security.keys.remove(key.name)
        self.key, self.client = self.new_key("mine")
        _, self.other = self.new_key("other")
        self.nobody = server.client()

    def new_key(self, name: str, **fields: Any) -> "tuple[ApiKey, openai.OpenAI]":
        key, secret = self.services.security.keys.add(KeySpec(name=name, **fields))
        return key, self.server.client().with_options(api_key=secret)

    def bytes(self) -> bytes:
        self.services.request_log.flush()
        folder = self.services.paths.data_dir
        return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())

    def count(self) -> int:
        return sum(total.answers for total in self.server.call(self.services.stored.totals()))


def load_models(server: Server, root: Path, answers: dict[str, str], template: str) -> None:
    """Those of `answers`, and `slow`, which says a token now and then and never ends by itself."""
    server.load_scripted(root, answers, template)
    slow = write_text_files(root / "slow", byte_level())
    write_model(slow, vocab_size=512, context=1024, script=[72, 73] * 512, step_delay=0.03, hold_at=800)
    server.load(slow, "slow")
