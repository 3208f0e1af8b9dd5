"""Verdicts over logs: the gap, pairs, units and axes against numbers computed here, and the command line."""

import gzip
import json
import re

import jsonschema
import numpy as np
import pytest
import torch
from scipy import stats

from lightning_llm.__main__ import main
from lightning_llm.api import compare
from lightning_llm.base.errors import ConfigError
from lightning_llm.compare.curves.as_runs import count_spikes
from lightning_llm.compare.curves.readers import read_table
from lightning_llm.compare.json_schema import compare_schema
from lightning_llm.compare.recorded_looks import read_looks
from lightning_llm.config.schema import SpikesConfig
from lightning_llm.train.spikes import SpikeState
from tests.compare.curves.made_curves import changed, curves, write_csv

pytestmark = pytest.mark.usefixtures("undrawn")

FP8 = [("fp8", seed) for seed in range(4)]


def judged(found, **options):
    return compare(curves=found, baseline="bf16", quiet=True, **options)


def test_gap_and_interval_are_those_of_a_paired_t_test():
    found = curves(0.004)
    verdict = judged(found).verdicts[0]
    tails = [[each["loss"][each["step"] > 1800].mean() for each in found[arm].values()] for arm in ("bf16", "fp8")]
    differences = np.subtract(tails[1], tails[0])
    low, high = stats.t.interval(0.95, 3, differences.mean(), stats.sem(differences))
    estimate = verdict.judged.estimate
    assert [estimate.gap, estimate.low, estimate.high] == pytest.approx([differences.mean(), low, high], rel=1e-9)


@pytest.mark.parametrize(("gap", "decision"), [(0.0005, "lossless"), (0.05, "lossy")])
def test_decisions(gap, decision):
    verdict = judged(curves(gap)).verdicts[0]
    assert verdict.qualified == f"{decision} (settings not verified)"


def test_one_pair_is_inconclusive_and_replicates_say_how_many_decide():
    found = curves(0.004)
    found["fp8"] = {0: found["fp8"][0]}
    done = judged(found)
    assert done.verdicts[0].decision == "inconclusive"
    (note,) = [note for note in done.notes if "pairs would decide" in note]
    assert "bf16's 4 runs" in note
    assert any("more seeds (3 pairs in all)" in line["line"] for line in done.as_data()["verdicts"])


def test_runs_without_seeds_are_paired_in_order():
    found = {arm: list(frames.values()) for arm, frames in curves(0.004).items()}
    done = judged(found)
    assert done.verdicts[0].judged.estimate.gap == pytest.approx(judged(curves(0.004)).verdicts[0].judged.estimate.gap)
    assert any("Seeds are not known" in note for note in done.notes)


def test_a_diverged_run_is_a_failed_seed_and_not_an_unfinished_one():
    def lost(frame):
        return {"step": frame["step"][:100], "loss": np.append(frame["loss"][:99], np.inf)}

    done = judged(changed(curves(), lost, [("fp8", 1)]))
    assert done.verdicts[0].judged.measured.diverged_seeds == [1]
    assert done.verdicts[0].decision != "lossless"


def test_curves_at_other_points_are_interpolated_without_bias():
    found = changed(curves(0.004, noise=0.0001), lambda f: {k: v[::3] for k, v in f.items()}, FP8)
    found = changed(found, lambda f: {"step": f["step"] + 3, "loss": f["loss"]}, FP8)
    done = judged(found, tail=0.3, margin=0.1)
    assert any("interpolated linearly" in note for note in done.notes)
    shift = 3 * (8 * 0.45) * (1700 + 20) ** -1.45  # three steps later on the trend
    assert done.verdicts[0].judged.estimate.gap == pytest.approx(0.004 + shift, abs=0.003)


def test_tokenizers_are_refused_unless_bytes_are_given():
    found = curves()
    for arm, name in (("bf16", "gpt2"), ("fp8", "llama")):
        for each in found[arm].values():
            each["tokenizer"] = [name] * 200
    with pytest.raises(ConfigError, match="bits per byte"):
        judged(found)
    for arm, size in (("bf16", 4.0), ("fp8", 5.0)):
        for each in found[arm].values():
            each["bytes_per_token"] = [size] * 200
            each["loss"] = each["loss"] * size
    done = judged(found)
    assert done.terms.unit == "bits per byte"
    assert done.verdicts[0].decision == "lossless"
    in_nats = done.verdicts[0].judged.estimate.gap
    for arm in found.values():
        for each in arm.values():
            each["loss"] = each["loss"] / np.log(2)
            each["loss_unit"] = ["bits"] * 200
    assert judged(found).verdicts[0].judged.estimate.gap == pytest.approx(in_nats)


