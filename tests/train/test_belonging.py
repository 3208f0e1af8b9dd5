"""Ownership of the files in a run's folder: its checkpoints, records, data and tokenizer. 25 seconds."""

import errno
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_llm.__main__ import main
from lightning_llm.base.integrity import seal, unseal
from lightning_llm.config.from_file import load_config, set_run_folder
from lightning_llm.config.schema import CheckpointConfig
from lightning_llm.config.workspace import resume_command
from lightning_llm.run import agreement
from lightning_llm.tracking.files import damaged_record, summary_of, write_json
from lightning_llm.train.checkpoint.checkpointing import Checkpointing
from lightning_llm.train.checkpoint.manifest import RunIdentity, open_checkpoint
from lightning_llm.train.checkpoint.retention import prune, put_in_place, supersede
from lightning_llm.train.checkpoint.verification import newest_verified
from tests.run_metrics import curve, same_weights, steps_saved


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A copy of `whole`, with checkpoints at 4 and 6."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture(scope="module")
def other_seed(tmp_path_factory, small_run) -> Path:
    """The folder of a run that differs in its seed."""
    folder = tmp_path_factory.mktemp("other")
    assert main(["train", *small_run(folder, "seed=1", "data.validation.fraction=0")]) == 0
    return folder / "run"


def with_run_id(checkpoint: Path, run_id: str | None) -> None:
    """Write the manifest as another run would have, or with None as an earlier release did."""
    manifest = checkpoint / "manifest.json"
    values = {key: value for key, value in unseal(manifest.read_bytes()).items() if key not in ("run_id", "written_in")}
    manifest.write_bytes(seal(values if run_id is None else {**values, "run_id": run_id, "written_in": "/there"}))


def forget(folder: Path, *keys: str) -> None:
    """Take `keys` out of the run's summary."""
    write_json(folder / "summary.json", {k: v for k, v in summary_of(folder).items() if k not in keys})


def put_foreign(run: Path, other: Path) -> Path:
    """Put the other run's step=6 in the place of the run's own."""
    shutil.rmtree(run / "checkpoints" / "step=6")
    return Path(shutil.copytree(other / "checkpoints" / "step=6", run / "checkpoints" / "step=6"))


@pytest.mark.full
def test_checkpoints_of_other_runs_are_skipped_and_kept(run, whole, other_seed, tmp_path, small_run, capsys):
    foreign = put_foreign(run, other_seed)
    held = sorted((file.name, file.read_bytes()) for file in foreign.rglob("*") if file.is_file())
    assert main(["train", *small_run(tmp_path, f"resume={foreign}")]) == 2
    told = capsys.readouterr().err
    assert f"{foreign}/manifest.json: is of another run (run id " in told
    assert f"written in {other_seed}; here it is {summary_of(run)['run_id'][:8]})" in told
    assert main(["probe", str(foreign), "precision=mxfp8"]) == 2
    assert "is of another run" in capsys.readouterr().err
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert "skipped step=6, which is from another run: manifest.json is of another run" in capsys.readouterr().out
    assert curve(run) == curve(whole)
    assert same_weights(run, whole, 6)
    kept = run / "checkpoints" / "damaged" / "step=6"
    assert sorted((file.name, file.read_bytes()) for file in kept.rglob("*") if file.is_file()) == held


def test_a_new_folder_is_a_new_run(run, whole, tmp_path, small_run, capsys):
    step = run / "checkpoints" / "step=4"
    assert main(["train", *small_run(tmp_path / "new", f"resume={step}")]) == 0
    first, new = summary_of(run), summary_of(tmp_path / "new" / "run")
    assert (first["begun_at_step"], new["begun_at_step"]) == (0, 4)
    assert first["run_id"] != new["run_id"]
    checkpoints = tmp_path / "new" / "run" / "checkpoints"
    assert {open_checkpoint(path).run_id for path in checkpoints.iterdir()} == {new["run_id"]}
    moved = Path(shutil.move(tmp_path / "new" / "run", tmp_path / "moved" / "run"))
    assert main(["train", *small_run(moved.parent, "resume=auto", "trainer.max_steps=7")]) == 0
    assert summary_of(moved)["run_id"] == new["run_id"]
    assert summary_of(moved)["begun_at_step"] == 4
    assert steps_saved(moved) == [6, 7]


