"""Branches: composition of the config, refusals, and the position in the data. 15 seconds."""

import json
import re
import shutil

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema.validation import ParsedConfig
from lightning_llm.config.sweep_space import compose_sweep
from lightning_llm.data.mixing.addressing import SampleOrder
from lightning_llm.run.resume.branch import first_step, with_branch_resolved
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.mlflow.tracker import writer_job
from lightning_llm.train.checkpoint.manifest import TENSORS


@pytest.fixture(scope="module")
def trunk(small_run, tmp_path_factory):
    """The folder of a run of four steps, all with checkpoints, of two sources with the same text."""
    folder = tmp_path_factory.mktemp("trunk")
    words = small_run(folder, "trainer.max_steps=4", "checkpoint.every_steps=1", "checkpoint.keep_last=9", "seed=3")
    path = next(word for word in words if word.startswith("data.sources.jsonl.path=")).partition("=")[2]
    other = ["loader: jsonl", f"path: {path}", "weight: 0.0"]
    assert main(["train", *words, f"data.sources.other={{{', '.join(other)}}}"]) == 0
    return folder / "run"


def step(trunk, number):
    return trunk / "checkpoints" / f"step={number}"


def refused(capsys, *words):
    """Return the lines of a refusal by `plan`; fail unless `train` refuses the same."""
    said = []
    for verb in ("plan", "train"):
        assert main([verb, *map(str, words)]) == 2
        said.append(re.sub(r"\d{4}-\d{6}", "TIME", capsys.readouterr().err))  # part of the default run.name
    assert said[0] == said[1]
    return said[0]


