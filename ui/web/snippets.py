"""A logged request as a command. Prompts are not in the log: the place where they go is marked."""

import json
import shlex
from typing import Any

from llmbox.app.store.record import RequestRecord

PROMPT = "…"


def as_curl(url: str, record: RequestRecord) -> str:
    body = json.dumps(_body(record), ensure_ascii=False)
    path = "/v1/chat/completions" if _is_chat(record) else "/v1/completions"
    return (
        f"curl {url}{path} \\\n"
        "  -H 'Authorization: Bearer '\"$LLMBOX_API_KEY\" \\\n"
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(body)}"
    )


def as_python(url: str, record: RequestRecord) -> str:
    call = "chat.completions" if _is_chat(record) else "completions"
    standard = {"temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "n"}
    body = _body(record)
    fixed = {"model", "messages", "prompt", "stream"}
    extra = {name: value for name, value in body.items() if name not in standard | fixed}
    lines = [f"    {name}={value!r}," for name, value in body.items() if name not in extra]
    lines += [f"    extra_body={extra!r},"] if extra else []
    return "\n".join(
        [
            "import os",
            "",
            "from openai import OpenAI",
            "",
            f'client = OpenAI(base_url="{url}/v1", api_key=os.environ["LLMBOX_API_KEY"])',
            f"answer = client.{call}.create(",
            *lines,
            ")",
        ]
    )


def _is_chat(record: RequestRecord) -> bool:
    return "chat" in record.endpoint


def _body(record: RequestRecord) -> dict[str, Any]:
    params = json.loads(record.params)
    for counted in ("stop", "bad_words", "logit_bias", "allowed_token_ids", "stop_token_ids"):
        params.pop(counted, None)  # the log has their number only
    body: dict[str, Any] = {"model": record.model}
    if _is_chat(record):
        body["messages"] = [{"role": "user", "content": PROMPT}]
    else:
        body["prompt"] = PROMPT
    body |= {name: value for name, value in params.items() if isinstance(value, int | float | str)}
    if record.seed is not None:
        body["seed"] = record.seed
    if record.n > 1:
        body["n"] = record.n
    if record.stream:
        body["stream"] = True
    return body
