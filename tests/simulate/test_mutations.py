"""The list of mistakes that `make mutate` plants: each still fits its file, and a few are caught here."""

import ast

import pytest

from simulate.mutate import ROOT, Mutation, check, make_copy, read_mutations

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


@pytest.mark.process
def test_a_mistake_is_caught_and_taken_back(tmp_path):
    make_copy(tmp_path)
    mutation = next(each for each in MUTATIONS if each.why == "a shared block is freed with its first holder")
    before = (tmp_path / mutation.file).read_text("utf-8")
    found = check(tmp_path, mutation, seeds=10)
    assert found.startswith("seed ")
    assert check(tmp_path, mutation, seeds=0, killer=found, tests=False) == found
    assert (tmp_path / mutation.file).read_text("utf-8") == before
    harmless = Mutation(mutation.file, "class BlockPool:", "class BlockPool:  # the same", "nothing")
    assert check(tmp_path, harmless, seeds=2, killer=found, tests=False) == ""
