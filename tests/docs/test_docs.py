"""What the documentation says of the code is made from the code, and its links lead somewhere."""

import ast
import importlib.util
import re
import subprocess
from collections import defaultdict
from functools import cache
from itertools import chain
from pathlib import Path

import click

from llmbox.app.cli.root import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])

MADE_LATER = {"kernels/cpu/prebuilt/"}
"""Folders that only a wheel has."""


def each(subjects):
    """Make one test of a check of many pages or names: a test of its own for each would cost more than it."""

    def of(check):
        def test():
            failed = []
            for subject in subjects:
                try:
                    check(subject)
                except AssertionError as error:
                    failed.append(f"{subject}: {error}")
            assert not failed, "\n".join(failed)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return of


@cache
def source_files():
    tops = ("app", "engine", "kernels", "ui", "packaging", "tests", "migrations")
    return {path.name for top in tops for path in (ROOT / top).rglob("*.*")}


@cache
def renderer():
    spec = importlib.util.spec_from_file_location("render_docs", ROOT / "packaging/render_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each(sorted(ROOT.glob("docs/*.md")))
def test_generated_parts_are_current(page):
    text = page.read_text("utf-8")
    assert renderer().render(text) == text, "run `make docs`"


@each(PAGES)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


def anchors_of(page):
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each(PAGES)
def test_links_to_sections_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", page.read_text("utf-8")):
        assert anchor in anchors_of(page.parent / target if target else page), f"{target}#{anchor}"


@each(PAGES)
def test_files_and_folders_named_in_backticks_exist(page):
    for name in re.findall(r"`((?:app|engine|kernels|ui|packaging|tests)/[\w/.-]+)", page.read_text("utf-8")):
        assert (ROOT / name).exists() or name in MADE_LATER, name


@each(PAGES)
def test_source_files_named_in_backticks_exist(page):
    """Also those named without their folder, where a table or a sentence says which it is."""
    named = set(re.findall(r"`([\w.-]+\.(?:py|h|cpp))`", page.read_text("utf-8")))
    assert named <= source_files()


def test_tests_named_as_proof_exist():
    proofs = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/reliability.md").read_text("utf-8"))
    assert proofs
    for file, name in proofs:
        assert re.search(rf"def {name}\(", (ROOT / file).read_text("utf-8")), f"{file}::{name}"


def test_every_fault_has_its_row():
    text = (ROOT / "docs/reliability.md").read_text("utf-8")
    assert [int(number) for number in re.findall(r"^\| (\d+) .*`tests/", text, re.MULTILINE)] == [
        *range(1, 35)
    ]


def test_every_dialect_and_every_route_with_a_body_is_in_the_matrix():
    module = renderer()
    text = module.dialect_fields() + module.request_fields()
    rows = {name for router in module.DIALECTS for name, _ in module.rows_of(router)}
    for route in ("/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/api/chat", "/api/embed"):
        assert f"`POST {route}`" in rows
    assert all(name in text for name in rows)
    assert "`mcp_servers` (but `[]`)" in text


SHAPES = (ROOT / "docs/shapes.md").read_text("utf-8")
STATE = (ROOT / "docs/sequence-state.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text("utf-8") + STATE + SHAPES
NAMES = sorted(set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", ARCHITECTURE, flags=re.DOTALL))))


@cache
def members_by_class():
    """Names that each class of the product defines: methods, fields, and attributes set on `self`."""
    found = defaultdict(set)
    for path in chain.from_iterable((ROOT / top).rglob("*.py") for top in ("app", "engine", "kernels", "ui")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name] |= set(defined_in(node))
    return found


def defined_in(node):
    """Names that a class or a module defines."""
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield inner.name
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            yield inner.target.id
        elif isinstance(inner, ast.Assign):
            yield from (target.id for target in inner.targets if isinstance(target, ast.Name))


def is_path(name):
    top = re.match(r"(app|engine|kernels|ui|packaging|tests|migrations)/[\w/.-]*$", name)
    return bool(top) or re.fullmatch(r"[\w./-]+\.(py|md|toml|h|cpp)", name) is not None


@each([name for name in NAMES if is_path(name)])
def test_files_and_folders_in_the_architecture_exist(name):
    assert (ROOT / name).exists(), name


@each([name for name in NAMES if "::" in name])
def test_functions_in_the_architecture_exist(name):
    file, _, function = name.partition("::")
    assert function in defined_in(ast.parse((ROOT / file).read_text("utf-8"))), name


@each([name for name in NAMES if re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)?", name)])
def test_classes_and_methods_in_the_architecture_exist(name):
    owner, _, member = name.partition(".")
    assert owner in members_by_class(), name
    assert not member or member in members_by_class()[owner], name


def targets_of_make():
    return set(re.findall(r"^([a-z-]+):[^=]", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def test_make_help_lists_every_target_and_up_is_the_default():
    text = subprocess.run(["make", "-C", ROOT, "help"], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  ([a-z-]+) +\S", text, re.MULTILINE)) == targets_of_make()
    assert re.search(r"^[a-z-]+:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)[0] == "up:"


def test_hooks_before_a_commit_are_the_checks_of_make():
    rule = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)[1]
    hooks = re.findall(r"entry: (.+)", (ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert hooks == [line.strip().replace("$(BIN)", ".venv/bin") for line in rule.splitlines()]


@each(PAGES)
def test_targets_named_in_backticks_exist(page):
    assert set(re.findall(r"`make ([a-z-]+)", page.read_text("utf-8"))) <= targets_of_make()


FOREIGN_OPTIONS = {"--shm-size", "--cpu-moe", "--few", "--once", "--loops", "--kernels"}
"""Of Docker and llama.cpp, and of the benchmarks that the sentence beside them names."""


@each(PAGES)
def test_options_named_in_backticks_exist(page):
    known = set(re.findall(r"--[a-z][a-z-]+", (ROOT / "docs/cli.md").read_text("utf-8")))
    named = re.findall(r"`((?:--|llmbox )[^`\n]+)`", page.read_text("utf-8"))
    assert {option for text in named for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)} <= (
        known | FOREIGN_OPTIONS
    )


def commands_in(text):
    """Words of each `llmbox` command in blocks of code and in backticks, without its comment."""
    blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    found = re.findall(r"^(?:\$ )?(?:sudo (?:-u \w+ )?)?llmbox (.*)", blocks, re.MULTILINE)
    found += re.findall(r"`llmbox ([^`\n]+)`", text)
    for command in found:
        yield re.split(r"\s#|  +\w|[|>&]", command.replace("…", ""))[0].split()


@each(PAGES)
def test_commands_have_the_options_that_the_page_gives_them(page):
    for words in commands_in(page.read_text("utf-8")):
        command, context = cli, click.Context(cli, **cli.context_settings)
        given = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
        for word in words:
            inner = command.get_command(context, word) if isinstance(command, click.Group) else None
            if inner is not None:
                command, context = inner, click.Context(inner, parent=context, info_name=word)
        known = [*command.get_params(context), *cli.get_params(context)]
        options = {name for each in known for name in (*each.opts, *each.secondary_opts)}
        assert command is not cli or given or words[:1] in ([], ["is"], ["(CLI)"]), words
        assert set(given) <= options, words


@each(PAGES)
def test_settings_named_in_commands_exist(page):
    known = set(
        re.findall(r"^\| `([a-z_.]+)`", (ROOT / "docs/configuration.md").read_text("utf-8"), re.MULTILINE)
    )
    named = re.findall(r"llmbox config (?:set|get|unset) ([a-z_]+\.[a-z_.]+)", page.read_text("utf-8"))
    assert set(named) <= known


@cache
def sources_with_shapes():
    return "".join(
        path.read_text("utf-8") for top in ("engine", "kernels") for path in (ROOT / top).rglob("*.py")
    )


@each(sorted(set(re.findall(r"`([a-z_]+_(?:\d?[A-Zn]\d?)+)(?:`|\[)", SHAPES))))
def test_tensors_named_in_the_shapes_exist(name):
    assert re.search(rf"\b{name}\b", sources_with_shapes())


@each(sorted(ROOT.glob("docs/notes/*.md")))
def test_a_note_begins_with_its_result(page):
    title, _, result = page.read_text("utf-8").splitlines()[:3]
    assert title.startswith("# ")
    assert result.startswith("**Result: ") or page.name == "README.md"


def test_every_part_that_a_benchmark_renews_is_in_one_note():
    scripts = "".join(path.read_text("utf-8") for path in (ROOT / "tests/bench").glob("*.py"))
    parts = re.findall(r'renew\("(\w+)"', scripts) + re.findall(r'"--part", default="(\w+)"', scripts)
    notes = "".join(path.read_text("utf-8") for path in (ROOT / "docs/notes").glob("*.md"))
    assert len(parts) == 4
    for part in parts:
        assert notes.count(f"<!-- measured {part} -->\n") == 1, part
    assert notes.count("<!-- measured ") == notes.count("<!-- end measured -->")


@each(["docs", "docs/notes", "docs/decisions"])
def test_the_index_lists_every_page(folder):
    index = (ROOT / folder / "README.md").read_text("utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert {path.name for path in (ROOT / folder).glob("*.md")} - {"README.md"} == linked
