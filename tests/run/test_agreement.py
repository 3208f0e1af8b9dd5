"""Ranks that were started by themselves agree on one config, or say that they do not."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_llm.base.errors import AgreedError, ConfigError, Problem
from lightning_llm.config.compose import compose_config
from lightning_llm.plan.resolve import Plan, plan_of
from lightning_llm.precision.linear.swap import EMULATED
from lightning_llm.precision.native.decide import Decision
from lightning_llm.run.inputs import agree_on_data
from lightning_llm.run.opening import agree_on_plan
from lightning_llm.run.resume.start import Start
from lightning_llm.train.checkpoint.manifest import Checkpoint


def agreed(words: list[str], per_rank: list[list[str]]) -> tuple[list[str], str]:
    try:
        plan = agree_on_plan(plan_of(compose_config([*words, *per_rank[dist.get_rank()]])))
    except ConfigError as error:
        return [], str(error)
    folders: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(folders, plan.config.run.dir)
    return folders, ""


def test_one_folder_however_late_a_rank_composes(ranks, small_run, tmp_path):
    names = [[f"run.dir={tmp_path}/at-second-{rank}"] for rank in range(2)]
    folders, _ = ranks(2).call(agreed, small_run(tmp_path), names)
    assert folders == [f"{tmp_path}/at-second-0"] * 2


def test_another_config_is_refused_on_every_rank(ranks, small_run, tmp_path):
    _, said = ranks(2).call(agreed, small_run(tmp_path), [[], ["seed=3"]])
    assert "rank(s) 1 differ from rank 0" in said


def answers(plan: Plan, decisions: list[Decision], refusals: list[ConfigError | None]) -> list[list[str]]:
    """Return the error of each rank if one of them cannot train."""
    rank = dist.get_rank()
    told: list[list[str]] = [[]] * dist.get_world_size()
    try:
        agree_on_plan(replace(plan, decision=decisions[rank]), refusals[rank])
        said = []
    except AgreedError as error:
        said = [str(each) for each in error.problems]
    dist.all_gather_object(told, said)
    return told


def test_problems_of_one_rank_are_raised_on_all_ranks(ranks, small_run, tmp_path):
    plan = plan_of(compose_config(small_run(tmp_path)))
    refusal = ConfigError([Problem("precision.backend", "is native."), Problem("callbacks.x", "is no callback.")])
    told = ranks(2).call(answers, plan, [EMULATED, EMULATED], [None, refusal])
    assert told == [["precision.backend: on rank(s) 1 is native.", "callbacks.x: on rank(s) 1 is no callback."]] * 2
    told = ranks(2).call(answers, plan, [EMULATED, EMULATED], [refusal, refusal])
    assert told == [["precision.backend: is native.", "callbacks.x: is no callback."]] * 2


def test_ranks_do_not_run_casts_each_in_another_way(ranks, small_run, tmp_path):
    plan = plan_of(compose_config(small_run(tmp_path)))
    told = ranks(2).call(answers, plan, [Decision("native"), EMULATED], [None, None])
    text = "casts would be native on rank 0 and emulated on rank(s) 1."
    assert [text in said for (said,) in told] == [True, True]


def told_of_data(fingerprints: list[str], start: Start) -> list[str]:
    """Return the error of each rank about the data that it found."""
    said = ""
    try:
        agree_on_data(fingerprints[dist.get_rank()], start)
    except AgreedError as error:
        (problem,) = error.problems
        said = str(problem)
    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, said)
    return told


def test_ranks_train_on_one_text_and_a_resumed_run_on_its_own(ranks):
    resumed = Start(Checkpoint(Path("/run/checkpoints/step=4"), 4, "", {}, {}), data_hash="aaaa")
    for start in (Start(), resumed):
        assert ranks(2).call(told_of_data, ["aaaa", "aaaa"], start) == ["", ""]
        others = ranks(2).call(told_of_data, ["aaaa", "bbbb"], start)
        assert others == ["data: differ on rank(s) 1 from rank 0. Give every node the same files."] * 2
    changed = ranks(2).call(told_of_data, ["bbbb", "bbbb"], resumed)
    assert ["data: changed since /run/checkpoints/step=4 was trained" in text for text in changed] == [True, True]


def test_errors_survive_pickling_between_processes():
    error = pickle.loads(pickle.dumps(AgreedError([Problem("a", "is b."), Problem("c", "is d.")])))
    assert type(error) is AgreedError
    assert error.problems == [Problem("a", "is b."), Problem("c", "is d.")]
    assert str(error) == "a: is b.\nc: is d."


def test_a_single_rank_agrees_with_itself():
    plan = plan_of(compose_config(["recipe=quickstart"]))
    assert agree_on_plan(plan) is plan
    with pytest.raises(ConfigError, match="callbacks"):
        agree_on_plan(plan, refusal=ConfigError(Problem("callbacks", "are none.")))
