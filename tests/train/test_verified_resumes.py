"""Records and config of a run are verified when it resumes. 20 seconds."""

import json
import shutil
from functools import reduce
from hashlib import blake2b
from pathlib import Path

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.base.integrity import sync_to_disk, unseal
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_digest, flatten
from lightning_llm.config.yaml_file import config_text
from lightning_llm.model.decoder import Decoder
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.reading import read_run
from lightning_llm.train.checkpoint import saver
from lightning_llm.train.checkpoint.manifest import step_folders
from tests.planted import infinite_gradient
from tests.run_metrics import curve, same_weights


def chain(lines: list[bytes]) -> str:
    """Return the head of the hash chain as docs/reference/checkpoints.md defines it."""
    return reduce(lambda digest, line: blake2b(digest + line, digest_size=16).digest(), lines, bytes(16)).hex()


def lines_of(run: Path, up_to_step: int = 1 << 40) -> list[bytes]:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    return [line for line in lines if json.loads(line)["step"] <= up_to_step]


def manifest_of(run: Path, step: int) -> dict:
    return unseal((run / "checkpoints" / f"step={step}" / "manifest.json").read_bytes())


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A copy of `whole`, with checkpoints at 4 and 6."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_manifests_and_summary_have_seed_config_and_the_chain_of_the_records(whole):
    summary = summary_of(whole)
    assert (summary["records"]["lines"], summary["records"]["chain"]) == (len(lines_of(whole)), chain(lines_of(whole)))
    for step in (4, 6):
        manifest, own = manifest_of(whole, step), lines_of(whole, step)
        assert manifest["records"] == {"lines": len(own), "chain": chain(own)}
        assert [manifest[key] for key in ("run_id", "seed", "config_digest")] == [
            summary[key] for key in ("run_id", "seed", "config_digest")
        ]
        assert manifest["frozen_config"]["seed"] == summary["seed"] == 0
        assert manifest["frozen_config"]["precision.name"] == "fp32"
        assert not {"trainer.max_steps", "run.name"} & set(manifest["frozen_config"])
    assert summary["config_digest"] == config_digest(flatten(yaml.safe_load((whole / "config.yaml").read_text())))
    assert read_run(whole).unverified == ""


@pytest.mark.parametrize("words", [["recipe=quickstart"], ["precision=mxfp4_sr", "optim=muon"]])
def test_a_configs_digest_is_that_of_its_file(words):
    config = compose_config([*words, "model=llama_tiny", "logger=none"])
    of_file = flatten(yaml.safe_load(config_text(config)))
    assert config_digest(of_file) == config_digest(flatten(config.model_dump()))
    assert config_digest({**of_file, "seed": 1}) != config_digest(of_file)
    free = {"trainer.max_steps": 9, "run.name": "other", "data.sources.code.path": "/moved"}
    assert config_digest({**of_file, **free}) == config_digest(of_file)


def test_the_hash_chain_continues_over_a_resume_without_steps_not_made(tmp_path, small_run, monkeypatch):
    """The line of a step without an update comes after the checkpoint that this step causes."""
    words = small_run(tmp_path, "spikes.policy=stop", "checkpoint.every_steps=2")
    run = tmp_path / "run"
    with monkeypatch.context() as patch:  # two micro-batches a step
        patch.setattr(Decoder, "forward", infinite_gradient(Decoder.forward, lambda n: n == 8))
        assert main(["train", *words]) == 1
    assert [json.loads(line)["step"] for line in lines_of(run)][-1] == 5
    assert summary_of(run)["records"]["chain"] == chain(lines_of(run))
    assert manifest_of(run, 4)["records"]["chain"] == chain(lines_of(run, 4))
    assert main(["train", *words, "resume=auto"]) == 0
    assert summary_of(run)["records"]["chain"] == chain(lines_of(run)) == manifest_of(run, 6)["records"]["chain"]


