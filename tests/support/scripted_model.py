"""A daemon whose model, called `scripted`, gives known answers: for programs of other people."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.cli_box import Box
from support.fake_engine import write_model
from support.tokenizers_zoo import byte_level, drawn_ids, write_text_files

CONTEXT = 200_000
TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<tool_call><|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def call(name: str, arguments: Mapping[str, object]) -> str:
    """Write a call of a tool as the template's family does."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def serve(
    box: Box, replies: list[tuple[str, str]], answer: str, template: str = TEMPLATE, context: int = CONTEXT
) -> None:
    """Serve a model that gives the first of `replies` whose mark stands in the prompt, else `answer`."""
    tokenizer = byte_level()

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    folder = write_text_files(box.folder / "models" / "scripted", tokenizer, template)
    write_model(
        folder,
        **drawn_ids(tokenizer),
        context=context,
        prefill_per_step=CONTEXT,
        script=ids(answer),
        replies=[(ids(mark), ids(reply)) for mark, reply in replies],
    )
    box.serve(folder)


def run(
    command: list[str], work: Path, environ: Mapping[str, str], code: int = 0
) -> "subprocess.CompletedProcess[str]":
    """Run a program in `work` with no input; assert that it ends with `code`."""
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=work,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, (done.stdout[-3000:], done.stderr[-3000:])
    return done


def events(out: str) -> list[dict[str, Any]]:
    """Read a program's lines of JSON."""
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]
