"""Everything a stranger typed or left in a file by mistake: exit 2, a line per problem, nothing made. 15 seconds."""

import re
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.cli.command_line import VERBS
from lightning_llm.config.compose import compose_config
from lightning_llm.config.overrides import parse_overrides
from lightning_llm.config.run_paths import run_path_problems, tracking_problems
from lightning_llm.config.schema.aliases import ALIASES, KEY
from lightning_llm.config.schema.declared_types import fields_at
from lightning_llm.plan.check import config_problems
from lightning_llm.plan.resolve import DerivedConfig
from tests.config.refusals import outputs, refused  # noqa: F401 - outputs is a fixture of every test


@pytest.fixture(scope="module")
def config():
    return compose_config([])


NO_OVERRIDES = {
    "=5": "=5: has no key before '='",
    "=": "=: has no key before '='",
    "": "'': is not an override",
    "a b": "a b: is not an override",
    "precision = bf16": "without spaces",
    "quickstart": "Did you mean recipe=quickstart?",
    "mxfp8": "Did you mean precision=mxfp8?",
    "precision": "config --group precision` lists them: precision=NAME",
    "precisіon=bf16": "CYRILLIC SMALL LETTER BYELORUSSIAN-UKRAINIAN I",
    "–m": "EN DASH",
    "model@precision=llama_tiny": "moves the group to precision",
    "hydra.run.dir=x": "hydra.run.dir: is a setting of Hydra that is not used here. Use run.dir=",
    "hydra.verbose=true": "hydra.verbose: is a setting of Hydra",
    "hydra/launcher=basic": "hydra/launcher: is a setting of Hydra that is not used here. Use launcher=",
    "trainer.max_steps='5": "Quote a value with such characters",
}
WRONG_VALUES = {
    "precision=“bf16”": "there is no '“bf16”'. Did you mean 'bf16'?",
    "nothing/here=x": "nothing/here: unknown key",
    "seed=99999999999999999999": "must be less than 4294967296",
    "trainer.max_steps=1000000000000000000000000000": "must be less than or equal to 2147483647",
    "model.num_layers=1000000000": "must be less than or equal to 16384",
    "model.hidden_size=-64": "must be greater than 0",
    "optim.learning_rate=inf": "optim.learning_rate=inf: must be a finite number",
    "optim.eps=nan": "optim.eps=nan: must be a finite number",
    "optim.weight_decay=1e300": "optim.weight_decay=1e+300",
    "parallel.timeout_seconds=1e30": "must be less than or equal to 31536000",
    "trainer.devices=100000": "must be less than or equal to 1024",
    "data.num_workers=0x10": "='0x10': must be a valid integer",
    "run.name=null": "run.name=null: must be a valid string",
    "data.sequence_length.x=3": "must be a valid integer, and is a mapping",
}