def test_an_edited_config_is_rejected_on_resume_with_each_key(run, capsys):
    file = run / "config.yaml"
    written, before = file.read_text(), sorted(run.rglob("*"))
    tree = yaml.safe_load(written)
    was = (tree["precision"]["name"], tree["optim"]["learning_rate"])
    tree["precision"] |= {"name": "bf16", "compute_dtype": "bf16"}
    tree["optim"]["learning_rate"] /= 2
    tree["seed"], tree["trainer"]["max_steps"] = 7, 8
    file.write_text(yaml.safe_dump(tree))
    capsys.readouterr()
    for resume in ("auto", run):
        assert main(["train", "--config", str(file), f"run.dir={run}", f"resume={resume}"]) == 2
        told = capsys.readouterr().err
        assert f"precision.name: is 'bf16' in {file}, but was {was[0]!r} when step=6 was saved. Set it back" in told
        assert f"optim.learning_rate: is {was[1] / 2!r} in {file}, but was {was[1]!r}" in told
        assert f"seed: is 7 in {file}, but was 0" in told
        assert "max_steps" not in told
    other = ["run.dir=" + str(run.parent / "other"), "run.name=other", "trainer.max_steps=8"]
    for words in ([f"branch_from={run}"], [f"resume={run}"], [f"model.init_from={run}"]):
        assert main(["train", "--config", str(file), *other, *words]) == 2
        assert f"is 7 in {file}, but was 0 when" in capsys.readouterr().err
    assert main(["probe", str(run), "precision=mxfp8"]) == 2
    assert f"seed: is 7 in {file}" in capsys.readouterr().err
    assert sorted(run.rglob("*")) == before
    file.write_text(written)
    assert main(["train", "--config", str(file), f"run.dir={run}", "resume=auto", "trainer.max_steps=7"]) == 0


def test_records_that_were_edited_are_not_gone_on_from(run, whole, tmp_path, small_run, capsys):
    """A checkpoint with complete records is accepted; without one, nothing changes."""
    lines = lines_of(run)
    edited = [line.replace(b'"loss": ', b'"loss": 1') if json.loads(line)["step"] == 5 else line for line in lines]
    (run / "metrics.jsonl").write_bytes(b"".join(edited))
    words = small_run(tmp_path, "resume=auto")
    assert main(["train", *words]) == 0
    told = capsys.readouterr().out
    changed = f"metrics.jsonl was changed up to step 6: one of its {len(lines)} lines was edited"
    assert f"skipped step=6, which is damaged: {changed}" in told
    assert curve(run) == curve(whole)
    assert same_weights(run, whole, 6)
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], *lines]))
    before = (run / "metrics.jsonl").read_bytes()
    assert main(["train", *words, "trainer.max_steps=7"]) == 2
    told = capsys.readouterr().err
    assert f"step=6/metrics.jsonl: has {len(lines) + 1} lines up to step 6, but {len(lines)} were written" in told
    assert (run / "metrics.jsonl").read_bytes() == before


def test_checkpoints_are_in_order_of_their_numbers(tmp_path):
    for step in (9, 1000, 10, 900, 100):
        (tmp_path / f"step={step}").mkdir()
    assert [path.name for path in step_folders(tmp_path)] == ["step=1000", "step=900", "step=100", "step=10", "step=9"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, small_run, monkeypatch):
    """All of its files and folders first, its name last: a power failure leaves it whole or without a name."""
    synced: list[Path] = []
    named: list[tuple[Path, set[Path], set[Path]]] = []
    put_in_place = saver.put_in_place

    def spied(path: Path) -> None:
        synced.append(path)
        sync_to_disk(path)

    def give_name(final: Path, partial: Path, run) -> None:
        named.append((final, {partial, *partial.rglob("*")}, set(synced)))
        put_in_place(final, partial, run)
        synced.clear()

    monkeypatch.setattr(saver, "sync_to_disk", spied)
    monkeypatch.setattr(saver, "put_in_place", give_name)
    assert main(["train", *small_run(tmp_path, "trainer.max_steps=2")]) == 0
    assert [final.name for final, _, _ in named] == ["step=2"]
    for _, there, on_disk in named:
        tensors = {path for path in there if path.parent.name == "tensors"}  # synced by their writer
        assert there - tensors <= on_disk
    assert synced == [tmp_path / "run" / "checkpoints"]
