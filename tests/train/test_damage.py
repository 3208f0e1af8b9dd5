"""Messages about damaged, malicious and unwritable checkpoints, and of those of the first release. 30 seconds."""

import hashlib
import io
import json
import os
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.integrity import FileContent, seal, unseal
from lightning_llm.tracking.files import cut_back, summary_of
from lightning_llm.tracking.reading import read_run
from lightning_llm.train import run_folder
from lightning_llm.train.checkpoint.manifest import open_checkpoint
from tests.run_metrics import curve, read_metrics, read_tensors, same_weights, steps_saved

FIRST_RELEASE = Path(__file__).parent / "run_of_dc39dec.tar.xz"
"""A run of 4 steps saved by zero3 over two ranks at commit dc39dec: checkpoint version 2, fp8_delayed."""
FIRST_RELEASE_STEPS = [(5, 5.951011657714844), (6, 6.527736663818359)]
"""Losses of the steps after, as dc39dec went on to them."""


def contents(folder: Path) -> dict[str, str]:
    """Return a hash of every file by its path, and every folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    file.write_bytes(content)


def shards(checkpoint: Path) -> Path:
    (file,) = (checkpoint / "tensors").glob("*.distcp")
    return file


def reseal(checkpoint: Path) -> None:
    """Write the manifest that goes with the files as they are now, as a forger would."""
    manifest = checkpoint / "manifest.json"
    values = unseal(manifest.read_bytes())
    for name in values["files"]:
        written = FileContent.of((checkpoint / name).read_bytes())
        values["files"][name] = {"bytes": written.size_bytes, "digest": written.digest}
    manifest.write_bytes(seal(values))


class Exploit:
    """Unpickles by running a shell command that leaves a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A copy of `whole`, with checkpoints at 4 and 6."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def old_run(tmp_path) -> Path:
    """A run of the first release."""
    with tarfile.open(FIRST_RELEASE) as archive:
        archive.extractall(tmp_path, filter="data")
    config = tmp_path / "run" / "config.yaml"
    text = config.read_text().replace("@RUN@", str(tmp_path / "run")).replace("@ROOT@", str(tmp_path))
    config.write_text(text)
    return tmp_path / "run"


def resume_old(folder: Path, *words: str) -> int:
    single = ["parallel.dp_shard=1", "parallel.zero_stage=0", "trainer.devices=1", "world=null", "trainer.max_steps=6"]
    return main(["train", "--config", str(folder / "config.yaml"), "resume=auto", *single, *words])


def test_a_flipped_bit_falls_back_and_the_damaged_one_is_kept(run, whole, tmp_path, small_run, capsys):
    flip(shards(run / "checkpoints" / "step=6"))
    damaged = contents(run / "checkpoints" / "step=6")
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    told = capsys.readouterr()
    lines = [line for line in told.out.splitlines() if line.startswith("skipped step=")]
    assert len(lines) == 1
    assert "step=6" in lines[0]
    assert "tensors/__0_0.distcp was changed or is damaged" in lines[0]
    assert "Traceback" not in told.err
    assert curve(run) == curve(whole)
    assert same_weights(run, whole, 6)
    assert steps_saved(run) == [4, 6]
    assert contents(run / "checkpoints" / "damaged" / "step=6") == damaged
    assert not (run / "checkpoints" / "superseded").exists()


def test_a_run_killed_while_truncating_records_resumes_from_the_same_step(run, whole, tmp_path, small_run, monkeypatch):
    def cut_and_die(*arguments) -> int:
        cut_back(*arguments)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "cut_back", cut_and_die)
        assert main(["train", *small_run(tmp_path, f"resume={run}/checkpoints/step=4")]) == 2
    assert read_run(run).last_step == 4  # no damage: the summary has no end yet
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 0
    assert curve(run) == curve(whole)
    assert same_weights(run, whole, 6)