@pytest.mark.parametrize("said", [NO_OVERRIDES, WRONG_VALUES], ids=["no_overrides", "wrong_values"])
def test_every_invalid_override_has_a_line(said, capsys, tmp_path):
    told = refused(capsys, tmp_path, "plan", "--", *said)
    assert [text for text in said.values() if text not in told] == []
    assert told.startswith(f"error: {len(said)} problems")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipe="], "recipe: there is no ''"),
        (["precision=quarte"], "Did you mean 'quartet' or 'quartet_ii'?"),
        (["parallel=fsdp"], "there is no 'fsdp'. Did you mean 'zero3'?"),
        (["parallel=tp_fsdp"], "Did you mean 'fsdp_tp'?"),
        (["optim.name=lion"], "optim.name: there is no optimizer 'lion'. Known here: adamw, adamw8bit, muon."),
        (
            ["optim=adamw", "optim.nesterov=true"],
            "optimizer 'adamw'. It is a key of optim.name='muon'. Set that, or remove the key (~optim.nesterov if",
        ),
        (["optim.kind=lion"], "optim.kind: unknown key. The optimizer is optim.name: adamw, adamw8bit, muon."),
        (["schedule.type=wsd"], "schedule.type: unknown key. The schedule is schedule.name: constant, cosine, wsd."),
        (["data.tokenizer.name=gpt2"], "data.tokenizer.name: unknown key. Known here: "),
        (["logger=null"], "logger: there is no 'null'. Did you mean 'none'?"),
        (["precision=[bf16,mxfp8]"], "precision: is a list, and its files would be merged."),
        (
            ["trainer.max_steps", "=", "10", "seed:", "3"],
            "trainer.max_steps = 10: has spaces. Write trainer.max_steps=10.",
        ),
        (["checkpoint=none"], "Its keys are checkpoint.every_steps, checkpoint.keep_last, "),
        (["callbacks.progres.every=3"], "or null. Did you mean 'progress'?"),
        (["precision.modules.exclude=head"], "must be a list: precision.modules.exclude=[head]."),
        (
            ["model.blocks={attention:5}"],
            "attention=5: must be a mapping with keys of these: mixer, feed_forward, post_norms,",
        ),
        (["precision.fprop.x=null"], "precision.fprop.x=null: must be a mapping with keys of these: format,"),
        (["precision.phases=[5]"], "phases.0=5: must be a mapping with keys of these: start, end, inherit, fprop,"),
        (["precision.phases=5"], "precision.phases=5: must be a list of mappings."),
        (["model.layers={a:1}"], "model.layers: must be a list, and is a mapping."),
        (["model.layers=[]"], "model.layers: must have at least 1 item."),
        (["model.layers=[5]"], "error: 1 problem"),
        (
            ["data.sources.mine.path=/x"],
            "loader: a value must be given. Known here: huggingface, jsonl, megatron, ",
        ),
        (["data=~/my/book.txt"], "For a file, write data=text data.sources.text.path=~/my/book.txt."),
        (["trainer.max_steps=1e3"], "must be a valid integer. Use 1000."),
        (["callbacks.early=EarlyStopping"], "error: 1 problem"),
        (["+callbacks.early._target_=EarlyStopping"], "Lightning's is lightning.pytorch.callbacks.EarlyStopping."),
        (["recipe=train"], "recipe: there is no 'train'"),
        (["recipe=sweep/decid"], "recipe: there is no 'sweep/decid'. Did you mean 'sweep/decide'?"),
        (["recipe=sweep/nope"], "recipe: there is no 'sweep/nope'. Known here: sweep/aa_noise, sweep/branches, "),
        (["~optim"], "optim: a value must be given"),
        (["~seed"], "Interpolation key 'seed' not found"),
        (["~precision=fp32"], "No match in the defaults list"),
        (["seed=1,2"], "has several values"),
        (["run.experiment=../../x", "run.name=../../x"], "run.experiment: is '../../x', which leads out of run.root"),
        (["run.dir="], "run.dir: is empty"),
        (["-m", "precision=glob(zz*)"], "precision: glob(zz*) has no value"),
        (["-m", "seed=range(0)"], "seed: range(0) has no value"),
        (["-m", "optim.learning_rate=interval(0,1)"], "an interval, which cannot be enumerated"),
        (["-m", "launcher=local,slurm"], "launcher: must be the same for all jobs"),
        (["--config", "/nowhere/config.yaml"], "--config: /nowhere/config.yaml does not exist"),
        (["--config", "/tmp"], "--config: /tmp is a folder"),
        (["--config", "/dev/null"], "is not a regular file"),
        (["--config", "/proc/self/mem"], "cannot be read"),
        (["--config", "x", "-m", "seed=1,2"], "--config: is one resolved run"),
        (["--config", "x", "--config-dir", "/nowhere"], "--config-dir: is /nowhere, not a folder"),
        (["--config-dir", "/nowhere"], "not a folder"),
        (["--info"], "--info: this option of Hydra is not supported"),
        (["--cfg", "hydra"], "--cfg hydra"),
        (["-cn", "x"], "Use recipe=NAME"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--learning-rate", "0.1"], "Overrides have no dashes: key=value"),
        (["--num-layers=3", "--lr=1"], "lr: Did you mean 'optim.learning_rate'?"),
        (["data.micro_batch_size=4", "data.global_batch_size=6"], "Set data.micro_batch_size=3, or this to"),
    ],
)
def test_words(words, said, capsys, tmp_path):
    assert said in refused(capsys, tmp_path, "plan", *words)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../x", "leads out of run.root"),
        ("a/../../x", "leads out of run.root"),
        (".", "leads out of run.root"),
        ("", "is empty"),
        (" ", "is empty"),
        ("a\nb", "is not allowed"),
        ("a\x1b[31m", "is not allowed"),
        ("\udcff", "is not allowed"),
    ],
)
def test_invalid_run_names_are_refused(name, said, config):
    for key in ("experiment", "name"):
        parts = {"experiment": "e", "name": "n", key: name}
        run = config.run.model_copy(update={**parts, "dir": f"{config.run.root}/{parts['experiment']}/{parts['name']}"})
        assert (
            said
            in {each.key: each.text for each in run_path_problems(config.model_copy(update={"run": run}))}[f"run.{key}"]
        )
    # the folder of a sweep's job is not named by its overrides
    run = config.run.model_copy(update={"name": "0 data.sources.jsonl.path=../x", "dir": "/elsewhere/0"})
    assert list(run_path_problems(config.model_copy(update={"run": run}))) == []


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("foo://x", "MLflow has no foo://"),
        ("htp://x", "Did you mean 'http'?"),
        ("http://", "names no database or server"),
        ("sqlite:///", "names no database or server"),
        ("/tmp/mlruns", "not a URI"),
        ("foo://me:hunter2@h/x", "MLflow has no foo://"),
        ("localhost:5000", "not a URI"),
        ("sqlite:////tmp/a b.db", None),
        ("postgresql+psycopg2://me:hunter2@h:5432/db", None),
        ("https://me:hunter2@h", None),
        ("databricks", None),
        (None, None),
    ],
)
def test_tracking_addresses(uri, said, config, monkeypatch):
    for logger in (config.logger.model_copy(update={"tracking_uri": uri}), config.logger):
        found = list(tracking_problems(config.model_copy(update={"logger": logger})))
        assert len(found) == (said is not None)
        assert "hunter2" not in str(found)
        assert said is None or said in found[0].text
        if uri is None:
            return
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # and the same from there


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "there is no verb 'trian'. Did you mean 'train'?"),
        (["recipe=quickstart"], "Use `lightning-llm train recipe=quickstart`."),
        (["config", "--group", "precison"], "Did you mean 'precision'?"),
        (["completion", "tcsh"], "choose from"),
        (["help"], "Use `lightning-llm --help`."),
        (["diff", "neither", "nor"], "error: 2 problems"),
    ],
)
def test_verbs(words, said, capsys, tmp_path):
    assert said in refused(capsys, tmp_path, *words)


