"""Kept checkpoints: the newest, every Nth, the best by val_loss; and the disk that is planned for them."""

import json
import random
from math import inf, nan

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.base.integrity import unseal
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import CheckpointConfig
from lightning_llm.plan.checkpoints import kept_checkpoints
from lightning_llm.train.checkpoint import saver
from lightning_llm.train.checkpoint.manifest import RunIdentity, step_folders
from lightning_llm.train.checkpoint.retention import NONE, kept_steps, put_in_place, supersede
from lightning_llm.train.checkpoint.snapshot import Snapshot
from tests.run_metrics import read_metrics, steps_saved


def test_the_union_of_the_three_stays():
    keep = CheckpointConfig(every_steps=10, keep_last=2, keep_every=40, keep_best=2)
    losses = {10: 3.0, 20: 1.0, 30: nan, 40: 2.0, 50: 1.0, 60: 1.0, 70: inf}
    assert kept_steps([10, 20, 30, 40, 50, 60, 70, 80, 90], keep, losses) == {20, 40, 50, 80, 90}
    more = CheckpointConfig(every_steps=10, keep_last=1, keep_best=9)
    assert kept_steps([10, 20, 30, 40, 70, 80, 90], more, losses) == {10, 20, 40, 90}  # none of no finite loss
    last = CheckpointConfig(every_steps=10, keep_last=1)
    assert kept_steps([10, 20, 30], last, losses) == {30}
    assert kept_steps([], keep, losses) == set()


def test_steps_are_numbers_and_not_text(tmp_path):
    """Text would sort 9 above 100, and resume would go back to it."""
    for step in (9, 100, 10, 1000):
        (tmp_path / f"step={step}").mkdir()
    for other in ("step=12.old", ".step=2000.partial", "step=", "step=x"):
        (tmp_path / other).mkdir()
    assert [path.name for path in step_folders(tmp_path)] == ["step=1000", "step=100", "step=10", "step=9"]
    last = CheckpointConfig(every_steps=1, keep_last=2)
    assert kept_steps([9, 100, 10, 1000], last, NONE) == {100, 1000}
    supersede(tmp_path, 10)
    assert [path.name for path in step_folders(tmp_path)] == ["step=10", "step=9"]
    assert {path.name for path in (tmp_path / "superseded").iterdir()} == {"step=100", "step=1000"}


def test_no_run_keeps_more_than_is_planned_and_some_as_many(tmp_path, small_run):
    draw, reached, config = random.Random(0), 0, compose_config(small_run(tmp_path))
    for _ in range(60):
        every, last, best = draw.randint(1, 3), draw.randint(1, 4), draw.randint(0, 3)
        multiple = draw.choice([None, *(every * n for n in (1, 2, 5))])
        steps = draw.randint(20, 40)
        keep = CheckpointConfig(every_steps=every, keep_last=last, keep_every=multiple, keep_best=best or None)
        trainer = config.trainer.model_copy(update={"max_steps": steps})
        planned = kept_checkpoints(config.model_copy(update={"checkpoint": keep, "trainer": trainer}))
        there, most, losses = set(), 0, {}
        for step in range(every, steps + 1, every):
            losses[step] = step + draw.random() if draw.random() < 0.7 else draw.random()
            there = kept_steps(there | {step}, keep, losses)
            most = max(most, len(there))
        assert most <= planned, keep
        reached += most == planned
    assert reached > 15


def test_the_best_checkpoints_are_kept_across_resumes(tmp_path, small_run, capsys):
    words = [
        "trainer.validate_every_steps=1",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=1",
        "schedule=constant",
    ]
    # a rate at which the loss soon rises, so that the best is none of the newest
    words += [
        "optim.learning_rate=1.0",
        "schedule.warmup_steps=0",
        "checkpoint.keep_best=1",
        "checkpoint.keep_every=4",
        "seed=1",
    ]
    for steps in (6, 9):
        assert main(["train", *small_run(tmp_path, *words, f"trainer.max_steps={steps}", "resume=auto")]) == 0
        losses = {each["step"]: each["val_loss"] for each in read_metrics(tmp_path / "run") if "val_loss" in each}
        best = min(losses, key=lambda step: (losses[step], step))
        assert best not in (4, 6, 8, 9)
        assert steps_saved(tmp_path / "run") == sorted({best, *range(4, steps + 1, 4), steps})
    capsys.readouterr()
    assert main(["plan", "--json", *small_run(tmp_path, *words, "trainer.max_steps=9")]) == 0
    disk = json.loads(capsys.readouterr().out)["disk"]
    folder = tmp_path / "run" / "checkpoints" / "step=9"
    written = sum(file.stat().st_size for file in folder.rglob("*.distcp"))
    assert disk["checkpoints"] == 1 + 1 + 2 + 1
    assert disk["bytes"] == disk["checkpoints"] * disk["checkpoint_bytes"]
    assert written == pytest.approx(disk["checkpoint_bytes"], rel=0.7)  # half a KB around each of its small tensors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["checkpoint.keep_every=3"], "checkpoint.keep_every: is 3, and checkpoint.every_steps=2 does not divide it"),
        (["checkpoint.keep_every=4", "checkpoint.every_steps=null"], "is 4, and only the last step is saved"),
        (
            ["checkpoint.keep_best=1"],
            "(every 2 steps), and validations are every 3 steps (trainer.validate_every_steps)",
        ),
        (["checkpoint.keep_best=1", "trainer.validate_every_steps=null"], "and validations are at the end only"),
        (["checkpoint.keep_best=1", "data.validation.fraction=0"], "checkpoint.keep_best: needs val_loss, and data"),
        (["checkpoint.keep_best=0"], "checkpoint.keep_best=0"),
    ],
)
def test_what_could_not_be_kept_is_refused(tmp_path, small_run, words, said, capsys):
    assert main(["plan", *small_run(tmp_path, *words)]) == 2
    assert said in capsys.readouterr().err


def test_a_checkpoint_has_its_name_only_when_every_file_of_it_is_on_the_disk(tmp_path, monkeypatch):
    """Whole files, then the folders that name them, then the name, then the folder that holds that."""
    events = []

    def synced(path):
        names = sorted(each.name for each in path.iterdir()) if path.is_dir() else len(path.read_bytes())
        events.append((path.relative_to(tmp_path).as_posix(), names))

    def replaced(final, partial, run):
        events.append((partial.name, final.name))
        put_in_place(final, partial, run)

    monkeypatch.setattr(saver, "sync_to_disk", synced)
    monkeypatch.setattr(saver, "put_in_place", replaced)
    content = {"progress.json": b"p" * 7, "precision.safetensors": b"q" * 300}
    weights = {"model": {"weight": torch.arange(12.0).view(3, 4)}}
    saver.write(tmp_path, Snapshot(9, weights, content), RunIdentity("run"), "hash")
    partial, final = ".step=9.partial", tmp_path / "step=9"
    names = [*content, "manifest.json"]
    sizes = {name: (final / name).stat().st_size for name in names}
    tensors = sorted(each.name for each in (final / "tensors").iterdir())
    assert tensors
    assert events == [
        *((f"{partial}/{name}", sizes[name]) for name in names),
        (f"{partial}/tensors", tensors),
        (partial, sorted([*names, "tensors"])),
        (partial, "step=9"),
        (".", ["step=9"]),
    ]
    manifest = unseal((final / "manifest.json").read_bytes())
    assert (manifest["step"], manifest["config_hash"]) == (9, "hash")
    assert set(manifest["files"]) == {*content, *(f"tensors/{name}" for name in tensors)}
