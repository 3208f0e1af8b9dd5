"""Whatever else is changed between the runs of a pair, it is listed, and the comparison is not called controlled."""

import copy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llm.base.errors import ConfigError
from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.runs.factor import varying_keys
from lightning_llm.compare.terms import Terms
from lightning_llm.tracking.reading import read_run
from tests.compare.run_folders import NO_MEANING, curve, make_run

FACTS = {
    "versions.torch": "2.12.0",
    "versions.python": "3.12.1",
    "device": "NVIDIA H100, 80 GiB",
    "data_hash": "e" * 32,
    "code_hash": "f" * 12,
    "threads": 1,
    "validation_hash": "x" * 32,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """bf16 and mxfp8 at two seeds, read from folders; the first two are the baseline."""
    folder = tmp_path_factory.mktemp("runs")
    made = []
    for name in ("bf16", "mxfp8"):
        for seed in (0, 1):
            words = (f"precision={name}", f"seed={seed}", "data.micro_batch_size=2")
            summary = {"code_hash": "c" * 12}
            made.append(read_run(make_run(folder / f"{name}{seed}", *words, noise=seed / 1000, summary=summary)))
    return made


def other_than(value):
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    return f"{value}x" if isinstance(value, str) else ["another"]


def changed(run, keys):
    config, summary = dict(run.config), copy.deepcopy(run.summary)
    for key in keys:
        if key.startswith("versions."):
            summary["versions"][key.removeprefix("versions.")] = FACTS[key]
        elif key in FACTS:
            summary[key] = FACTS[key]
        else:
            config[key] = other_than(config[key])
    return replace(run, config=config, summary=summary, typed=None)


def keys_of(run):
    """Every key that could confound: those of the config but the factor and the seed, and the facts."""
    return sorted(key for key in run.config if not key.startswith("precision.") and key != "seed") + sorted(FACTS)


def judged(runs, keys, which):
    """The verdict rows with `keys` changed in the recipe's or the baseline's runs; [] where none can be given."""
    mixed = [changed(run, keys) if (index >= 2) == (which == "recipe") else run for index, run in enumerate(runs)]
    if "validation_hash" in keys:
        with pytest.raises(ConfigError, match="not comparable"):
            compare_runs(mixed, Terms(), "precision=bf16")
        return []
    rows = compare_runs(mixed, Terms(), "precision=bf16").as_data()["verdicts"]
    assert len(rows) == 1
    return rows


RESOLVED = {"parallel.compile": "compiled", "data.skip_samples": "skipped_samples"}
"""{key of a config: the fact by which runs are compared in its place}."""


def means_something(key):
    return not any(key == each or (each.endswith(".") and key.startswith(each)) for each in NO_MEANING)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), which=st.sampled_from(["recipe", "baseline"]))
def test_a_confounded_set_is_never_called_controlled(runs, data, which):
    keys = data.draw(st.lists(st.sampled_from(keys_of(runs[0])), min_size=1, max_size=4, unique=True))
    expected = {RESOLVED.get(key, key) for key in keys if means_something(key)}
    for row in judged(runs, keys, which):
        assert row["controlled"] == (not expected)
        assert {each["key"] for each in row["confounders"]} == expected
        assert ("not controlled" in row["line"]) == bool(expected)


def test_every_single_key_is_either_listed_or_known_to_mean_nothing(runs):
    for key in keys_of(runs[0]):
        for row in judged(runs, [key], "recipe"):
            assert row["controlled"] != means_something(key), key


def test_the_location_of_equal_data_is_neither_confounder_nor_setting(runs):
    """One recipe started from two folders, on one text."""

    def lying_in(folder, run):
        return replace(run, config={**run.config, "data.sources.code.path": f"/{folder}/text.jsonl"})

    spread = [lying_in(folder, run) for folder, run in zip("abba", runs, strict=True)]
    (row,) = compare_runs(spread, Terms(), "precision=bf16").as_data()["verdicts"]
    assert (row["controlled"], row["pairs"]) == (True, 2)
    other = [*spread[:2], *(changed(lying_in("c", run), ["data_hash"]) for run in spread[2:])]
    (row,) = compare_runs(other, Terms(), "precision=bf16").as_data()["verdicts"]
    assert [each["key"] for each in row["confounders"]] == ["data_hash"]


SEEN = {
    "watched": ("data.sources.seen.role=validation",),
    "never drawn": ("data.sources.seen.weight=0", "data.validation.sequences=9"),
}


@pytest.mark.parametrize("how", SEEN)
def test_a_source_that_is_only_scored_confounds_nothing_on_a_source_that_both_score(tmp_path, how):
    seen = "data.sources.seen.loader=jsonl", f"data.sources.seen.path={tmp_path}/seen.jsonl", *SEEN[how]
    whole = "v" * 32 if how == "watched" else "w" * 32  # val_loss is a mean over sources of weight 0, too
    made = {}
    for seed in (0, 1):
        for name, words, hashes, all_of_it in (
            ("bf16", (), {"code": "c" * 32}, "v" * 32),
            ("mxfp8", seen, {"code": "c" * 32, "seen": "s" * 32}, whole),
        ):
            folder = tmp_path / f"{name}{seed}"
            summary = {"validation_hashes": hashes, "validation_hash": all_of_it}
            words = (f"precision={name}", f"seed={seed}", "data.micro_batch_size=2", *words)
            made[name, seed] = read_run(make_run(folder, *words, noise=seed / 1000, summary=summary))
    runs = list(made.values())
    (row,) = compare_runs(runs, Terms(metric="val_loss/code"), "precision=bf16").as_data()["verdicts"]
    assert (row["controlled"], row["pairs"], row["confounders"], row["setting"]) == (True, 2, [], {})
    if how == "watched":
        (row,) = compare_runs(runs, Terms(), "precision=bf16").as_data()["verdicts"]
        assert (row["controlled"], row["pairs"], row["setting"]) == (True, 2, {})
    else:
        with pytest.raises(ConfigError, match="its val_loss is not comparable"):
            compare_runs(runs, Terms(), "precision=bf16")
    for run in runs[1::2]:
        run.summary["validation_hashes"]["code"] = "d" * 32
    with pytest.raises(ConfigError, match="its val_loss/code is not comparable"):
        compare_runs(runs, Terms(metric="val_loss/code"), "precision=bf16")