def test_without_a_verb_it_lists_them(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert all(f"\n    {verb}" in err for verb in VERBS)


def test_keys_of_other_trainers_get_a_hint(capsys, tmp_path):
    """Every name in the table leads to an existing key or explains the alternative; none is a key of its group."""
    for alias, ours in ALIASES.items():
        if KEY.fullmatch(ours):
            *above, leaf = ours.split(".")
            assert leaf in fields_at(above)
            assert alias not in fields_at(above)
    words = ("model.num_attention_heads=8", "optim.lr=1", "gradient_accumulation_steps=4", "bf16=true", "max_epochs=3")
    told = refused(capsys, tmp_path, "plan", *words, "learning_rate=1")
    for said in (
        "model.num_attention_heads: unknown key. Did you mean 'model.num_heads'?",
        "optim.lr: unknown key. Did you mean 'optim.learning_rate'?",
        "gradient_accumulation_steps: unknown key. Here it is data.global_batch_size over",
        "bf16: unknown key. Here it is the group precision (precision=bf16).",
        "max_epochs: unknown key. Did you mean 'trainer.max_steps'?",
        "learning_rate: unknown key. Did you mean 'optim.learning_rate'?",  # once, which every optimizer has
    ):
        assert said in told


STOPPING = "+callbacks.stop={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: %s}"
RATES = "+callbacks.rates={_target_: lightning.pytorch.callbacks.LearningRateMonitor}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [STOPPING % "val_los"],
            "is 'val_los', which this run does not log. Did you mean 'val_loss'",
        ),
        ([STOPPING % "val/loss", "data.validation.fraction=0"], "'loss'?"),
        ([STOPPING % "val_loss/code", "data.validation.fraction=0"], "data.validation.fraction=0 holds out nothing"),
        ([STOPPING % "val_loss/cod"], "Did you mean 'val_loss/code'?"),
        ([STOPPING % "val_loss_high_precision", "precision=bf16"], "which this run does not log"),
        ([STOPPING % "lr-AdamW/pg1"], "which this run does not log"),
        ([STOPPING % "val_loss_high_precision", "precision=mxfp8"], None),
        ([STOPPING % "loss_scale", "precision=fp16"], None),
        ([STOPPING % "lr-AdamW/pg1", RATES], None),
        ([STOPPING % "mine", "+callbacks.own={_target_: tests.own_callbacks.Remembers}"], None),
    ],
)
def test_early_stopping_must_monitor_a_logged_metric(words, said):
    found = {problem.key: str(problem) for problem in config_problems(DerivedConfig(compose_config(words)))}
    assert said in found["callbacks.stop.monitor"] if said else "callbacks.stop.monitor" not in found


