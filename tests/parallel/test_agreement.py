"""Ranks that were started by themselves agree on one config, or say that they do not."""

import torch.distributed as dist

from lightning_llm.compose import compose_config
from lightning_llm.errors import ConfigError
from lightning_llm.run import agree_on_config


def agreed(words: list[str], per_rank: list[list[str]]) -> tuple[list[str], str]:
    try:
        config = agree_on_config(compose_config([*words, *per_rank[dist.get_rank()]]))
    except ConfigError as error:
        return [], str(error)
    folders: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(folders, config.run.dir)
    return folders, ""


def test_one_folder_however_late_a_rank_composes(ranks, small_run, tmp_path):
    names = [[f"run.dir={tmp_path}/at-second-{rank}"] for rank in range(2)]
    folders, _ = ranks(2).call(agreed, small_run(tmp_path), names)
    assert folders == [f"{tmp_path}/at-second-0"] * 2


def test_another_config_is_refused_on_every_rank(ranks, small_run, tmp_path):
    _, said = ranks(2).call(agreed, small_run(tmp_path), [[], ["seed=3"]])
    assert "of rank(s) 1 differs from rank 0's" in said


def test_alone_there_is_nothing_to_agree_on():
    config = compose_config(["recipe=quickstart"])
    assert agree_on_config(config) is config