def test_memory_sizes_are_no_bytes_of_text():
    found = curves()
    for arm, name in (("bf16", "gpt2"), ("fp8", "llama")):
        for each in found[arm].values():
            each |= {"tokenizer": [name] * 200, "tokens": each["step"] * 4096, "memory_bytes": np.full(200, 3e6)}
    with pytest.raises(ConfigError, match="bits per byte"):
        judged(found)


@pytest.mark.parametrize("name", ["mean_token_accuracy", "tokens_in_billions"])
def test_a_column_with_tokens_in_its_name_that_counts_none_is_no_axis(name):
    """TRL logs the first."""
    found = curves(0.004)
    gap = judged(found).verdicts[0].judged.estimate.gap
    for arm in found.values():
        for each in arm.values():
            each[name] = each["step"] / 2500
    done = judged(found)
    assert done.verdicts[0].judged.estimate.gap == gap
    assert (done.logs[0]["axis"], done.logs[0]["tokens"]) == ("step", None)


def test_messages_count_the_curves_of_an_arm_from_0():
    found = {arm: list(frames.values()) for arm, frames in curves().items()}
    found["fp8"][1] = 3
    with pytest.raises(ConfigError, match=r"curves\['fp8'\]\[1\]: is of type int"):
        judged(found)


def test_steps_of_unlike_batches_are_refused_and_compared_by_tokens():
    found = curves()
    for arm, batch in (("bf16", 4096), ("fp8", 2048)):
        for each in found[arm].values():
            each["tokens"] = each["step"] * batch
    with pytest.raises(ConfigError, match="--x tokens"):
        judged(found, x="step")
    with pytest.raises(ConfigError, match="ends at"):
        judged(found)  # by tokens, which fp8 has only half of


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        ({}, {"baseline": None}, "--baseline: is not given"),
        ({}, {"baseline": "bf17"}, "Did you mean 'bf16'"),
        ({}, {"margin": "2%"}, "nats"),
        ({}, {"metric": "ppl"}, "perplexity"),
        ({}, {"metric": "lss"}, "Did you mean 'loss'"),
        ({}, {"x": "epoch"}, "no such column"),
        ({"lm_loss": lambda f: f["loss"] + 0.1}, {}, "loss, lm_loss"),
        ({"seed": lambda f: np.full(200, 9.0)}, {}, "states seed 9"),
        ({"step": lambda f: f["step"] + 5000}, {}, "do not overlap"),
        ({"loss_unit": lambda f: ["bits"] * 200}, {}, "bits per token"),
        ({"loss": lambda f: ["x", *f["loss"][1:]]}, {}, "no numbers"),
    ],
)
def test_bad_input_is_refused_in_one_line(change, options, text):
    found = curves()
    for each in found["fp8"].values():
        for name, make in change.items():
            each[name] = make(each)
    with pytest.raises(ConfigError) as caught:
        compare(curves=found, quiet=True, **{"baseline": "bf16", **options})
    assert text in str(caught.value)
    assert all("\n" not in str(problem) for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("arm", "text"),
    [
        ({}, "curves['nvfp4']: has no curve"),
        ([], "curves['nvfp4']: has no curve"),
        ({"0": {"step": [1, 2], "loss": [3.0, 2.0]}}, "curves['nvfp4']: has the seed '0'. Seeds are integers"),
    ],
)
def test_an_arm_without_curves_is_refused_and_not_left_out(arm, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        judged(curves() | {"nvfp4": arm})


def test_a_frame_without_any_loss_is_reported():
    empty = changed(curves(), lambda f: {**f, "loss": np.full(200, np.nan)}, FP8)
    with pytest.raises(ConfigError, match="column loss has values that are no numbers: NaN in every row"):
        judged(empty)


def test_paths_that_cannot_be_resolved_are_refused(tmp_path, capsys):
    words = write_csv(curves(seeds=[0]), tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    logs = [words[0], f"fp8/0={tmp_path / 'loop'}", "mxfp8/0=~no-such-user/a.csv"]
    assert main(["compare", "--from", *logs, "--baseline", "bf16"]) == 2
    error = capsys.readouterr().err
    assert "loop: cannot be read" in error
    assert "~no-such-user/a.csv: cannot be read" in error


@pytest.mark.parametrize(
    "logged",
    [
        lambda losses: [torch.tensor(loss) for loss in losses],
        lambda losses: torch.tensor(losses, requires_grad=True),
    ],
)
def test_losses_may_be_tensors(logged):
    found = changed(curves(), lambda f: {**f, "loss": logged(f["loss"])}, FP8)
    assert judged(found).verdicts[0].judged.estimate.gap == judged(curves()).verdicts[0].judged.estimate.gap


def test_masked_values_are_missing():
    masked = changed(curves(), lambda f: {**f, "loss": np.ma.masked_where(f["step"] == 1000, f["loss"])}, FP8)
    missing = changed(curves(), lambda f: {**f, "loss": np.where(f["step"] == 1000, np.nan, f["loss"])}, FP8)
    ours, theirs = (judged(each).as_data()["logs"][-1]["points"] for each in (masked, missing))
    assert ours == theirs == 199


def test_command_line(tmp_path, capsys):
    words = write_csv(curves(), tmp_path)
    assert main(["compare", "--from", *words, "--baseline", "bf16", "--json", "--output", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    jsonschema.validate(data, compare_schema())
    assert data["verdicts"][0]["verdict"] == "lossless"
    assert [log["points"] for log in data["logs"]] == [200] * 8
    assert "column loss (training loss, nats per token), 200 points" in captured.err
    assert "settings not verified" in (tmp_path / "out" / "report.html").read_text()
    paths = [word.partition("=")[2] for word in words]
    again = ["compare", "--from", *paths, "--pattern", "{arm}-{seed}.csv", "--baseline", "bf16", "--json"]
    assert main([*again, "--require", "lossless", "--output", str(tmp_path / "gate")]) == 0
    assert main([*again, "--best-of", "optim.learning_rate"]) == 2
    assert main(["compare", "--from", f"bf16/0={paths[0]}", f"fp8/0={paths[0]}", "--baseline", "bf16"]) == 2
    assert "named twice" in capsys.readouterr().err
    assert main(["compare", "--x", "tokens"]) == 2
    assert main(["compare", "--from", f"fp8/0={paths[0]}", f"bf16/0={paths[4]}", "--baseline", "bf16"]) == 2
    assert "has the name of bf16" in capsys.readouterr().err


def loss_with_faults(seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 900))
    values = 2.2 + 8 * (np.arange(count) + 20) ** -0.45 + draw.choice([0.002, 0.1]) * draw.standard_normal(count)
    for at in draw.integers(0, count, 4):
        values[at : at + draw.integers(1, 200)] += draw.uniform(0.05, 4)  # a spike, a shift or a divergence
    values[draw.integers(0, count, 2)] = [np.nan, np.inf]
    return np.round(values, 2) if seed % 4 == 0 else values


@pytest.mark.parametrize(
    "config", [SpikesConfig(), SpikesConfig(window_steps=41, level_steps=9)], ids=["default", "odd"]
)
def test_spikes_counted_in_bulk_are_those_of_the_detector(config):
    found, expected = [], []
    for seed in range(12):
        state = SpikeState()
        for value in loss_with_faults(seed):
            _, state = state.after(float(value), 1.0, config)
        expected.append(state.events)
        found.append(count_spikes(loss_with_faults(seed), config))
    assert found == expected
    assert sum(expected) > 20


ROWS = [f"{10 * at},{4 - at / 100:.4f}" for at in range(1, 9)]


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("\n".join(["step,loss", *ROWS]), 8),
        ("\n".join(["step,loss", *ROWS])[:-2], 7),  # the last loss would be 3.92 for 3.9200
        ("\n".join(["step,loss", *ROWS])[:-7], 7),
        ("\n".join(["# my run", "#step,loss", "# lr 1e-3", *ROWS, "# done"]) + "\n", 8),
    ],
    ids=["no line end", "half a number", "half a row", "comments"],
)
def test_an_incomplete_last_row_and_comments_are_no_values(tmp_path, text, points):
    (tmp_path / "a.csv").write_text(text)
    table = read_table(str(tmp_path / "a.csv"))
    assert table.columns["loss"].tolist() == [round(4 - at / 100, 4) for at in range(1, points + 1)]
    assert len(table.notes) == 8 - points


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda text: text.replace(",", ";").replace(".", ","), r"column loss .*'[\d,]+' in line 2 .*decimal point"),
        (lambda text: text.replace("1990,", '"1,990",'), r"column step .*'1,990' in line 200 .*no other separator"),
        (lambda text: gzip.compress(text.encode())[:-99], "gzip stream is damaged or cut off"),
    ],
    ids=["decimal comma", "thousands", "cut off gzip"],
)
def test_numbers_with_separators_and_damaged_files_are_named(tmp_path, capsys, change, text):
    logs = write_csv(curves(), tmp_path)
    path = tmp_path / "fp8-1.csv"
    lines = path.read_text().replace(".0000,", ",")
    new = change(lines)
    path.write_bytes(new if isinstance(new, bytes) else new.encode())
    assert main(["compare", "--from", *logs, "--baseline", "bf16"]) == 2
    assert re.search(text, capsys.readouterr().err)