def test_all_problems_come_in_one_list(capsys, tmp_path):
    """Words that are no overrides, keys of the schema, and rules between keys that read none of the wrong ones."""
    told = refused(
        capsys, tmp_path, "plan", "quickstart", "hydra.verbose=1", "model.num_layers=x", "seed=-1", "modle=x",
    )  # fmt: skip
    assert told.startswith("error: 5 problems")
    told = refused(
        capsys, tmp_path, "train",
        "model.num_layers=x", "seed=-1", "trainer.max_stps=3", "data.tokenizer.kind=bits",  # of the schema
        "model.num_heads=5", "data.global_batch_size=7", "data.micro_batch_size=2", "run.experiment=../x",
        "schedule.warmup_steps=9", "schedule.total_steps=9", "logger.tracking_uri=foo://x",
        "data.sources.code.path=/x",
    )  # fmt: skip
    keys = {re.split("[:=]", line)[0].removeprefix("  - ") for line in told.splitlines()[1:]}
    assert keys == {
        "model.num_layers", "seed", "trainer.max_stps", "data.tokenizer.kind",
        "model.hidden_size", "model.num_kv_heads", "data.global_batch_size", "run.experiment", "schedule.warmup_steps",
        "logger.tracking_uri", "data.sources.code.path",
    }  # fmt: skip


def test_a_problem_causes_no_follow_up_problems(capsys, tmp_path):
    # data=jsonl has no path, the only problem: nothing is reported about the weights and caches of its sources.
    assert refused(capsys, tmp_path, "plan", "data=jsonl").startswith("error: 1 problem")
    # The default layout fits two devices, the one that was meant is not known.
    assert refused(capsys, tmp_path, "plan", "parallel=zero33", "trainer.devices=2").startswith("error: 1 problem")
    assert refused(capsys, tmp_path, "plan", "recipe=quikstart", "model.num_heads=5").startswith("error: 1 problem")


def test_the_jobs_of_a_sweep_come_in_one_list_too(capsys, tmp_path):
    told = refused(capsys, tmp_path, "plan", "-m", "seed=0,-1", "data.global_batch_size=3,8", "data.micro_batch_size=2")
    assert "seed=-1" in told
    assert "data.global_batch_size: 3 sequences" in told
    assert told.startswith("error: 2 problems")


def test_values_that_look_like_something_else_are_taken_as_typed(tmp_path):
    for text in ("007", "2026_01", "true", "a=b", "~/x", "it's", "a b", "a\\'b", "/a(1)/b"):
        (parsed,) = parse_overrides([f"data.sources.x.path={text}"])
        assert parsed.value() == text
    assert [parse_overrides([f"{key}=7"])[0].value() for key in ("run.name", "resume", "logger.tags.x")] == ["7"] * 3
    for word, value in (("run.name='7'", "7"), ("seed=7", 7), ("resume=null", None), ("run.name=${a}", "${a}")):
        assert parse_overrides([word])[0].value() == value
    config = compose_config(
        ["data=jsonl", "data.sources.jsonl.path=~/a=b", "run.name=007", "+precision=fp32", "++seed=3"]
    )
    assert (config.data.sources["jsonl"].path, config.run.name) == (str(Path.home() / "a=b"), "007")
    assert (config.precision.name, config.seed) == ("fp32", 3)
    with pytest.raises(ConfigError, match=r"quote text with a comma"):
        compose_config(["data=jsonl", "data.sources.jsonl.path=a,b.jsonl"])


def test_a_glob_chooses_among_a_groups_values(capsys, tmp_path):
    assert main(["plan", "-m", "precision=glob([bf16*,fp32],exclude=*true)"]) == 0
    assert " bf16, bf16_kahan, bf16_sr, fp32\n" in capsys.readouterr().out
