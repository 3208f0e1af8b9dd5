"""Randomly damaged checkpoints of every layout family and stateful recipe are never accepted as intact."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.train.checkpoint.manifest import MANIFEST
from lightning_llm.train.checkpoint.verification import content_damage, newest_verified, verified
from tests.parallel.traced_run import run_with

FULL = pytest.mark.full
FAMILIES = [
    pytest.param("single", 1, "fp16", marks=FULL),
    ("zero3", 2, "fp8_delayed"),
    ("pp", 2, "fp8_delayed"),
    pytest.param("tp", 2, "bf16", marks=FULL),
    pytest.param("ddp", 2, "mxfp4_sr_norht", marks=FULL),
    pytest.param("zero1", 2, "fp16", marks=FULL),
    pytest.param("cp", 2, "fp32", marks=FULL),
    pytest.param("hsdp", 4, "fp8_delayed", marks=FULL),
    pytest.param("fsdp_pp", 4, "fp16", marks=FULL),
    pytest.param("fsdp_tp", 4, "fp8_delayed", marks=FULL),
]
CORRUPTIONS = 60
"""Per family: 120 over those of the covering suite."""


def train(config) -> None:
    """Train in this rank; the trace of `traced_run` is not wanted."""
    run_with(config)


@pytest.fixture(scope="module")
def saved(ranks, matrix_run) -> Callable[[str, int, str], Path]:
    """Return the `checkpoints` folder of a run that saved after each of two steps."""

    def make(layout: str, world: int, precision: str) -> Path:
        words = ["trainer.max_steps=2", "checkpoint.every_steps=1", "trainer.validate_every_steps=null"]
        words += ["model.num_heads=2", "model.num_kv_heads=2", "data.validation.fraction=0"]
        words += ["model.hidden_size=32", "model.ffn_hidden_size=32", "data.sequence_length=32"]
        config = matrix_run(layout, world, 4, precision, *words)
        ranks(world).call(train, config)
        return Path(config.run.dir, "checkpoints")

    return make


def contents(folder: Path) -> dict[str, str]:
    """Return a hash of every file by its path."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def flip(file: Path, older: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, older: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])


def remove(file: Path, older: Path, draw: random.Random) -> None:
    file.unlink()


def put_older(file: Path, older: Path, draw: random.Random) -> None:
    """Put the file of an older checkpoint under the newer one's name."""
    file.write_bytes(older.read_bytes())


def swap_with_another(file: Path, older: Path, draw: random.Random) -> None:
    """Swap two shards, or where there is one its first with its last half."""
    others = sorted(set(file.parent.glob("*.distcp")) - {file})
    content = file.read_bytes()
    if others:
        other = draw.choice(others)
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        half = len(content) // 2
        file.write_bytes(content[half:] + content[:half])


def fill_with_noise(file: Path, older: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    start = draw.randrange(len(content))
    content[start : start + 512] = draw.randbytes(len(content[start : start + 512]))
    file.write_bytes(content)


DAMAGES = (flip, flip, truncate, remove, put_older, swap_with_another, fill_with_noise)


def corrupt(newest: Path, older: Path, seed: int) -> str:
    """Damage one file of `newest`, of a kind chosen before the file is; return its name in the checkpoint."""
    draw = random.Random(seed)
    kinds = ["manifest.json", "progress.json", "precision.safetensors", "tensors/metadata.json", "tensors/*.distcp"]
    while True:
        file = draw.choice(sorted(newest.glob(kinds[seed % len(kinds)])))
        before = file.read_bytes()
        draw.choice(DAMAGES)(file, older / file.relative_to(newest), draw)
        if not file.is_file() or file.read_bytes() != before:
            return str(file.relative_to(newest))


def restored(files: dict[Path, bytes]) -> None:
    for file, content in files.items():
        file.write_bytes(content)


@pytest.mark.parametrize(("layout", "world", "precision"), FAMILIES)
def test_damaged_checkpoints_are_never_accepted(layout, world, precision, saved):
    folder = saved(layout, world, precision)
    newest, older = folder / "step=2", folder / "step=1"
    assert newest_verified(folder) == (verified(newest), ())
    files = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert len(list(newest.glob("tensors/*.distcp"))) == world
    for seed in range(CORRUPTIONS):
        name = corrupt(newest, older, seed)
        chosen, passed_over = newest_verified(folder)
        assert chosen is not None
        assert chosen.folder == older, (seed, name)
        assert {each.folder for each in passed_over} == {newest}
        assert name in {each.file for each in passed_over}, seed
        if seed % 4 == 0:  # the only other one, too
            spoilt = corrupt(older, newest, seed + 1)
            before = contents(folder)
            with pytest.raises(ConfigError) as refusal:
                newest_verified(folder)
            assert contents(folder) == before
            keys = {problem.key for problem in refusal.value.problems}
            assert {f"step=2/{name}", f"step=1/{spoilt}", "resume"} <= keys
        restored(files)
    assert newest_verified(folder) == (verified(newest), ())
    (folder / "step=2").rename(folder / "step=3")
    chosen, (damage,) = newest_verified(folder)
    assert (chosen.step, damage.file, "is of step 2" in damage.what) == (1, MANIFEST, True)
    (folder / "step=3").rename(folder / "step=2")


def test_ranks_look_at_every_file_once_together(saved):
    folder = saved("single", 1, "fp32")
    checkpoint = verified(folder / "step=2")
    spoilt = {name for name in checkpoint.files if name != "progress.json"}
    for name in spoilt:
        flip(checkpoint.folder / name, Path(), random.Random(0))
    found = [each.file for rank in range(3) for each in content_damage(checkpoint, rank, 3)]
    assert sorted(found) == sorted(spoilt)
