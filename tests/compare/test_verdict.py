"""`compare` over real run folders: gaps, missing seeds, times to a loss, speed."""

import json

import numpy as np
import pytest
import yaml
from scipy import stats

from tests.compare.run_folders import STEPS, curve, make_run, make_sweep, rewritten, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")


def test_each_kind_of_verdict_with_what_the_contract_names(sweep, capsys):
    found = verdicts(capsys, sweep)
    assert (found["baseline"], found["margin"], found["factor"]) == ("bf16", 0.01, "precision")
    rows = found["by_name"]
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "mxfp4_sr": "lossless", "mxfp4_rne": "lossy", "fp8_current": "inconclusive",
    }  # fmt: skip
    row = rows["mxfp4_sr"]
    assert (row["pairs"], row["controlled"], row["confounders"]) == (3, True, [])
    assert row["parameters"] == 2_164_416
    assert row["tokens"] == STEPS * 2048
    assert row["ci"][0] < row["gap"] < row["ci"][1] < 0.01
    assert "lossless against bf16 at margin 0.01" in row["line"]
    assert "2.16M parameters, 205K tokens" in row["line"]
    assert rows["fp8_current"]["more_seeds"] is None  # known to 0.001, and 0.0003 from the margin
    assert "the gap is likely near the margin" in rows["fp8_current"]["line"]
    written = json.loads((sweep / "compare" / "compare.json").read_text())
    assert written["verdicts"] == found["verdicts"]


@pytest.mark.parametrize("gap", [-0.001, 0.0099])
def test_more_seeds_are_planned_for_fixed_gaps_by_the_spread_alone(gap, tmp_path, capsys):
    for seed, noise in enumerate((0.011, -0.009, 0.001, -0.003)):
        make_run(tmp_path / "s" / str(seed), "precision=bf16", f"seed={seed}")
        make_run(tmp_path / "s" / f"1{seed}", "precision=mxfp8", f"seed={seed}", gap=gap, noise=noise)
    row = verdicts(capsys, tmp_path / "s")["by_name"]["mxfp8"]
    assert row["sd"] == pytest.approx(0.00835, abs=1e-4)  # of 11, -9, 1 and -3 thousandths
    # By scipy: the least n with P(T > t(0.975, n - 1)) >= 0.8, at (0.01, 0.02) / sd sqrt(n), over what sd may be.
    needed = []
    for distance in (0.01, 0.02):
        enough = (n for n in range(2, 99) if assured_power(distance / row["sd"], n) >= 0.8)
        needed.append(next(enough))
    assert [row["seeds_if_no_gap"], row["seeds_if_lossy"]] == pytest.approx(needed, abs=1)
    assert row["more_seeds"] == row["seeds_if_no_gap"] - 4
    no_gap, lossy = row["seeds_if_no_gap"], row["seeds_if_lossy"]
    said = f"{no_gap} in all) would decide if the true gap is 0, {lossy} in all if it is 3 margins"
    assert said in row["line"]


def assured_power(effect, pairs):
    """By quadrature over the variance that four pairs, of chi^2 with 3 degrees of freedom, know so little of."""
    chi2 = stats.chi2(3).ppf((np.arange(2000) + 0.5) / 2000)
    shifts = effect * pairs**0.5 * np.sqrt(chi2 / 3)
    return stats.nct.sf(stats.t.ppf(0.975, pairs - 1), pairs - 1, shifts).mean()


def test_the_gap_is_the_mean_paired_difference_of_the_tail(sweep, capsys):
    row = verdicts(capsys, sweep)["by_name"]["mxfp4_rne"]
    assert row["tail_steps"] == [95, 100]
    losses = {}
    for folder in sweep.glob("[0-9]*"):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        tail = [each["val_loss"] for each in records if "val_loss" in each and each["step"] > 90]
        losses[config["precision"]["name"], config["seed"]] = sum(tail) / len(tail)
    by_hand = [losses["mxfp4_rne", seed] - losses["bf16", seed] for seed in range(3)]
    assert [each["gap"] for each in row["differences"]] == pytest.approx(by_hand)
    assert row["gap"] == pytest.approx(sum(by_hand) / 3)


def test_time_to_loss_speed_memory_and_skipped_steps(tmp_path, capsys):
    make_run(tmp_path / "s" / "0", "precision=bf16", "seed=0", speed=1000.0)
    faster = {step: curve(2 * step) for step in range(5, STEPS + 1, 5)}
    skipped = [{"step": 1, "loss": 7.0, "skipped": True, "event": "spike", "event_action": "skip"}]
    make_run(
        tmp_path / "s" / "1", "precision=mxfp8", "seed=0", speed=500.0, losses=faster, records=skipped,
        summary={"host_memory_peak_bytes": 2**31},
    )  # fmt: skip
    row = verdicts(capsys, tmp_path / "s")["by_name"]["mxfp8"]
    # At step 2n of the baseline the loss is that of step n here; both reach the baseline's last.
    assert row["time_to_loss"] == pytest.approx({"pairs": 1, "tokens_ratio": 0.5, "seconds_ratio": 1.0}, rel=1e-3)
    slower = verdicts(capsys, tmp_path / "s", "--baseline", "precision=mxfp8")["by_name"]["bf16"]["time_to_loss"]
    assert slower == pytest.approx({"pairs": 1, "tokens_ratio": 2.0, "seconds_ratio": 1.0}, rel=1e-3)
    assert row["tokens_per_second_ratio"] == pytest.approx(0.5)
    assert row["peak_memory_ratio"] == pytest.approx(2.0)
    assert (row["skipped_steps"], row["spikes"]) == (1, 1)


def test_the_high_precision_gap_is_that_of_the_metric_asked_for(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.004})
    for number in (3, 4, 5):
        lines = [json.loads(line) for line in (sweep / str(number) / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if "val_loss" in line:
                line["val_loss_high_precision"] = line["val_loss"] - 0.5
                line["val_loss_high_precision/code"] = line["val_loss/code"] - 0.001
        (sweep / str(number) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        rewritten(sweep / str(number))
    by = {key: verdicts(capsys, sweep, "--metric", key)["by_name"]["mxfp8"] for key in ("val_loss", "val_loss/code")}
    gaps = {key: row["gap_high_precision"] - row["gap"] for key, row in by.items()}
    assert gaps == pytest.approx({"val_loss": -0.5, "val_loss/code": -0.001})