def test_checkpoints_of_earlier_releases_have_no_run_id(run, whole, tmp_path, small_run, capsys):
    for path in (run / "checkpoints").iterdir():
        with_run_id(path, None)
    assert main(["train", *small_run(tmp_path, f"resume={run}")]) == 2  # begun by this release, which writes ids
    assert "manifest.json: names no run, as those of earlier releases do (run id: here it is" in capsys.readouterr().err
    forget(run, "run_id", "begun_at_step")
    assert main(["train", *small_run(tmp_path, f"resume={run / 'checkpoints' / 'step=4'}")]) == 0
    assert same_weights(run, whole, 6)
    summary, own = summary_of(run), open_checkpoint(run / "checkpoints" / "step=6")
    assert own.run_id == summary["run_id"] is not None
    assert "begun_at_step" not in summary
    chosen, passed_over = newest_verified(run / "checkpoints")
    assert (chosen, passed_over) == (own, ())
    assert RunIdentity.from_summary(summary).foreign(open_checkpoint(run / "checkpoints" / "step=4")) is None


def test_a_lost_summary_costs_no_checkpoint(run, whole, tmp_path, small_run):
    known = summary_of(run)["run_id"]
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step=6")
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert same_weights(run, whole, 6)
    assert summary_of(run)["run_id"] == known
    assert {open_checkpoint(run / "checkpoints" / f"step={step}").run_id for step in (4, 6)} == {known}


def test_nothing_of_another_run_and_nothing_behind_a_link_is_removed(run, tmp_path):
    folder, own = run / "checkpoints", RunIdentity.from_summary(summary_of(run))
    outside = tmp_path / "outside"
    shutil.move(folder / "step=4", outside)
    (folder / "step=4").symlink_to(os.path.relpath(outside, folder))
    (folder / ".step=2.partial").symlink_to(outside)
    held = sorted(outside.rglob("*"))
    shutil.copytree(folder / "step=6", folder / ".new")
    with_run_id(folder / "step=6", "another")
    put_in_place(folder / "step=6", folder / ".new", own)
    assert open_checkpoint(folder / "damaged" / "step=6").run_id == "another"
    shutil.copytree(folder / "damaged" / "step=6", folder / "step=5")
    manifest = folder / "step=5" / "manifest.json"
    progress = folder / "step=5" / "progress.json"
    progress.write_bytes(progress.read_bytes().replace(b'"step": 6', b'"step": 5'))
    values = {**unseal(manifest.read_bytes()), "step": 5}
    values["files"]["progress.json"] = {"bytes": progress.stat().st_size, "digest": None}
    manifest.write_bytes(seal(values))
    prune(folder, CheckpointConfig(every_steps=2, keep_last=1), own)
    assert {path.name for path in folder.iterdir()} == {"step=6", "step=5", "damaged"}  # the link to step 4 is gone
    (folder / "step=8").symlink_to(os.path.relpath(outside, folder))
    supersede(folder, 6)
    assert (folder / "superseded" / "step=8").resolve() == outside
    prune(folder, CheckpointConfig(every_steps=2, keep_last=1), own)
    assert not (folder / "superseded").exists()
    assert sorted(outside.rglob("*")) == held


def test_digits_of_other_scripts_name_no_step(run, whole, tmp_path, small_run, capsys):
    other = Path(shutil.copytree(run / "checkpoints" / "step=6", run / "checkpoints" / "step=٧"))
    assert newest_verified(run / "checkpoints")[0].step == 6
    assert newest_verified(run / "checkpoints")[1] == ()
    assert main(["train", *small_run(tmp_path, f"resume={other}")]) == 2
    assert "manifest.json: is of step 6, which contradicts the folder's name" in capsys.readouterr().err


