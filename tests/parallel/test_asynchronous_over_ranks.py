"""Asynchronous saves over ranks: same files while training communicates, and one rank's failure raised by all."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_llm.base.errors import StorageError
from lightning_llm.base.integrity import unseal
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.train.checkpoint import saver, tensor_storage
from lightning_llm.train.checkpoint.verification import newest_verified
from tests.parallel.traced_run import run_with
from tests.run_metrics import curve

write = saver.write


def overtaken_run(config: Config) -> None:
    """Train with every background write held until the next step is made, on each rank."""
    metrics = Path(config.run.dir, "metrics.jsonl")

    def held(folder: Path, snapshot: Any, *rest: Any) -> None:
        while snapshot.copies is not None and f'"step": {snapshot.step + 1},' not in metrics.read_text():
            time.sleep(0.002)
        write(folder, snapshot, *rest)

    with mock.patch.object(saver, "write", held):
        run_with(config)


def failing_run(config: Config) -> list[tuple[str, int]]:
    """Train where rank 1 cannot write the shards of step 1; return each rank's error and the steps it had made."""
    create = tensor_storage._HashingFileSystem.create_stream

    def refuse(self: Any, path: Any, mode: str) -> Any:
        if dist.get_rank() == 1 and ".step=1.partial" in str(path):
            raise OSError(28, "No space left on device")
        return create(self, path, mode)

    made = [0]
    with mock.patch.object(tensor_storage._HashingFileSystem, "create_stream", refuse):
        try:
            with mock.patch.object(saver.Saver, "failed", property(lambda self: counted(self, made))):
                run_with(config)
            ended = "it did not"
        except StorageError as error:
            ended = str(error)
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, (ended, made[0]))
    return of_all


def counted(self: saver.Saver, made: list[int]) -> bool:
    """Return on rank 1 whether the write has failed, when it has ended; rank 0 has not heard. Asked in each step."""
    made[0] += 1
    if dist.get_rank() == 0 or self._writing is None:
        return False
    self._writing.join()
    return self._writing.failure is not None


def files_of(config: Config, step: int) -> dict[str, Any]:
    return unseal(Path(config.run.dir, "checkpoints", f"step={step}", "manifest.json").read_bytes())["files"]


@pytest.mark.full
def test_the_files_are_those_of_synchronous_saves(ranks, small_run, tmp_path):
    runs = {}
    for name, asynchronous in (("sync", "false"), ("async", "true")):
        words = ["parallel=zero3", "trainer.devices=2", "data.micro_batch_size=1", "trainer.max_steps=3"]
        words += ["checkpoint.every_steps=1", "checkpoint.keep_last=3", f"checkpoint.asynchronous={asynchronous}"]
        runs[name] = compose_config(small_run(tmp_path / name, *words, "data.validation.fraction=0"))
    ranks(2).call(run_with_no_result, runs["sync"])
    ranks(2).call(overtaken_run, runs["async"])
    assert curve(Path(runs["async"].run.dir)) == curve(Path(runs["sync"].run.dir))
    for step in (1, 2, 3):
        assert files_of(runs["async"], step) == files_of(runs["sync"], step)
        assert len([name for name in files_of(runs["async"], step) if name.endswith(".distcp")]) == 2
    assert newest_verified(Path(runs["async"].run.dir, "checkpoints"))[1] == ()


def run_with_no_result(config: Config) -> None:
    run_with(config)


def test_one_ranks_failure_ends_the_run_on_all_after_the_same_step(ranks, small_run, tmp_path):
    words = ["parallel=zero3", "trainer.devices=2", "data.micro_batch_size=1", "checkpoint.every_steps=1"]
    words += ["checkpoint.asynchronous=true", "data.validation.fraction=0"]
    config = compose_config(small_run(tmp_path, *words))
    ended = ranks(2).call(failing_run, config)
    said = "the state of step 1 was not saved: rank 1: No space left on device"
    assert ended == [(said, 2), (said, 2)]  # it is asked in every step, and step 2 was the last
    assert list(Path(config.run.dir, "checkpoints").iterdir()) == []