@pytest.mark.parametrize("resume", ["auto", "RUN", "RUN/checkpoints/step=6"])
def test_where_none_verifies_nothing_is_changed(run, tmp_path, small_run, capsys, resume):
    os.truncate(shards(run / "checkpoints" / "step=6"), 1000)
    flip(run / "checkpoints" / "step=4" / "tensors" / "metadata.json")
    before = contents(run)
    assert main(["train", *small_run(tmp_path, f"resume={resume.replace('RUN', str(run))}")]) == 2
    told = capsys.readouterr().err
    assert "step=6/tensors/__0_0.distcp: has 1,000 bytes of the" in told
    assert ("step=4/tensors/metadata.json: was changed" in told) == (not resume.endswith("step=6"))
    assert "Traceback" not in told
    assert contents(run) == before


def test_a_run_with_only_moved_aside_checkpoints_does_not_start_over(run, tmp_path, small_run, capsys):
    (run / "checkpoints" / "superseded").mkdir()
    shutil.rmtree(run / "checkpoints" / "step=4")
    aside = run / "checkpoints" / "superseded" / "step=6"
    (run / "checkpoints" / "step=6").rename(aside)
    assert main(["train", *small_run(tmp_path, "resume=auto")]) == 2
    assert f"{aside} may be intact: try resume=PATH" in capsys.readouterr().err
    assert main(["train", *small_run(tmp_path, f"resume={aside}", "trainer.max_steps=7")]) == 0
    assert steps_saved(run) == [6, 7]
    assert not aside.exists()


@pytest.mark.parametrize("verb", ["train", "probe"])
def test_a_malicious_pickle_of_the_first_release_does_not_run(old_run, tmp_path, capsys, verb):
    file = old_run / "checkpoints" / "step=4" / "tensors" / ".metadata"
    exploit, mark = tmp_path / "exploit", tmp_path / "ran"
    exploit.write_bytes(pickle.dumps(Exploit(mark)))
    file.write_bytes(exploit.read_bytes().ljust(file.stat().st_size, b"\0"))
    before = contents(old_run)
    if verb == "train":
        assert resume_old(old_run) == 2
    else:
        assert main(["probe", str(old_run)]) == 2
    told = capsys.readouterr().err
    assert "tensors/.metadata: is not a tensor description" in told
    assert "posix.system" in told
    assert not mark.exists()
    assert contents(old_run) == before
    pickle.loads(exploit.read_bytes())  # the exploit is one
    assert mark.exists()