def without(file: Path, *steps: int) -> None:
    """Take out the records of `steps`, validation's too."""
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["step"] not in steps))


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ((1,), "step=4/metrics.jsonl: has no record of step 1"),
        ((2, 3, 6), "step=6/metrics.jsonl: has no records of steps 2-3, 6"),
        ((), "step=6/metrics.jsonl: is missing, with the records of steps 1-6"),
    ],
)
def test_records_that_are_missing_are_named_and_nothing_is_changed(run, tmp_path, small_run, capsys, lost, told):
    file = run / "metrics.jsonl"
    if lost:
        without(file, *lost)
    else:
        file.unlink()
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    assert main(["train", *small_run(tmp_path, "resume=auto", "trainer.max_steps=7")]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before
    if not lost:
        advised = shlex.split(
            said.partition("(to continue in a new folder without these metrics: ")[2].partition(")")[0]
        )
        words = [*advised[advised.index("train") :], f"run.root={tmp_path}"]
        assert main([*words, "trainer.max_steps=6"]) == 2  # the checkpoint's step
        assert "the step of the checkpoint, for a new folder" in capsys.readouterr().err
        assert main(words) == 0
        assert steps_saved(tmp_path / "default" / "NEW") == [6, 7]


def test_a_gap_after_a_checkpoint_leaves_that_one_whole(run, whole, tmp_path, small_run, capsys):
    without(run / "metrics.jsonl", 5)
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert "skipped step=6, which is damaged: metrics.jsonl has no record of step 5" in capsys.readouterr().out
    assert curve(run) == curve(whole)


def test_records_begin_where_the_folder_does(run, tmp_path, small_run, capsys):
    words = small_run(tmp_path / "new", "trainer.max_steps=7", "checkpoint.keep_last=3")
    new = tmp_path / "new" / "run"
    assert main(["train", *words, f"resume={run / 'checkpoints' / 'step=4'}"]) == 0
    assert main(["train", *words, "resume=auto"]) == 0
    assert "is finished at step 7" in capsys.readouterr().out
    without(new / "metrics.jsonl", 5)
    assert main(["train", *words, "resume=auto", "trainer.max_steps=8"]) == 0
    told = capsys.readouterr().out
    assert "skipped step=7, which is damaged: metrics.jsonl has no record of step 5" in told
    assert "resume from step 4" in told


def test_what_an_earlier_release_left_open(tmp_path):
    """Its summary does not say at which step the folder began."""
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (3, 4, 6)))
    assert damaged_record(file, 4, 4, or_earlier=True) is None
    assert damaged_record(file, 4, 2) is None
    assert damaged_record(file, 4, 1) == "has no record of step 2"
    assert damaged_record(file, 9, 0) == "has no records of steps 1-2, 5, 7-9"
    assert damaged_record(file, 15, 4, or_earlier=True) == "has no records of steps 5, 7-15"
    assert damaged_record(tmp_path / "none", 4, 4, or_earlier=True) is None


