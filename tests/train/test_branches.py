"""A run that branches off a trunk: the same bits where nothing was changed, the trunk left as it was. 20 seconds."""

import json
import shutil

import pytest

from lightning_llm.__main__ import main
from lightning_llm.model.decoder import Decoder
from lightning_llm.precision.cast import inductor
from lightning_llm.tracking.files import summary_of
from tests.planted import infinite_gradient
from tests.run_metrics import curve, read_metrics, read_tensors, same_weights, steps_saved, weights

STEP = 4


def branch_words(trunk, folder, *more):
    """The words of a branch of `trunk` in `folder`/run; all else is the trunk's."""
    return [f"branch_from={trunk}", f"run.root={folder}", f"run.dir={folder / 'run'}", *more]


def content(folder):
    """Every file of a folder with its bytes and time."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}


def after(run, step):
    return [entry for entry in curve(run) if entry[0] > step]


def test_a_branch_with_nothing_changed_is_the_trunk_s_own_continuation(whole, tmp_path, capsys):
    before = content(whole)
    trunk = whole / "checkpoints" / f"step={STEP}"
    assert main(["train", *branch_words(trunk, tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"branch from step {STEP} of 6 to 6: {trunk}" in said
    assert "branch changes nothing" in said
    run = tmp_path / "run"
    assert curve(run) == after(whole, STEP)
    assert same_weights(run, whole, 6)
    assert content(whole) == before
    summary, known = summary_of(run), summary_of(whole)
    assert (summary["run_id"] != known["run_id"], summary["begun_at_step"]) == (True, STEP)
    assert "earlier" not in summary
    about = summary["branch"]
    assert (about["trunk"], about["run_id"], about["step"]) == (str(whole), known["run_id"], STEP)
    assert (about["max_steps"], about["seed"], about["changed"]) == (6, 0, {})
    assert len(about["digest"]) == 32


def test_what_kahan_keeps_begins_at_zero_in_a_branch(whole, tmp_path):
    trunk = whole / "checkpoints" / f"step={STEP}"
    assert main(["train", *branch_words(trunk, tmp_path, "precision=bf16_kahan")]) == 0
    last = read_tensors(tmp_path / "run" / "checkpoints" / "step=6")
    kept = [tensor for name, tensor in last.items() if name.endswith(".compensation")]
    assert sum(tensor.count_nonzero() for tensor in kept) > 0


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16_kahan", "bf16_sr"])
def test_rounded_updates_go_on_to_the_bits(precision, tmp_path, small_run):
    assert main(["train", *small_run(tmp_path / "trunk", f"precision={precision}")]) == 0
    trunk = tmp_path / "trunk" / "run"
    assert main(["train", *branch_words(trunk / "checkpoints" / f"step={STEP}", tmp_path / "same")]) == 0
    assert curve(tmp_path / "same" / "run") == after(trunk, STEP)
    assert same_weights(tmp_path / "same" / "run", trunk, 6)


def test_a_branch_inherits_the_state_of_the_recipe(tmp_path, small_run, monkeypatch):
    monkeypatch.setattr(inductor, "why_not", lambda device_type: "the test wants it so")  # eager: no compile time
    assert main(["train", *small_run(tmp_path / "trunk", "precision=fp8_delayed")]) == 0
    trunk = tmp_path / "trunk" / "run"
    step = trunk / "checkpoints" / f"step={STEP}"
    assert main(["train", *branch_words(step, tmp_path / "same")]) == 0
    assert curve(tmp_path / "same" / "run") == after(trunk, STEP)
    assert same_weights(tmp_path / "same" / "run", trunk, 6)
    assert main(["train", *branch_words(step, tmp_path / "fp32", "precision=fp32")]) == 0
    assert curve(tmp_path / "fp32" / "run") != after(trunk, STEP)
    first = [
        read_tensors(each / "run" / "checkpoints" / f"step={STEP}") for each in (tmp_path / "fp32", tmp_path / "trunk")
    ]
    assert all((value == first[1][name]).all() for name, value in first[0].items())  # moments, too


def test_a_recipe_is_switched_on_late(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(inductor, "why_not", lambda device_type: "the test wants it so")
    step = whole / "checkpoints" / f"step={STEP}"
    for precision in ("fp8_delayed", "mxfp4_sr_norht", "bf16_true", "fp16"):
        folder = tmp_path / precision
        assert main(["train", *branch_words(step, folder, f"precision={precision}")]) == 0
        run = folder / "run"
        assert [entry[0] for entry in curve(run) if entry[5] is None] == [5, 6]
        assert curve(run) != after(whole, STEP)
        assert summary_of(run)["branch"]["changed"]["precision.name"] == ["fp32", precision]
    weights_before, rounded = weights(whole, STEP), weights(tmp_path / "bf16_true" / "run", STEP)
    assert all((value == weights_before[name].to(value.dtype)).all() for name, value in rounded.items())


def test_a_killed_branch_resumes_with_the_same_bits(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "trunk")
    step = tmp_path / "trunk" / "checkpoints" / f"step={STEP}"
    changed = ["optim.learning_rate=1e-3", "checkpoint.every_steps=1"]
    assert main(["train", *branch_words(step, tmp_path / "one", *changed)]) == 0
    one, two = tmp_path / "one" / "run", tmp_path / "two" / "run"
    words = branch_words(step, tmp_path / "two", *changed, "resume=auto")
    monkeypatch.setattr(Decoder, "forward", infinite_gradient(Decoder.forward, lambda n: True))
    assert main(["train", *words]) == 1  # before its first own step
    assert steps_saved(two) == [STEP]
    monkeypatch.undo()
    about = summary_of(two)["branch"]
    shutil.rmtree(two / "checkpoints")  # as if it had died before it had saved its start
    assert main(["train", *words, "trainer.max_steps=5", "schedule.total_steps=6"]) == 2  # another schedule
    assert main(["train", *words]) == 0
    assert curve(two) == curve(one)
    assert same_weights(one, two, 6)
    shutil.rmtree(two / "checkpoints" / "step=6")
    shutil.rmtree(tmp_path / "trunk")  # which a branch that holds its own start needs no more
    assert main(["train", "--config", str(two / "config.yaml"), "resume=auto"]) == 0  # from its own step 5
    assert curve(two) == curve(one)
    assert summary_of(two)["branch"] == about


def test_changed_options_of_the_optimizer_reach_it_and_its_state_stays(whole, tmp_path):
    step = whole / "checkpoints" / f"step={STEP}"
    changed = ["optim.weight_decay=0.5", "optim.decay_norms=true", "optim.beta2=0.9"]  # other groups of parameters
    assert main(["train", *branch_words(step, tmp_path, *changed)]) == 0
    saved = tmp_path / "run" / "checkpoints" / f"step={STEP}"
    options = json.loads((saved / "progress.json").read_text())["optimizer"]
    decays = {
        value for name, value in options.items() if name.startswith("param_groups.") and name.endswith(".weight_decay")
    }
    assert decays == {0.5, 0.0}  # the embedding alone does not decay
    betas = [value for name, value in options.items() if name.endswith(".betas")]
    assert {tuple(each) for each in betas} == {(0.9, 0.9)}
    moments, before = read_tensors(saved, "optimizer."), read_tensors(step, "optimizer.")
    assert moments.keys() == before.keys()
    assert all((value == before[name]).all() for name, value in moments.items())
    assert not same_weights(tmp_path / "run", whole, 6)


def test_a_cool_down_counts_from_the_trunk_s_first_step(tmp_path, small_run, capsys):
    assert main(["train", *small_run(tmp_path / "trunk", "schedule=constant", "schedule.warmup_steps=2")]) == 0
    step = tmp_path / "trunk" / "run" / "checkpoints" / f"step={STEP}"
    cool = ["schedule=wsd", "schedule.warmup_steps=2", "schedule.decay_fraction=0.5", "schedule.final_factor=0.0"]
    assert main(["train", *branch_words(step, tmp_path, *cool, "trainer.max_steps=8")]) == 0
    out = capsys.readouterr().out
    assert "branch changes schedule constant -> wsd; trainer.max_steps 6 -> 8" in out
    assert "note   the learning rate of the next update is" in out
    rates = [line["lr"] for line in read_metrics(tmp_path / "run") if "lr" in line]
    peak = max(line.get("lr", 0.0) for line in read_metrics(tmp_path / "trunk" / "run"))
    assert rates == pytest.approx([peak * (1 - k / 4) for k in (1, 2, 3, 4)])


@pytest.mark.full
def test_a_branch_of_a_running_python_process_takes_what_is_newest_then(tmp_path, small_run):
    """As in a notebook: the parent run continues between two branches."""
    short = ["trainer.max_steps=2", "schedule.total_steps=6"]
    assert main(["train", *small_run(tmp_path / "trunk", *short)]) == 0
    trunk = tmp_path / "trunk" / "run"
    assert main(["train", *branch_words(trunk, tmp_path / "first", "trainer.max_steps=3")]) == 0
    assert main(["train", *small_run(tmp_path / "trunk", "trainer.max_steps=3", short[1], "resume=auto")]) == 0
    again = branch_words(trunk, tmp_path / "first", "trainer.max_steps=4", "resume=auto")
    assert main(["train", *again]) == 0  # continues the branch itself
    assert summary_of(tmp_path / "first" / "run")["branch"]["step"] == 2
    assert main(["train", *branch_words(trunk, tmp_path / "second", "trainer.max_steps=4")]) == 0
    assert summary_of(tmp_path / "second" / "run")["branch"]["step"] == 3