def test_a_branch_has_the_parent_run_s_config_and_its_overrides(trunk, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    config = compose_config([f"branch_from={trunk}", "precision=mxfp8", "trainer.max_steps=7", "logger.offline=false"])
    was = load_config(trunk / "config.yaml", [])
    assert (config.precision.name, config.trainer.max_steps, config.logger.offline) == ("mxfp8", 7, False)
    same = {"precision", "trainer", "run", "logger", "branch_from"}
    assert config.model_dump(exclude=same) == was.model_dump(exclude=same)
    assert config.precision == compose_config(["precision=mxfp8"]).precision
    assert (config.run.root, config.run.experiment) == (str(tmp_path), was.run.experiment)
    assert config.run.name != was.run.name
    assert config.branch_from == str(trunk)


def test_a_branch_with_other_data_keeps_the_parent_run_s_tokenizer_and_batches(trunk):
    words = [f"branch_from={step(trunk, 2)}", "data=python", "data.micro_batch_size=1"]
    config = with_branch_resolved(ParsedConfig(compose_config(words))).checked()
    was = load_config(trunk / "config.yaml", []).data
    assert list(config.data.sources) == ["code", "prose"]
    assert (config.data.sequence_length, config.data.global_batch_size) == (was.sequence_length, was.global_batch_size)
    assert (config.data.micro_batch_size, config.data.cache_dir) == (1, was.cache_dir)
    tokenizer = config.data.tokenizer  # no other is trained on other text
    assert (tokenizer.kind, tokenizer.path, tokenizer.vocab_size) == ("file", str(trunk / "tokenizer.json"), None)


def test_presets_for_branches_need_branch_from(trunk, tmp_path, capsys):
    (tmp_path / "recipe").mkdir()
    base = "# @package _global_\ndefaults:\n- override /schedule: constant\n- _self_\nbranch_from: ???\n"
    base += "optim:\n  beta2: 0.9\n"
    (tmp_path / "recipe" / "late.yaml").write_text(base)
    more = "# @package _global_\ndefaults:\n- late\n- _self_\nseed: 5\ncallbacks:\n  sample: null\n"
    (tmp_path / "recipe" / "later.yaml").write_text(more)
    config = compose_config(["recipe=later", f"branch_from={trunk}", "optim.beta1=0.8"], tmp_path)
    assert (config.schedule.name, config.optim.beta2, config.optim.beta1, config.seed) == ("constant", 0.9, 0.8, 5)
    assert (config.recipe, config.model.hidden_size) == ("later", 32)
    with pytest.raises(ConfigError, match="branch_from: a value must be given"):
        compose_config(["recipe=late"], tmp_path)
    said = refused(capsys, "recipe=quickstart", f"branch_from={trunk}")
    assert "recipe: is quickstart, a run from step 0" in said
    assert "`branch_from: ???`" in said


def test_all_keys_that_must_equal_the_parent_run_s_are_reported_at_once(trunk, tmp_path, capsys):
    words = ["model.num_layers=3", "model.vocab_size=330", "optim=muon", "data.sequence_length=64"]
    words += ["data.global_batch_size=8", "data.tokenizer.kind=bytes", "data.tokenizer.vocab_size=null"]
    words += ["model.init_from=/nowhere", "trainer.max_steps=2", f"run.root={tmp_path}"]
    said = refused(capsys, f"branch_from={step(trunk, 3)}", *words)
    for part in (
        f"model.num_layers: is 3, but 2 in the parent run {trunk}.",
        f"model.vocab_size: is 330, but 320 in the parent run {trunk}",
        "model.init_from: cannot be used with branch_from",
        "optim.name: is 'muon', but 'adamw' in the parent run",
        "data.sequence_length: is 64, but 32 in the parent run",
        "data.global_batch_size: is 8, but 4 in the parent run",
        f"data.tokenizer: differs from the tokenizer of the parent run {trunk}",
        f"trainer.max_steps=2: must be above 3, the step of {step(trunk, 3)}.",
        f"branch from an earlier checkpoint: branch_from={step(trunk, 1)}.",
    ):
        assert part in said, part
    assert "8 problems" in said or "9 problems" in said
    assert not any(tmp_path.iterdir())


def test_an_invalid_parent_run_is_reported(trunk, tmp_path, capsys):
    said = refused(capsys, f"branch_from={trunk / 'checkpoints' / 'step=9'}")
    assert "does not exist. There are checkpoints of step 1, 2, 3, 4." in said
    for nothing, shown in (("", "''"), (f"[{trunk}]", f"['{trunk}']")):
        assert f"branch_from: is {shown}. Give a run's folder" in refused(capsys, f"branch_from={nothing}")
    said = refused(capsys, f"branch_from={tmp_path}")
    assert "no run. Give a run's folder" in said
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(trunk / "config.yaml", begun)
    assert f"{begun} has no checkpoint yet" in refused(capsys, f"branch_from={begun}")
    assert f"trainer.max_steps=4: must be above 4, the step of {step(trunk, 4)}" in refused(
        capsys, f"branch_from={trunk}"
    )
    assert "precision: there is no 'mxfp9'" in refused(capsys, f"branch_from={trunk}", "precision=mxfp9")
    said = refused(capsys, f"branch_from={trunk}", "model=from_weights")
    assert "model: is from_weights, and a branch uses its parent run's model" in said


def test_a_damaged_checkpoint_is_skipped_or_reported(trunk, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(trunk, copy)
    (tensors,) = (step(copy, 4) / TENSORS).glob("*.distcp")
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    said = refused(capsys, f"branch_from={step(copy, 4)}", "trainer.max_steps=6")
    assert str(tensors) in said
    assert f"step=4 cannot be used. The next older intact one is branch_from={step(copy, 3)}." in said
    assert main(["plan", "--json", f"branch_from={copy}", "trainer.max_steps=6", "precision=mxfp8"]) == 0
    out, err = capsys.readouterr()
    assert "skipped step=4, which is damaged" in err
    about = json.loads(out)["branch"]
    assert (about["step"], about["checkpoint"]) == (3, str(step(copy, 3)))
    assert about["changed"]["precision.name"] == ["fp32", "mxfp8"]
    for number in (1, 2, 3, 4):
        (step(copy, number) / "manifest.json").write_text("{")
    said = refused(capsys, f"branch_from={copy}")
    assert "step=1/manifest.json" in said
    assert f"branch_from: no checkpoint in {copy / 'checkpoints'} is intact" in said


def test_a_damaged_summary_of_the_parent_run_is_reported(trunk, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(trunk, copy)
    (copy / "summary.json").write_text("{")
    said = refused(capsys, f"branch_from={step(copy, 3)}")
    assert f"branch_from: {copy / 'summary.json'} is damaged" in said
    assert "remove it to branch without the parent run's summary" in said
    (copy / "summary.json").unlink()
    assert main(["plan", f"branch_from={step(copy, 3)}"]) == 0
    capsys.readouterr()
    config = yaml.safe_load((copy / "config.yaml").read_text())
    (copy / "config.yaml").write_text(yaml.safe_dump({**config, "data": 5}))
    assert "data=5: must be a mapping in the parent run's config" in refused(capsys, f"branch_from={step(copy, 3)}")


def test_plan_rejects_the_same_resumes_and_branches_as_train(trunk, small_run, tmp_path, capsys):
    own, named = small_run(tmp_path), [f"run.root={tmp_path}", "run.name=branch"]
    other = tmp_path / "other"
    shutil.copytree(trunk, other)
    for words, told in (
        ([f"branch_from={step(trunk, 2)}", f"resume={other}", *named], f"but None in the run in {other}. Set it back"),
        ([f"branch_from={step(trunk, 2)}", f"resume={trunk}", *named], f"but None in the run in {trunk}. Set it back"),
        (
            [*own, f"resume={tmp_path}"],
            f"resume: {tmp_path} contains no checkpoint. Give a .../checkpoints/step=N folder",
        ),
        ([*own, f"resume={step(trunk, 4)}"], "seed: is 0, but 3 in the run in"),
        (
            ["--config", trunk / "config.yaml", f"resume={trunk}", "trainer.max_steps=2"],
            "trainer.max_steps=2: must be at least 4",
        ),
        (["recipe=quickstart", "resume=auto"], "resume=auto: needs an explicit run.name or run.dir"),
        ([f"branch_from={step(trunk, 2)}", "resume=auto", f"run.dir={trunk}"], "branch_from: is"),
    ):
        assert told in refused(capsys, *words), words
    assert not (tmp_path / "run").exists()


def test_plan_shows_how_a_run_will_resume(trunk, tmp_path, capsys):
    again = ["plan", "--config", str(trunk / "config.yaml"), f"resume={step(trunk, 3)}", f"run.dir={tmp_path / 'new'}"]
    assert main(again) == 0
    assert f"resume from step 3: {step(trunk, 3)}" in capsys.readouterr().out
    assert main(["plan", "recipe=quickstart", f"run.dir={trunk}"]) == 0  # which may be free where it is to train
    assert f"note   `train` would reject run.dir: {trunk} already contains a run." in capsys.readouterr().out
    assert main(["plan", "--config", str(trunk / "config.yaml")]) == 0
    assert "train refuses" not in capsys.readouterr().out


def test_plan_shows_the_changes_of_a_branch(trunk, capsys):
    words = [f"branch_from={step(trunk, 2)}", "precision=mxfp8", "optim.learning_rate=1e-4", "parallel=zero3"]
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert f"branch from step 2 of 4 to 4: {step(trunk, 2)}" in out
    assert "optim.learning_rate 0.003 -> 0.0001" in out or "optim.learning_rate 0.001 -> 0.0001" in out
    assert "parallel single -> zero3" in out
    assert "note   the learning rate of the next update is" in out


def drawn(config, total):
    """The windows that each source gives of the first `total` samples, in order."""
    data = config.data
    mixture = data.chosen_mixture.build(data.trained_weights, data.global_batch_size, config.trainer.max_steps)
    order = SampleOrder(mixture, dict.fromkeys(mixture.names, 10_000), seed=0)
    found = {name: [] for name in mixture.names}
    for index in range(total):
        address = order.locate(index)
        found[mixture.names[address.source]].append(address.window)
    return found


def test_a_changed_mix_continues_each_source_where_it_was_left(trunk):
    """Annealing on more of a source: no window that the trunk has seen comes again, and none is left out."""
    at, width = 3, 4
    words = [f"branch_from={step(trunk, at)}", "data.sources.jsonl.weight=0.5", "data.sources.other.weight=0.5"]
    branch = with_branch_resolved(ParsedConfig(compose_config([*words, "trainer.max_steps=9"]))).checked()
    was = load_config(trunk / "config.yaml", [])
    assert drawn(branch, at * width) == drawn(was, at * width)
    later = drawn(branch, 9 * width)
    assert {name: len(each) for name, each in later.items()} == {"jsonl": 12 + 12, "other": 12}
    whole = drawn(was, 24)["jsonl"]
    assert later["jsonl"] == whole  # the same windows in the same order, more slowly
    again = with_branch_resolved(ParsedConfig(branch)).checked()
    assert again == branch  # a resolved branch stays the same


def test_a_branch_of_a_branch_appends_its_phase(trunk, tmp_path):
    words = [f"branch_from={step(trunk, 2)}", "data.sources.other.weight=1.0", "data.sources.jsonl.weight=1.0"]
    first = with_branch_resolved(
        ParsedConfig(compose_config([*words, f"run.root={tmp_path}", "run.experiment=x", "run.name=y"]))
    )
    assert main(["train", *words, f"run.root={tmp_path}", "run.experiment=x", "run.name=y"]) == 0
    run = tmp_path / "x" / "y"
    made = load_config(run / "config.yaml", [])
    assert made.data.mixture == first.checked().data.mixture
    assert list(made.data.mixture.phases) == ["trunk", "from_step_2"]
    assert summary_of(run)["branch"]["changed"]["data.sources.other.weight"] == [0.0, 1.0]
    tags = writer_job(made, run, summary_of(run))["tags"]
    about = summary_of(run)["branch"]
    assert (tags["branch.step"], tags["branch.run_id"]) == ("2", summary_of(trunk)["run_id"])
    assert (tags["branch.digest"], json.loads(tags["branch.changed"])) == (about["digest"], about["changed"])
    more = [f"branch_from={step(run, 4)}", "data.sources.jsonl.weight=0.0", "trainer.max_steps=8"]
    assert main(["train", *more, f"run.dir={tmp_path / 'z'}", f"run.root={tmp_path}", "trainer.max_steps=5"]) == 0
    roots = [summary_of(each)["branch"]["root_run_id"] for each in (run, tmp_path / "z")]
    assert roots == [summary_of(trunk)["run_id"]] * 2
    second = with_branch_resolved(ParsedConfig(compose_config(more))).checked()
    assert list(second.data.mixture.phases) == ["trunk", "from_step_2", "from_step_4"]
    assert drawn(second, 16) == drawn(made, 16)


def test_a_given_mixture_is_kept_and_repeated_sequences_are_reported(trunk, capsys):
    given = "+data.mixture={kind: phases, phases: {all: {weights: {jsonl: 1.0, other: 1.0}}}}"
    assert main(["plan", f"branch_from={step(trunk, 3)}", given, "data.sources.other.weight=1.0"]) == 0
    out = capsys.readouterr().out
    assert "note   data.sources.jsonl: the parent run has used 12 sequences by step 3, but this mixture counts 6" in out


def test_sweeps_take_several_trunks(trunk, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(trunk, copy)
    both = f"branch_from={step(trunk, 2)},{step(copy, 3)}"
    jobs = compose_sweep([both, "recipe=sweep/branches"])
    assert len(jobs) == 8
    assert {(config.branch_from, config.run.experiment) for _, config in jobs} == {
        (str(step(each, number)), "branches") for each, number in ((trunk, 2), (copy, 3))
    }
    assert {config.precision.name for _, config in jobs} == {"bf16", "fp8_delayed", "mxfp8", "mxfp4_sr"}
    assert {first_step(config) for _, config in jobs} == {2, 3}
    words = ["plan", "-m", "--json", both, "recipe=sweep/branches", "precision=bf16,mxfp8", f"run.root={tmp_path}"]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [job["tokens"] for job in facts["jobs"]] == [2 * 128, 1 * 128] * 2 or [
        job["tokens"] for job in facts["jobs"]
    ] == [256, 256, 128, 128]
    assert main(["plan", "-m", "recipe=sweep/branches"]) == 2
    assert "branch_from: a value must be given" in capsys.readouterr().err
