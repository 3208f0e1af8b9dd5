"""Runs compared with themselves: the A/A floor, equal bits, and one pair with known noise. 8 seconds."""

import shutil

import pytest

from tests.compare.run_folders import NOISE, STEPS, curve, make_run, make_sweep, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")


def test_runs_of_one_recipe_are_the_noise_floor(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.001})
    for seed in range(3):
        words = ("precision=bf16", "data.micro_batch_size=2", f"seed={seed}")
        make_run(sweep / str(10 + seed), *words, noise=0.1 * seed + NOISE[seed % 5] + 0.002)
    found = verdicts(capsys, sweep)
    (floor,) = found["aa"]
    assert (floor["pairs"], floor["keys"]) == (3, ["data.micro_batch_size"])
    assert floor["floor"] == pytest.approx(0.002, abs=1e-6)
    assert found["by_name"]["mxfp8"]["aa_floor"] == floor["floor"]
    assert found["by_name"]["mxfp8"]["controlled"]
    alone = make_sweep(tmp_path / "alone", {"precision=bf16": 0.0, "precision=bf16 data.micro_batch_size=2": 0.0})
    itself = verdicts(capsys, alone)
    assert itself["factor"] == "data.micro_batch_size"
    assert itself["verdicts"][0]["verdict"] == "lossless"
    make_sweep(alone / "more", {"precision=bf16 trainer.threads=1": 0.0}, summary={"threads": 1})
    make_sweep(alone / "other", {"precision=bf16 parallel.reduction=native": 0.0})
    every = verdicts(capsys, alone)  # these two equal the first to the last bit
    assert (every["factor"], every["baseline"], every["aa"][0]["pairs"]) == ("rounding", "bf16", 3)
    assert {name: (row["verdict"], row["controlled"]) for name, row in every["by_name"].items()} == {
        "data.micro_batch_size=2": ("lossless", True), "trainer.threads=1": ("lossless", True),
        "parallel.reduction=native": ("lossless", True),
    }  # fmt: skip


def test_runs_with_equal_bits_are_lossless_by_one_pair(tmp_path, capsys):
    layouts = {name: (f"parallel={name}", "trainer.devices=2", "data.micro_batch_size=1") for name in ("ddp", "zero3")}
    sweep = tmp_path / "s"
    make_run(sweep / "0", "parallel=single", "data.micro_batch_size=1")
    make_run(sweep / "1", *layouts["ddp"])
    make_run(sweep / "2", *layouts["zero3"], noise=0.001)
    rows = verdicts(capsys, sweep)["by_name"]
    assert (rows["ddp"]["verdict"], rows["ddp"]["ci"], rows["ddp"]["identical"]) == ("lossless", [0.0, 0.0], True)
    assert "equal to the last bit" in rows["ddp"]["line"]
    assert (rows["zero3"]["verdict"], rows["zero3"]["identical"]) == ("inconclusive", False)
    shutil.rmtree(sweep / "1")
    early = {step: curve(step) + 1e-12 * (step < 50) for step in range(5, STEPS + 1, 5)}
    make_run(sweep / "1", *layouts["ddp"], losses=early)  # equal in the tail alone
    assert not verdicts(capsys, sweep)["by_name"]["ddp"]["identical"]


def test_an_interleaved_pipeline_with_the_same_bits_is_no_confounder(tmp_path, capsys):
    base = "precision=bf16 data.micro_batch_size=1"
    pipeline = "precision=mxfp8 data.micro_batch_size=1 parallel=pp_interleaved trainer.devices=2"
    row = verdicts(capsys, make_sweep(tmp_path / "s", {base: 0.0, pipeline: 0.001}))["by_name"]["mxfp8"]
    assert (row["controlled"], row["confounders"]) == (True, [])
    assert {"parallel.schedule", "parallel.virtual_stages"} <= set(row["speed_confounders"])


def test_equal_bits_are_no_noise(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.001}, seeds=2)
    make_run(sweep / "9", "precision=bf16", "trainer.threads=1", "seed=0", noise=NOISE[0])
    found = verdicts(capsys, sweep)
    assert found["aa"][0]["floor"] is None
    assert found["aa"][0]["identical"] == 1


def test_a_rerun_is_dropped_if_equal_and_noise_if_not(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.001})
    later = {"started_at": "2026-11-22T10:00:00+00:00"}
    make_run(sweep / "20", "precision=bf16", "seed=0", noise=NOISE[0], summary=later)
    found = verdicts(capsys, sweep)
    assert found["aa"] == []
    assert "left out: s/0" in " ".join(found["notes"])
    make_run(sweep / "21", "precision=bf16", "seed=1", noise=0.1 + NOISE[1] + 0.003, summary=later)
    assert verdicts(capsys, sweep)["aa"][0]["floor"] == pytest.approx(0.003)


def test_one_pair_is_inconclusive_whatever_is_known_of_noise(tmp_path, capsys):
    """An A/A floor is rounding alone, and other recipes' spread is theirs: neither is that of this recipe's seeds."""
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp4_sr": 0.0})
    make_run(sweep / "20", "precision=mxfp8", "seed=0", gap=0.05)
    for number, size in enumerate((1, 2)):
        words = ("precision=bf16", f"data.micro_batch_size={size}", "seed=0")
        make_run(sweep / str(30 + number), *words, noise=NOISE[0] + 0.001 * (number + 1))
    rows = verdicts(capsys, sweep)["by_name"]
    row = rows["mxfp8"]
    assert (row["verdict"], row["ci"], row["more_seeds"]) == ("inconclusive", [None, None], 2)
    assert row["aa_floor"] > 0
    assert "one pair shows no spread: at least 2 more seeds (3 pairs in all)" in row["line"]
    assert rows["mxfp4_sr"]["comparisons"] == 1  # it has no interval that the others' would have to hold with


def test_layouts_with_the_same_bits_are_no_confounder_and_others_are(tmp_path, capsys):
    base = make_sweep(tmp_path / "s", {"precision=bf16 data.micro_batch_size=1": 0.0})
    layout = "precision=mxfp8 data.micro_batch_size=1 parallel=ddp trainer.devices=2"
    same = make_sweep(tmp_path / "same", {layout: 0.001})
    row = verdicts(capsys, base, same)["by_name"]["mxfp8"]
    assert row["controlled"]
    assert "trainer.devices" in row["speed_confounders"]
    other = make_sweep(tmp_path / "other", {f"{layout} parallel.reduction=native": 0.001})
    row = verdicts(capsys, base, other)["by_name"]["mxfp8"]
    assert {each["key"] for each in row["confounders"]} == {
        "parallel.dp_replicate", "parallel.reduction", "trainer.devices",
    }  # fmt: skip


def test_a_diverged_rerun_does_not_change_the_noise_floor(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.0})
    make_run(sweep / "20", "precision=bf16", "data.micro_batch_size=1", "seed=0", noise=NOISE[0] + 0.002)
    early = {5: curve(5), 10: 9.0}
    ended = {"status": "failed", "detail": "NonFiniteError: the loss of step 11 is nan. ..."}
    make_run(sweep / "21", "precision=bf16", "data.micro_batch_size=2", "seed=0", losses=early, summary=ended)
    assert verdicts(capsys, sweep)["aa"][0]["floor"] == pytest.approx(0.002)
