"""Print the size and shape of the code (`make metrics`).

`tests/packaging/test_code_metrics.py` holds the limits.

.venv/bin/python -P packaging/code_metrics.py            # with one streamed chat through a daemon
.venv/bin/python -P packaging/code_metrics.py --static   # without
"""

import argparse
import ast
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("app", "engine", "kernels", "ui")
SUFFIXES = {".py", ".h", ".cpp", ".html", ".css", ".js"}
DIALECTS = {"app/http/openai", "app/http/openai_responses", "app/http/anthropic", "app/http/ollama"}
"""Folders that have a file for each route of a foreign API."""
BANNED = {"Of", "As", "What", "Those", "That", "So", "Also", "Whether", "How", "Where", "Which"}
"""Words that begin no docstring: it begins with a verb or a noun."""
WINDOW = 6
"""Lines from which a repetition counts."""


@cache
def modules() -> tuple[Path, ...]:
    """List the Python modules of the product, packages' `__init__` among them."""
    return tuple(sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def num_modules() -> int:
    return sum(path.name != "__init__.py" for path in modules())


def num_lines() -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in modules())


def line_counts() -> dict[str, int]:
    """Lines of each Python module."""
    return {name_of(path): len(path.read_text("utf-8").splitlines()) for path in modules()}


def flat_files() -> Counter[str]:
    """Source files that stand beside each other, by folder; `__init__.py` and third-party files left out."""
    found = (path for top in TOPS for path in (ROOT / top).rglob("*") if path.suffix in SUFFIXES)
    return Counter(
        name_of(path.parent) for path in found if path.name != "__init__.py" and "vendor" not in path.parts
    )


def repeated_class_names() -> dict[str, list[str]]:
    """Names of classes that several modules define, with the modules."""
    places = defaultdict(list)
    for path in modules():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name_of(path))
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def banned_beginnings() -> list[str]:
    """Docstrings, those of attributes too, that begin with a banned word: `file:line: first words`."""
    return [
        f"{name_of(path)}:{line}: {text[:40]}"
        for path in modules()
        for line, text in docstrings(tree_of(path))
        if re.split(r"\W", text, maxsplit=1)[0] in BANNED
    ]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts that stand alone as statements, with their lines."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value.strip()


def contracts() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return [contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]]


def duplicated_lines() -> int:
    """Lines of code in runs of six or more that occur twice; names, strings and numbers must agree too.

    Imports, docstrings, comments, lines of brackets alone and signatures do not count: the implementations of
    an interface repeat its signatures.
    """
    places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for number, path in enumerate(modules()):
        lines = code_lines(path)
        for start in range(len(lines) - WINDOW + 1):
            places[tuple(lines[start : start + WINDOW])].append((number, start))
    inside = {
        (number, start + offset)
        for found in places.values()
        if len(found) > 1
        for number, start in found
        for offset in range(WINDOW)
    }
    return len(inside)


def code_lines(path: Path) -> list[str]:
    """Lines of a module that hold code other than imports and signatures, stripped, without comments."""
    skipped: set[int] = set()
    for node in ast.walk(tree_of(path)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            skipped.update(range(node.lineno, max(node.lineno + 1, node.body[0].lineno)))
    kept: dict[int, list[str]] = defaultdict(list)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING):
                kept[token.start[0]].append(token.string)
    lines = (" ".join(tokens) for number, tokens in sorted(kept.items()) if number not in skipped)
    return [line for line in lines if re.search(r"\w", line)]


def readme_lines() -> int:
    return len((ROOT / "README.md").read_text("utf-8").splitlines())


def widest_readme_cell() -> int:
    """Words in the longest table cell of README.md; a link counts by its text."""
    text = re.sub(r"\]\([^)]*\)", "]", (ROOT / "README.md").read_text("utf-8"))
    rows = (line for line in text.splitlines() if line.startswith("|"))
    return max(len(cell.split()) for row in rows for cell in row.strip("|").split("|"))


def glossary_lines() -> int:
    """Lines of the glossary's section in docs/architecture.md."""
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    section = re.split(r"^## ", text.partition("## Glossary\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return len(section.strip().splitlines())


def rows() -> Iterator[tuple[str, str, str]]:
    """What, today's value, the aim."""
    flat = [(folder, number) for folder, number in flat_files().most_common() if number > 15]
    longest = sorted(line_counts().items(), key=lambda item: -item[1])
    yield "modules, without `__init__`", f"{num_modules():,}", "440"
    yield "lines of Python", f"{num_lines():,}", "53,000"
    yield "over 15 files flat", ", ".join(f"{folder} {number}" for folder, number in flat), "dialects"
    yield "longest modules", ", ".join(f"{name} {lines}" for name, lines in longest[:3]), "400"
    yield "import contracts", str(len(contracts())), ""
    yield "class names in several modules", ", ".join(repeated_class_names()) or "0", "0"
    yield "docstrings that begin with Of, As, What, ...", str(len(banned_beginnings())), "0"
    yield f"lines in repetitions of {WINDOW} or more", str(duplicated_lines()), "0"
    yield "README.md, lines / words in a table cell", f"{readme_lines()} / {widest_readme_cell()}", "120 / 12"
    yield "glossary, lines", str(glossary_lines()), "40"


def flow_rows() -> Iterator[tuple[str, str, str]]:
    from request_flow import measure_flow  # noqa: PLC0415 - starts a daemon

    flow = measure_flow()
    calls_in = f"{flow.calls_in} ({flow.functions_in} functions)"
    yield "files that a streamed chat passes", str(flow.files), "45"
    yield "files by room", ", ".join(f"{room} {number}" for room, number in flow.rooms.items()), ""
    yield "calls in the daemon until the engine has it", calls_in, ""
    yield "calls in the daemon for a token", f"{flow.calls_back:.0f}", ""
    yield "calls in the engine for a token", f"{flow.calls_step:.0f}", ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the size and shape of the code.")
    parser.add_argument("--static", action="store_true", help="do not send a chat through a daemon")
    options = parser.parse_args()
    table = [("what", "today", "aim"), ("---", "---", "---"), *rows()]
    if not options.static:
        sys.path.insert(0, str(Path(__file__).parent))
        table += flow_rows()
    for row in table:
        print(f"| {' | '.join(row)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
