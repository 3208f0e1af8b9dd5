"""The verdict on what `evaluate` measured: more of an accuracy is better, and like is compared with like."""

import pytest

from lightning_llm.__main__ import main
from lightning_llm.tracking.evaluations import evaluation_points, record_evaluation
from lightning_llm.tracking.mlflow.writer import log_evaluations
from tests.compare.run_folders import NOISE, STEPS, make_sweep, verdicts

KEY = "eval/choice/acc"


def evaluate_all(sweep, accuracies, of="version 1.0, all samples", seeds=3):
    """Write an accuracy for each recipe of the sweep, in its order, with noise from seed to seed."""
    for number in range(len(accuracies) * seeds):
        recipe, seed = divmod(number, seeds)
        value = accuracies[recipe] + 0.01 * seed + NOISE[(seed + 2 * recipe) % len(NOISE)]
        metrics = {"choice/acc": {"value": value, "higher_is_better": True, "of": of}}
        record_evaluation(sweep / str(number), STEPS, metrics, ended=True)


@pytest.fixture
def sweep(tmp_path):
    return make_sweep(tmp_path / "sweep", {"precision=bf16": 0.0, "precision=mxfp8": 0.0, "precision=nvfp4": 0.0})


@pytest.mark.usefixtures("undrawn")
def test_a_lower_accuracy_is_lossy_and_a_higher_one_is_not(sweep, capsys):
    evaluate_all(sweep, [0.5, 0.5, 0.4])
    found = verdicts(capsys, sweep, "--metric", KEY, "--margin", "0.02")["by_name"]
    assert found["mxfp8"]["verdict"] == "lossless"
    assert found["nvfp4"]["verdict"] == "lossy"
    assert found["nvfp4"]["gap"] == pytest.approx(0.1, abs=2e-3)  # above 0 is worse, as for a loss
    evaluate_all(sweep, [0.5, 0.5, 0.6])
    found = verdicts(capsys, sweep, "--metric", KEY, "--margin", "0.02")["by_name"]
    assert found["nvfp4"]["verdict"] == "lossless"
    assert found["nvfp4"]["gap"] == pytest.approx(-0.1, abs=2e-3)
    assert main(["compare", str(sweep), "--metric", KEY, "--margin", "0.02"]) == 0
    printed = capsys.readouterr().out
    assert f"margin 0.02 of {KEY}" in printed
    assert "0.5" in printed  # accuracies are shown as they are
    assert "-0.5" not in printed


@pytest.mark.usefixtures("undrawn")
def test_runs_measured_on_other_data_are_not_compared(sweep, capsys):
    evaluate_all(sweep, [0.5, 0.5, 0.4])
    metrics = {"choice/acc": {"value": 0.5, "higher_is_better": True, "of": "version 1.0, the first 9 samples"}}
    record_evaluation(sweep / "4", STEPS, metrics, ended=True)
    assert main(["compare", str(sweep), "--metric", KEY]) == 2
    said = capsys.readouterr().err
    assert "was measured on different data" in said
    assert "the first 9 samples" in said
    assert main(["compare", str(sweep), "--metric", "eval/choice/accuracy"]) == 2
    assert f"Available: {KEY}" in capsys.readouterr().err


class Store:
    """The part of MLflow's client that `log_evaluations` uses, in memory."""

    def __init__(self):
        self.metrics = []

    def get_metric_history(self, run_id, key):
        return [each for each in self.metrics if each.key == key]

    def log_batch(self, run_id, metrics):
        self.metrics += metrics


def test_mlflow_gets_each_number_once(tmp_path):
    store = Store()
    for step, value in ((2, 0.25), (4, 0.5)):
        record_evaluation(tmp_path, step, {"choice/acc": {"value": value}, "odd/ratio": {"value": float("nan")}}, False)
        log_evaluations(store, "id", tmp_path)
        log_evaluations(store, "id", tmp_path)
    logged = [(each.key, each.step, each.value) for each in store.metrics]
    expected = [
        (KEY, 2, 0.25),
        ("nonfinite/eval/odd/ratio", 2, 1.0),
        (KEY, 4, 0.5),
        ("nonfinite/eval/odd/ratio", 4, 1.0),
    ]
    assert logged == expected
    assert [point["step"] for point in evaluation_points(tmp_path)] == [2, 4]
