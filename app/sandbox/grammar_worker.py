"""Grammar worker: checks grammars in a separate process, `python -P -m llmbox.app.sandbox.grammar_worker`.

Compiling a hostile one may take long or much memory, so the process lives under limits and the daemon may
kill it at any moment (`worker.py`). What compiles here in time does so in the engine.

job:    {"grammars": [...], of llguidance}; one with `gbnf` or `regex` instead of `lark_grammar` is translated
answer: {"grammar": str} or {"error": str}
"""

import json
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from llmbox.engine.core.constraints.structured_output import parser_limits

from .worker import run_worker

MEMORY_BYTES = 512 << 20
_LIMITS = parser_limits()


def answer(message: dict[str, Any]) -> dict[str, str]:
    try:
        grammar = json.dumps({"grammars": [_translated(each) for each in message["grammars"]]})
        error = LLMatcher.validate_grammar(grammar, None, limits=_LIMITS)
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MB of memory"}
    except RecursionError:
        return {"error": "it nests too deeply"}
    # Whatever a grammar does wrong is an answer, not a crash. A panic of the library is not an Exception.
    except BaseException as problem:  # noqa: BLE001
        error = str(problem) or type(problem).__name__
    if error and not error.startswith("WARNING"):
        return {"error": error[:500]}
    return {"grammar": grammar}


def _translated(grammar: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in grammar.items() if name not in ("gbnf", "regex")}
    if "gbnf" in grammar:
        rest["lark_grammar"] = any_to_lark(grammar["gbnf"])
    if "regex" in grammar:
        rest["lark_grammar"] = f"start: ANSWER\nANSWER: /{regex_to_lark(grammar['regex'], 'dws')}/"
    return rest


if __name__ == "__main__":
    run_worker("grammar worker", lambda: answer, MEMORY_BYTES)
