"""The list of mistakes that `make mutate` plants: each still fits its file, and a few are caught here."""

import ast
import os
import subprocess
import sys

import pytest

from simulate.mutate import ROOT, read_mutations

MUTATIONS = read_mutations()


@pytest.mark.parametrize("file", sorted({each.file for each in MUTATIONS}))
def test_each_mistake_fits_its_file_once(file):
    text = (ROOT / file).read_text("utf-8")
    for mutation in MUTATIONS:
        if mutation.file == file:
            assert text.count(mutation.old) == 1, mutation
            assert mutation.new != mutation.old, mutation
            assert mutation.why, mutation
            ast.parse(text.replace(mutation.old, mutation.new))


def test_there_are_many_and_none_twice():
    assert len(MUTATIONS) >= 60
    assert len({(each.file, each.old, each.new) for each in MUTATIONS}) == len(MUTATIONS)


SCRIPT = """
import sys
from pathlib import Path
from simulate.mutate import Mutation, check, make_copy, read_mutations

tree = Path(sys.argv[1])
make_copy(tree)
why = "a shared block is freed with its first holder"
mutation = next(each for each in read_mutations() if each.why == why)
before = (tree / mutation.file).read_text("utf-8")
found = check(tree, mutation, seeds=10)
assert found.startswith("seed "), found
assert check(tree, mutation, seeds=0, killer=found, tests=False) == found
assert (tree / mutation.file).read_text("utf-8") == before
harmless = Mutation(mutation.file, "class BlockPool:", "class BlockPool:  # the same", "nothing")
assert check(tree, harmless, seeds=2, killer=found, tests=False) == ""
found = check(tree, mutation, seeds=0)
assert found.startswith("tests/engine/core/"), found
print("caught")
"""


@pytest.mark.process
def test_a_mistake_is_caught_and_taken_back(tmp_path):
    """In an interpreter that has no module of the tree in memory."""
    tests = ROOT / "tests"
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'packaging/tree'}:{tests}"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, tmp_path], env=env, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("caught\n", 0), done.stderr