def test_the_same_logs_again_are_the_same_look_of_a_series(tmp_path, monkeypatch):
    """Without --metric, too: the column is found in the logs. Nothing but the series is written."""
    monkeypatch.chdir(tmp_path)
    looks = []
    for seeds in ([0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2]):
        found = {arm: {seed: each for seed, each in its.items() if seed in seeds} for arm, its in curves().items()}
        series = str(tmp_path / "ci.json")
        comparison = compare(curves=found, baseline="bf16", require="lossless", series=series, quiet=True)
        looks.append((comparison.spending.look, comparison.spending.spent, comparison.terms.confidence))
    assert not (tmp_path / "compare").exists()
    assert looks == [(1, 0.025, 0.975), (1, 0.025, 0.975), (2, 0.0125, 0.9875), (1, 0.025, 0.975)]


def test_losses_from_other_files_are_the_same_look(tmp_path):
    """Rounded to 32 bits or four decimals, under another name and with the arms in another order. Noise is not."""

    def looked(change, name="loss"):
        found = curves(seeds=range(3))
        found["nvfp4"] = curves(0.001, seeds=range(3))["fp8"]
        order = ["bf16", "fp8", "nvfp4"] if name == "loss" else ["nvfp4", "bf16", "fp8"]
        found = {
            arm: {seed: {"step": f["step"], name: change(f["loss"])} for seed, f in found[arm].items()} for arm in order
        }
        series = str(tmp_path / "ci.json")
        return compare(curves=found, baseline="bf16", require="lossless", series=series, quiet=True).spending.look

    assert looked(lambda losses: losses) == 1
    assert looked(np.float32, "train/loss") == 1
    assert looked(lambda losses: losses.round(4), "train_loss") == 1
    noise = np.random.default_rng(0).normal(0, 0.003, 200)
    assert looked(lambda losses: losses + noise) == 2
    assert looked(lambda losses: (losses + noise).round(4), "train_loss") == 2
    assert len(read_looks(tmp_path / "ci.json")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss\n3.1\n3.0\n", "has no column of steps"),
        ("step,loss\n10,3.1\n", "column loss has one value"),
        ("step,loss\n", "has no values"),
        ("step,loss\n10,3.1k\n20,3.0k\n", "no numbers: '3.1k' in line 2"),
        ("step,ppl\n10,22\n20,20\n30,19\n", "has a perplexity .ppl., but no loss"),
    ],
)
def test_logs_without_a_usable_loss_are_told_why(tmp_path, capsys, text, message):
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.csv").write_text(text.replace("3", "4"))
    words = [f"bf16/0={tmp_path / 'a.csv'}", f"fp8/0={tmp_path / 'b.csv'}"]
    assert main(["compare", "--from", *words, "--baseline", "bf16"]) == 2
    assert re.search(message, capsys.readouterr().err)
