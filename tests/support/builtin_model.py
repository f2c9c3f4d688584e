"""The built-in model's held-out questions, asked greedily, and whether the answers are right."""

import asyncio
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbox.engine.core.engine import Engine
from support.real_engines import ask, tokens

if TYPE_CHECKING:
    from llmbox.app.text.tokenizer.tokenizer import TextModel

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "app" / "assets" / "builtin"
QUESTIONS: dict[str, Any] = tomllib.loads(
    (ROOT / "tests/packaging/builtin_questions.toml").read_text("utf-8")
)
IN_SCOPE: list[dict[str, Any]] = QUESTIONS["in_scope"]["questions"]
OUT_OF_SCOPE: list[str] = QUESTIONS["out_of_scope"]["questions"]

Chats = list[list[dict[str, str]]]


def answers(engine: Engine, chats: Chats) -> list[str]:
    """Greedy answers of our own engine, all chats at once."""
    # Imported here: `make gpu-check` reads the questions where only torch and tokenizers are installed.
    from llmbox.app.text.tokenizer.text_loader import load_model_text

    text = load_model_text(ASSETS)
    prompts = asyncio.run(_prompts(text, chats))
    requests = [
        ask(str(number), prompt, 100, stop_token_ids=text.eos_token_ids)
        for number, prompt in enumerate(prompts)
    ]
    return [text.decode(ids) for ids in tokens(engine, requests).values()]


async def _prompts(text: "TextModel", chats: Chats) -> list[list[int]]:
    from llmbox.app.sandbox.pool import TemplatePool
    from llmbox.app.text.chat_template import Chat

    pool = TemplatePool()
    try:
        return [(await text.render_chat(pool, Chat(messages=chat))).ids() for chat in chats]
    finally:
        await pool.close()


def user(*questions: str) -> Chats:
    return [[{"role": "user", "content": question}] for question in questions]


def is_right(text: str, must: list[str]) -> bool:
    low = text.lower()
    return all(any(option.lower() in low for option in need.split("|")) for need in must)
