"""No malformed log gives "lossless": logs changed in every way that a person or a script might change them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llm.api import compare
from lightning_llm.base.errors import ConfigError
from lightning_llm.compare.curves.command import home_of
from lightning_llm.compare.curves.named import named_logs
from tests.compare.curves.made_curves import changed, curves

EVERY = [(arm, seed) for arm in ("bf16", "fp8") for seed in range(4)]
WHICH = {"one": [("fp8", 1)], "arm": EVERY[4:], "baseline": EVERY[:4], "all": EVERY}


def outcome(found, **options) -> str:
    """Return the decision, or "refused: the first line"."""
    try:
        return compare(curves=found, baseline="bf16", quiet=True, **options).verdicts[0].decision
    except ConfigError as error:
        return f"refused: {error.problems[0]}"


def rows(change):
    return lambda frame: {name: change(values) for name, values in frame.items()}


def losses(change):
    return lambda frame: {name: values if name == "step" else change(values) for name, values in frame.items()}


def averaged(values, factor):
    found = values.copy()
    for at in range(1, len(found)):
        found[at] = factor * found[at - 1] + (1 - factor) * values[at]
    return found


def moving(values, width):
    return np.convolve(np.pad(values, (width - 1, 0), mode="edge"), np.ones(width) / width, "valid")


def shuffled(frame, seed):
    order = np.random.default_rng(seed).permutation(len(frame["step"]))
    return {name: values[order] for name, values in frame.items()}


def padded(values, count):
    return np.concatenate([values[:-count], np.full(count, values[-count - 1])])


REFUSED = {
    "shuffled": lambda n: lambda frame: shuffled(frame, n),
    "two rows exchanged": lambda n: rows(
        lambda v: np.concatenate([v[: 50 + n], v[50 + n : 52 + n][::-1], v[52 + n :]])
    ),
    "each row twice": lambda n: rows(lambda v: np.repeat(v, 2)),
    "one row twice": lambda n: rows(lambda v: np.insert(v, 60 + n, v[60 + n])),
    "the file twice": lambda n: rows(lambda v: np.concatenate([v, v])),
    "a block twice": lambda n: rows(lambda v: np.concatenate([v[: 100 + n], v[80:]])),
    "padded": lambda n: losses(lambda v: padded(v, 5 + n)),
    "filled forward": lambda n: losses(lambda v: np.repeat(v[:: 3 + n], 3 + n)[: len(v)]),
    "interpolated": lambda n: losses(lambda v: np.interp(np.arange(len(v)), np.arange(len(v))[:: 5 + n], v[:: 5 + n])),
    "without a part of its end": lambda n: rows(lambda v: np.delete(v, np.s_[-18 - n : -6])),
    "rounded": lambda n: losses(lambda v: np.round(v, 2)),
    "of 16-bit floats": lambda n: losses(lambda v: np.round(v * 64) / 64),
    "perplexity": lambda n: losses(np.exp),
    "below zero": lambda n: losses(lambda v: -v),
}
"""Changes that are refused in whichever logs they are; `n`: 0 to 9, where they are made."""


@pytest.mark.parametrize(
    "which", ["one", "all", *(pytest.param(each, marks=pytest.mark.full) for each in ("arm", "baseline"))]
)
@pytest.mark.parametrize("name", REFUSED)
@settings(max_examples=2, deadline=None)
@given(n=st.integers(0, 9), kind=st.sampled_from(["loss", "val_loss"]))
def test_changed_logs_are_refused(name, which, n, kind):
    found = outcome(changed(curves(kind=kind, noise=0.02 if kind == "loss" else 0.003), REFUSED[name](n), WHICH[which]))
    assert found.startswith("refused") or (name == "perplexity" and found != "lossless")


@pytest.mark.parametrize("which", ["one", "arm", "baseline"])
@settings(max_examples=3, deadline=None)
@given(share=st.floats(0.3, 0.97))
def test_cut_off_logs_are_refused(which, share):
    cut = rows(lambda v: v[: int(share * len(v))])
    assert "--until" in outcome(changed(curves(), cut, WHICH[which]))


@pytest.mark.parametrize("which", WHICH)
@settings(max_examples=3, deadline=None)
@given(smooth=st.sampled_from([(averaged, 0.6), (averaged, 0.9), (moving, 3), (moving, 5), (moving, 20)]))
def test_smoothed_training_losses_are_refused(which, smooth):
    change, size = smooth
    assert "smoothed" in outcome(changed(curves(), losses(lambda v: change(v, size)), WHICH[which]))


@pytest.mark.parametrize("which", ["one"])
@settings(max_examples=3, deadline=None)
@given(smooth=st.sampled_from([(averaged, 0.6), (averaged, 0.9), (moving, 5)]))
def test_a_smoothed_validation_loss_among_others_is_refused(which, smooth):
    change, size = smooth
    found = curves(kind="val_loss", noise=0.003)
    assert "smoothed" in outcome(changed(found, losses(lambda v: change(v, size)), WHICH[which]))


COPIES = {
    "equal": lambda v: v,
    "shifted": lambda v: v + 0.001,
    "rescaled": lambda v: 0.999 * v,
    "rounded": lambda v: np.round(v, 4),
    "shifted and rounded": lambda v: np.round(v - 0.002, 4),
    "of 32-bit floats": lambda v: v.astype(np.float32).astype(np.float64),
    "one step late": lambda v: np.concatenate([[v[0] + 0.1], v[:-1]]),
    "copied in the later half": lambda v: np.concatenate([v[:90] + np.sin(np.arange(90.0)) / 50, v[90:]]),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "loss") for name in COPIES),
        ("equal", "val_loss"),
        *(pytest.param(name, "val_loss", marks=pytest.mark.full) for name in COPIES if name != "equal"),
    ],
)
def test_copied_logs_are_refused(name, kind):
    found = curves(kind=kind, noise=0.02 if kind == "loss" else 0.003)
    for source, arm, seed in ((("bf16", 0), "fp8", 1), (("bf16", 1), "fp8", 1), (("fp8", 0), "fp8", 1)):
        copied = losses(COPIES[name])(found[source[0]][source[1]])
        mixed = {**found, arm: {**found[arm], seed: copied}}
        assert "logs of one run" in outcome(mixed)


FILTERED = {
    "shifted, with noise": lambda v: v + 0.001 + 1e-6 * np.random.default_rng(9).standard_normal(len(v)),
    "rescaled, with noise": lambda v: 0.9995 * v + 1e-6 * np.random.default_rng(9).standard_normal(len(v)),
    "averaged": lambda v: averaged(v, 0.3),
}


@pytest.mark.parametrize("name", FILTERED)
def test_filtered_copies_of_another_arm_are_refused(name):
    found = curves()
    copied = losses(FILTERED[name])(found["bf16"][1])
    assert "filtered copy" in outcome({**found, "fp8": {**found["fp8"], 1: copied}})


@pytest.mark.parametrize("noise_of_pair", [0.0, 1e-6, 1e-5, 1e-4])
def test_runs_that_differ_by_rounding_are_judged(noise_of_pair):
    """Two layouts of one run differ by this little, and only equal losses are surely one log."""
    found = curves()
    for seed, each in found["bf16"].items():
        rest = np.random.default_rng(seed).standard_normal(len(each["loss"]))
        found["fp8"][seed] = {**each, "loss": each["loss"] + noise_of_pair * rest}
    assert outcome(found).startswith("refused" if noise_of_pair == 0 else "lossless")


def part(frame, rows, again=False):
    steps = frame["step"][rows]
    return {"step": steps - steps[0] + 10 if again else steps, "loss": frame["loss"][rows]}


@pytest.mark.parametrize("count", [2, 4])
def test_rows_of_one_log_dealt_out_to_seeds_are_refused(count):
    found = curves(seeds=[3], points=400)
    dealt = {arm: {at: part(one[3], slice(at, None, count)) for at in range(count)} for arm, one in found.items()}
    assert "rows of one log" in outcome(dealt)


def test_the_later_half_of_a_log_is_no_other_seed():
    found = curves(seeds=[3], points=400)
    halves = (slice(200), slice(200, 400))
    assert "later part of one log" in outcome(
        {arm: {at: part(one[3], half, again=True) for at, half in enumerate(halves)} for arm, one in found.items()}
    )


def test_noise_on_the_level_of_the_baseline_is_no_training_loss():
    level = losses(lambda v: 2.4 + 0.02 * np.random.default_rng(round(v[0] * 1e6)).standard_normal(len(v)))
    assert "do not fall" in outcome(changed(curves(), level, WHICH["arm"]))


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize(
    "change", [lambda v: v[::-1].copy(), lambda v: np.random.default_rng(3).permutation(v), lambda v: 0 * v + 2.3,
               lambda v: 1 - v / 12, lambda v: np.concatenate([v[:-20], np.full(20, np.inf)])],
    ids=["reversed", "shuffled", "constant", "accuracy", "diverged"],
)  # fmt: skip
def test_other_columns_are_never_lossless(which, change):
    assert outcome(changed(curves(), losses(change), WHICH[which])) != "lossless"


@pytest.mark.parametrize("factor", [1 / np.log(2), np.log(2), 1e-3, 0.5])
def test_losses_in_another_unit_are_refused(factor):
    for which in ("arm", "baseline"):
        assert outcome(changed(curves(), losses(lambda v: factor * v), WHICH[which])) != "lossless"


def test_exchanged_seeds_are_refused():
    found = curves()
    found["fp8"][0], found["fp8"][1] = found["fp8"][1], found["fp8"][0]
    assert "exchanged" in outcome(found)


def test_a_repeated_part_with_other_values_is_a_resumed_run():
    def resumed(frame):
        again = {name: np.concatenate([values[:150], values[120:]]) for name, values in frame.items()}
        again["loss"][120:150] += 0.01 * np.random.default_rng(0).standard_normal(30)
        return again

    assert outcome(changed(curves(), resumed, WHICH["one"])) == outcome(curves()) == "lossless"


@settings(max_examples=12, deadline=None)
@given(
    points=st.integers(5, 400), decimals=st.sampled_from([3, 4, 6]), first=st.integers(0, 10**6),
    kind=st.sampled_from(["loss", "val_loss"]), seeds=st.integers(1, 5),
)  # fmt: skip
def test_ordinary_logs_are_judged(points, decimals, first, kind, seeds):
    noise = 0.02 if kind == "loss" else 0.003
    found = curves(0.004, range(first, first + seeds), points=points, kind=kind, noise=noise)
    found = changed(found, losses(lambda v: np.round(v, decimals)), [(a, s) for a in found for s in found[a]])
    assert not outcome(found).startswith("refused")


@pytest.mark.parametrize(
    "address", ["runs:/abc", "https://host/#/experiments/1/runs/2", "databricks#abc", "file:/x#abc"]
)
def test_a_report_on_runs_of_a_tracker_goes_to_the_working_folder(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert home_of(named_logs([f"bf16/0={address}", "fp8/0=deeper/a.csv"])) == tmp_path
    assert home_of(named_logs(["bf16/0=databricks/a.csv", "fp8/0=databricks/b.csv"])) == tmp_path / "databricks"
    with pytest.raises(ConfigError, match="has no arm"):
        named_logs([address])