def test_a_malicious_tensor_under_a_forged_manifest_does_not_run(run, tmp_path, small_run, capsys):
    """Records are as torch.save writes them, and their pickle another; digests are the forger's own."""
    checkpoint, mark = run / "checkpoints" / "step=6", tmp_path / "ran"
    described = json.loads((checkpoint / "tensors" / "metadata.json").read_text())
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Exploit(mark), protocol=2))
        archive.writestr("archive/version", "3\n")
    for entry in described["tensors"].values():
        for shard in entry["shards"]:
            shard[3:] = [0, len(made.getvalue())]
    (checkpoint / "tensors" / "metadata.json").write_text(json.dumps(described))
    shards(checkpoint).write_bytes(made.getvalue())
    reseal(checkpoint)
    before = contents(run)
    words = ["resume=auto", "trainer.max_steps=7"]
    assert main(["train", *small_run(tmp_path, *words)]) == 2
    told = capsys.readouterr().err
    assert f"{checkpoint} could not be loaded" in told
    assert "Traceback" not in told
    assert not mark.exists()
    assert contents(run) == before


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_state_of_callbacks_is_one_line(run, tmp_path, small_run, capsys, recwarn, protocol):
    checkpoint, mark = run / "checkpoints" / "step=6", tmp_path / "ran"
    (checkpoint / "callbacks.pt").write_bytes(pickle.dumps(Exploit(mark), protocol=protocol))
    reseal(checkpoint)
    before = contents(run)
    assert main(["train", *small_run(tmp_path, "resume=auto", "trainer.max_steps=7")]) == 2
    first, told = capsys.readouterr().err.splitlines()
    assert first == "error: 1 problem with the config or its inputs"
    what = "refers to posix.system, which is code; it was not run" if protocol == 2 else "contains no readable data"
    assert f"{checkpoint} could not be loaded: step=6: callbacks.pt {what}" in told
    assert "weights_only" not in told
    assert not [each for each in recwarn if "pickle" in str(each.message)]
    assert not mark.exists()
    assert contents(run) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.popitem(),
        lambda tensors: next(iter(tensors.values()))["shards"][0].__setitem__(2, "../../../other.distcp"),
        lambda tensors: next(iter(tensors.values())).update(dtype="load"),
        lambda tensors: next(iter(tensors.values()))["shards"].clear(),
        lambda tensors: next(iter(tensors.values()))["shards"][0].__setitem__(4, 1 << 40),
    ],
    ids=["a tensor less", "another file", "no dtype", "no shards", "beyond the file"],
)
def test_a_description_that_does_not_fit_changes_nothing(run, tmp_path, small_run, capsys, change):
    """Damage that digests cannot show is found before anything is removed: the newer checkpoint stays."""
    checkpoint = run / "checkpoints" / "step=4"
    described = json.loads((checkpoint / "tensors" / "metadata.json").read_text())
    change(described["tensors"])
    (checkpoint / "tensors" / "metadata.json").write_text(json.dumps(described))
    reseal(checkpoint)
    before = contents(run)
    assert main(["train", *small_run(tmp_path, f"resume={checkpoint}")]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert contents(run) == before


def test_a_checkpoint_of_the_first_release_resumes(old_run, capsys):
    assert resume_old(old_run, "checkpoint.keep_last=2") == 0
    assert "step=4 is from an earlier release without digests" in capsys.readouterr().out
    made = [(each["step"], each["loss"]) for each in read_metrics(old_run) if "loss" in each and each["step"] > 4]
    assert made == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in FIRST_RELEASE_STEPS]
    new = open_checkpoint(old_run / "checkpoints" / "step=6")
    assert (new.version, new.run_id) == (3, summary_of(old_run)["run_id"])
    assert new.records.unverified_steps == summary_of(old_run)["records"]["unverified_steps"] == 4
    assert read_run(old_run).unverified == "an earlier release wrote those up to step 4"
    read_tensors(old_run / "checkpoints" / "step=4")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tensors/__1_0.distcp", lambda content: content[:60_000] + b"\xff" + content[60_001:]),
        ("tensors/.metadata", lambda content: content[:200] + b"\xff" + content[201:]),
        ("progress.json", lambda content: content.replace(b'"step": 4', b'"step": 0')),
        ("manifest.json", lambda content: content.replace(b'"step": 4', b'"step": 5')),
        ("manifest.json", lambda content: content[:50]),
        ("precision.safetensors", lambda content: b"\xff" * 8 + content[8:]),
    ],
)
def test_damage_to_one_of_the_first_release_is_found_by_its_structure(old_run, capsys, file, change):
    path = old_run / "checkpoints" / "step=4" / file
    content = change(path.read_bytes())
    assert content != path.read_bytes()
    path.write_bytes(content)
    before = contents(old_run)
    assert resume_old(old_run) == 2
    told = capsys.readouterr().err
    assert f"step=4/{file}: " in told
    assert "Traceback" not in told
    assert contents(old_run) == before


def test_auto_without_a_name_says_what_it_could_go_on_with(whole, tmp_path, small_run, capsys):
    def unnamed(*more: str) -> list[str]:
        return [word for word in small_run(tmp_path, *more) if not word.startswith("run.dir=")]

    assert main(["train", *unnamed("resume=auto")]) == 2
    told = capsys.readouterr().err
    assert "resume=auto: needs an explicit run.name or run.dir" in told
    assert "No unfinished run" in told
    earlier = Path(shutil.copytree(whole, tmp_path / "default" / "earlier"))
    assert main(["train", *unnamed("resume=auto", "trainer.max_steps=7")]) == 2
    assert f"Set run.dir={earlier} to resume the newest matching run" in capsys.readouterr().err
    assert list((tmp_path / "default").iterdir()) == [earlier]
    assert main(["train", *unnamed("resume=auto", "run.name=earlier")]) == 0
    assert "is finished at step 6" in capsys.readouterr().out