def test_a_run_that_died_before_it_had_its_own_start_begins_there_again(whole, tmp_path, small_run, monkeypatch):
    begin = f"resume={whole / 'checkpoints' / 'step=4'}"
    for words in (begin, "resume=auto"):
        with monkeypatch.context() as patch:
            patch.setattr(Checkpointing, "on_train_start", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                main(["train", *small_run(tmp_path, words)])
        assert steps_saved(tmp_path / "run") == []
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert curve(tmp_path / "run") == [entry for entry in curve(whole) if entry[0] > 4]
    assert same_weights(tmp_path / "run", whole, 6)


def test_a_run_with_relative_paths_resumes_from_any_folder(whole, corpus_folder, tmp_path, small_run, monkeypatch):
    """The command that it prints, in another folder; and the data may move, as long as they are the same."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    shutil.copy(corpus_folder / "documents.jsonl", home)
    relative = ["data.sources.jsonl.path=documents.jsonl", "data.cache_dir=cache", "schedule.total_steps=6"]
    monkeypatch.chdir(home)
    assert main(["train", *small_run(tmp_path, *relative, "trainer.max_steps=2")]) == 0
    monkeypatch.chdir(elsewhere)
    printed = shlex.split(resume_command(tmp_path / "run", "trainer.max_steps=4"))
    assert main(printed[printed.index("train") :]) == 0
    assert list(elsewhere.iterdir()) == []
    shutil.move(home / "documents.jsonl", elsewhere)
    assert main(["train", *small_run(tmp_path, *relative, "resume=auto")]) == 0
    assert [entry[:5] for entry in curve(tmp_path / "run") if entry[2]] == [
        entry[:5] for entry in curve(whole) if entry[2]
    ]


def test_a_run_of_an_earlier_release_with_a_relative_path_resumes(run, corpus_folder, tmp_path, small_run, monkeypatch):
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(f"path: {corpus_folder}/", "path: "))
    assert "path: documents.jsonl\n" in config.read_text()
    forget(run, "data_hash")
    monkeypatch.chdir(corpus_folder)
    assert main(["train", *small_run(tmp_path, "resume=auto", "trainer.max_steps=6")]) == 0


def test_a_copied_or_moved_run_continues_in_the_folder_of_its_config(run, whole, tmp_path, small_run, capsys):
    def resume(folder: Path, *words: str) -> int:
        return main(["train", "--config", str(folder / "config.yaml"), "resume=auto", *words])

    before = {file: file.read_bytes() for file in whole.rglob("*") if file.is_file()}
    assert resume(run, "trainer.max_steps=7", "trainer.validate_every_steps=null") == 0
    assert (
        f"the run was moved from {whole} and continues in {run}. {whole} still contains a run"
        in capsys.readouterr().out
    )
    assert {file: file.read_bytes() for file in whole.rglob("*") if file.is_file()} == before
    assert load_config(run / "config.yaml", []).run.dir == str(run)
    moved = run.rename(tmp_path / "moved")
    assert main(["train", "--config", str(moved / "config.yaml"), "resume=null"]) == 2
    assert f"run.dir: {moved} already contains a run. Set resume=auto" in capsys.readouterr().err
    assert resume(moved) == 0
    assert "is finished at step 7" in capsys.readouterr().out
    assert not run.exists()
    link = tmp_path / "link"
    link.symlink_to(moved)
    assert load_config(link / "config.yaml", []).run.dir == str(link)  # the recorded folder is gone
    assert main(["train", *small_run(tmp_path, f"run.dir={link}", f"resume={moved}/checkpoints/step=6")]) == 0
    assert f"{link} is finished at step 6" in capsys.readouterr().out  # its own run's checkpoint, by another name


def test_the_root_of_runs_moves_with_them(tmp_path):
    recorded = {"run": {"root": "/gone/outputs", "dir": "/gone/outputs/experiment/sweep/3"}}

    def placed(folder: Path) -> tuple[str, str]:
        folder.mkdir(parents=True)
        (folder / "summary.json").touch()
        tree = OmegaConf.create(recorded)
        set_run_folder(tree, folder / "config.yaml")
        return tree.run.root, tree.run.dir

    whole = tmp_path / "disk" / "experiment" / "sweep" / "3"
    assert placed(whole) == (str(tmp_path / "disk"), str(whole))
    renamed = tmp_path / "a" / "b" / "c" / "d"
    assert placed(renamed) == (str(tmp_path / "a"), str(renamed))
    tree = OmegaConf.create(recorded)
    set_run_folder(tree, tmp_path / "config.yaml")  # a copy of the file alone
    assert tree == recorded


def test_changed_data_under_the_same_name_are_rejected(run, corpus_folder, tmp_path, small_run, capsys):
    other = tmp_path / "documents.jsonl"
    other.write_text((corpus_folder / "documents.jsonl").read_text() + '{"text": "one document more"}\n')
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    words = small_run(tmp_path, "resume=auto", "trainer.max_steps=7", f"data.sources.jsonl.path={other}")
    assert main(["train", *words]) == 2
    assert f"data: changed since {run / 'checkpoints' / 'step=6'} was trained" in capsys.readouterr().err
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_a_damaged_tokenizer_is_noticed_and_written_anew(run, whole, tmp_path, small_run, capsys):
    file = run / "tokenizer.json"
    for damage in (lambda: file.write_text(file.read_text().replace("the", "teh", 1)), file.unlink):
        damage()
        assert main(["probe", str(run), "precision=mxfp8"]) == 2
        said = capsys.readouterr().err
        assert f"{file}: {'was changed or is damaged' if file.is_file() else 'is missing'}" in said
    shutil.rmtree(run / "checkpoints" / "step=6")
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert f"note   {file} is missing; it is written again" in capsys.readouterr().out
    assert file.read_bytes() == (whole / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk_before_the_first_step_is_one_problem_and_leaves_nothing(
    there, tmp_path, small_run, monkeypatch, capsys
):
    def write_some_of_it(config, file):
        file.write_text("recipe: ")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(agreement, "write_config", write_some_of_it)
    if there:
        (tmp_path / "run").mkdir()
    assert main(["train", *small_run(tmp_path)]) == 2
    assert f"run.dir: {tmp_path / 'run'} cannot be written (No space left on device)" in capsys.readouterr().err
    assert (tmp_path / "run").exists() == there
    monkeypatch.undo()
    assert main(["train", *small_run(tmp_path, "trainer.max_steps=1")]) == 0
