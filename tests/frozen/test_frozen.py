"""Hashes, plans, verdicts, keys of files, verbs and flags are the recorded ones. `make frozen` adds the goldens.

After an intended change, `make frozen-record` writes the files again, and the commit gives the reason.
"""

import tarfile
from difflib import unified_diff

import pytest

from lightning_llm.__main__ import main
from lightning_llm.plan.check import check_config
from tests.frozen.frozen_facts import (
    HERE,
    SWEEPS,
    composed,
    config_lines,
    file_key_lines,
    plan_lines,
    recipes,
    sweep_lines,
    verb_lines,
    verdict_lines,
)
from tests.small_runs import small_words, write_corpus

COMPOSED_BY_DEFAULT = ("precision_shootout",)
ARCHIVES = sorted(file.name.removesuffix(".tar.xz") for file in HERE.glob("*.tar.xz"))


def difference(name: str, now: list[str]) -> list[str]:
    """Return a diff from the recorded lines of `name` to the lines `now`; empty where they are equal."""
    return list(unified_diff((HERE / name).read_text().splitlines(), now, "recorded", "now", lineterm="", n=0))


def test_config_and_recipe_hashes_are_the_recorded_ones():
    assert difference("configs.txt", config_lines()) == []


@pytest.mark.parametrize(
    "name", [each if each in COMPOSED_BY_DEFAULT else pytest.param(each, marks=pytest.mark.full) for each in SWEEPS]
)
def test_hashes_of_sweep_jobs_are_the_recorded_ones(name):
    assert difference(f"sweeps/{name}.txt", sweep_lines(name)) == []


@pytest.mark.parametrize("override", recipes())
def test_recipes_pass_the_check_and_plans_are_the_recorded_ones(override):
    config = composed(override)
    check_config(config)
    assert config.recipe == override.removeprefix("recipe=")
    assert difference(f"plans/{override.removeprefix('recipe=')}.txt", plan_lines(override)) == []


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("archive", ARCHIVES)
def test_verdicts_over_stored_sweeps_are_the_recorded_ones(archive, tmp_path):
    with tarfile.open(HERE / f"{archive}.tar.xz") as runs:
        runs.extractall(tmp_path / "sweep", filter="data")
    assert difference(f"{archive}.txt", verdict_lines(tmp_path / "sweep", tmp_path / "report")) == []


def test_keys_of_the_files_of_a_run_are_the_recorded_ones(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # a run before, in this process, has set it
    assert main(["train", *small_words(write_corpus(tmp_path / "corpus"), tmp_path)]) == 0
    assert difference("keys.txt", file_key_lines(tmp_path / "run")) == []


def test_verbs_and_flags_are_the_recorded_ones():
    assert difference("verbs.txt", verb_lines()) == []