def test_gaps_are_only_shown_for_sources_scored_on_the_same_text(tmp_path):
    def run(name, code):
        summary = {"validation_hashes": {"code": code}}
        return read_run(make_run(tmp_path / f"{name}-{code}", f"precision={name}", summary=summary))

    base = run("bf16", "c")
    for code, shown in (("c", ["code"]), ("d", [])):
        (row,) = compare_runs([base, run("mxfp8", code)], Terms(), "precision=bf16").as_data()["verdicts"]
        assert list(row["gap_by_source"]) == shown


def test_nothing_changed_is_controlled(runs):
    (row,) = compare_runs(runs, Terms(), "precision=bf16").as_data()["verdicts"]
    assert row["controlled"]
    assert row["pairs"] == 2


def test_one_confounded_pair_of_several_is_enough(runs):
    mixed = [*runs[:3], changed(runs[3], ["versions.torch"])]
    (row,) = compare_runs(mixed, Terms(), "precision=bf16").as_data()["verdicts"]
    assert row["confounders"] == [{"key": "versions.torch", "values": ["2.13.0", "2.12.0"]}]


def test_a_recipes_optimizer_hints_are_part_of_it(tmp_path):
    made = []
    for seed in (0, 1):
        made.append(read_run(make_run(tmp_path / f"a{seed}", "precision=bf16", f"seed={seed}")))
        words = ("precision=mxfp8", "precision.optimizer.eps=1e-6", f"seed={seed}")
        made.append(read_run(make_run(tmp_path / f"b{seed}", *words, noise=0.001 * seed)))
    (row,) = compare_runs(made, Terms()).as_data()["verdicts"]
    assert row["controlled"]


def test_an_exact_partner_is_preferred(tmp_path):
    made = [read_run(make_run(tmp_path / "near", "precision=bf16", "optim.eps=1e-6"))]
    made.append(read_run(make_run(tmp_path / "exact", "precision=bf16", losses={100: curve(100) + 0.5})))
    made.append(read_run(make_run(tmp_path / "recipe", "precision=mxfp8", losses={100: curve(100) + 0.6})))
    (row,) = compare_runs(made, Terms()).as_data()["verdicts"]
    assert row["controlled"]
    assert row["gap"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("ours", "theirs", "listed"),
    [
        ({}, {"trainer.max_steps": [50]}, {"earlier.trainer.max_steps"}),
        ({"trainer.max_steps": [50]}, {"trainer.max_steps": [50]}, set()),
        ({}, {"code_hash": ["old"], "checkpoint.keep_last": [1]}, {"earlier.code_hash"}),
        ({}, {"parallel.dp_shard": [2], "trainer.devices": [2], "parallel.zero_stage": [3]}, set()),  # the same bits
        ({"data.micro_batch_size": [4]}, {}, {"earlier.data.micro_batch_size"}),
    ],
)
def test_settings_changed_across_resumes_are_confounders(ours, theirs, listed, tmp_path):
    made = []
    for seed in (0, 1):
        for name, earlier in (("bf16", ours), ("mxfp8", theirs)):
            words = (f"precision={name}", f"seed={seed}")
            made.append(read_run(make_run(tmp_path / f"{name}{seed}", *words, summary={"earlier": earlier})))
    (row,) = compare_runs(made, Terms()).as_data()["verdicts"]
    assert {each["key"] for each in row["confounders"]} == listed
    assert row["controlled"] == (not listed)


@pytest.mark.parametrize(
    ("target", "controlled"),
    [
        ("lightning.pytorch.callbacks.EMAWeightAveraging", False),
        ("lightning_llm.callbacks.profile.Profile", True),
    ],
)
def test_foreign_callbacks_are_confounders(target, controlled, tmp_path):
    extra = [f"+callbacks.extra._target_={target}"]
    extra += [] if controlled else ["+callbacks.extra.decay=0.9"]
    made = []
    for seed in (0, 1):
        made.append(read_run(make_run(tmp_path / f"a{seed}", "precision=bf16", f"seed={seed}")))
        made.append(read_run(make_run(tmp_path / f"b{seed}", "precision=mxfp8", f"seed={seed}", *extra)))
    (row,) = compare_runs(made, Terms(), "precision=bf16").as_data()["verdicts"]
    assert row["controlled"] == controlled
    if not controlled:
        assert {each["key"] for each in row["confounders"]} == {"callbacks.extra._target_", "callbacks.extra.decay"}


def test_recipe_options_and_layer_rules_are_compared(tmp_path):
    rule = '[{names: ["*.o_proj"], high: true}]'
    words = ("precision.allow=[mx_gradients_in_e5m2]", f"precision.modules.casts={rule}")
    for number, word in enumerate(words):
        pair = [
            read_run(make_run(tmp_path / f"{number}{i}", "precision=mxfp8", *more))
            for i, more in enumerate(((), (word,)))
        ]
        assert varying_keys(pair) == [word.partition("=")[0]]
