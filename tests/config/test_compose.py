"""Composition and its errors: overrides, and the messages about them."""

import re
from pathlib import Path

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash
from lightning_llm.config.from_file import load_config, read_file
from lightning_llm.config.recipes import recipe_files
from lightning_llm.config.sweep_space import compose_sweep
from lightning_llm.config.yaml_file import write_config
from lightning_llm.data.scoring import COLUMNS, write_scores
from lightning_llm.model.structure import shape_problems
from lightning_llm.plan.check import check_config
from lightning_llm.precision.native.decide import shipped_recipes
from lightning_llm.sweep.jobs import NOT_CHECKED

CONF = Path(__file__).parents[2] / "conf"
GROUPS = ["model", "data", "optim", "schedule", "precision", "parallel", "trainer", "callbacks", "logger"]
OPTIONS = {group: sorted(file.stem for file in (CONF / group).glob("*.yaml")) for group in GROUPS}
OPTIONS["model"].remove("from_weights")  # which is filled from weights: tests/run/test_init_from.py
TOGETHER = [
    pytest.param({group: names[number % len(names)] for group, names in OPTIONS.items()}, marks=marks)
    for number in range(max(map(len, OPTIONS.values())))
    for marks in [() if number < 2 else pytest.mark.full]
]
"""A file of each group at a time, until every file was chosen; tests/frozen composes each of them in `make test`."""


def problems_of(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        compose_config(overrides)
    return {problem.key: problem.text for problem in error.value.problems}


@pytest.mark.parametrize("chosen", TOGETHER, ids=lambda chosen: " ".join(chosen.values()))
def test_every_file_of_every_group_composes(chosen):
    mandatory = {name: name for name in ("jsonl", "text", "parquet", "huggingface", "megatron", "olmo")}
    source = (mandatory | {"python_jsonl": "jsonl"}).get(chosen["data"])
    given = [f"data.sources.{source}.path=/x"] if source else []
    given += [f"data.sources.{name}.path=/x" for name in ("new", "old") if chosen["data"] == "replay"]
    given += ["data.tokenizer.path=/x"] if source in ("megatron", "olmo") else []
    given += ["data.mixture.scores=/x"] if chosen["data"] == "samplemix" else []
    config = compose_config([*(f"{group}={name}" for group, name in chosen.items()), *given])
    named = {group: node.name for group in chosen if hasattr(node := getattr(config, group), "name")}
    assert named == {group: name for group, name in chosen.items() if group != "callbacks"}


def test_every_file_has_the_name_of_its_option():
    files = [CONF / group / f"{name}.yaml" for group in OPTIONS if group != "callbacks" for name in OPTIONS[group]]
    assert [yaml.safe_load(file.read_text())["name"] for file in files] == [file.stem for file in files]


def test_a_file_that_extends_another_has_its_own_name(tmp_path):
    files = {
        "precision/mine": "defaults: [mxfp8]\nfprop: {x: {rounding: stochastic}}\n",
        "precision/deep/er": "defaults: [mxfp8, _self_]\n",
        "precision/named": "defaults: [mxfp8]\nname: chosen\n",
        "model/small": "defaults: [llama_tiny]\nnum_layers: 2\n",
        "optim/fast": "defaults: [adamw]\nlearning_rate: 1\n",
    }
    for name, text in files.items():
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = compose_config(["precision=mine", "model=small", "optim=fast"], tmp_path)
    assert (found.precision.name, found.model.name, found.optim.name) == ("mine", "small", "adamw")
    assert found.precision.fprop.w.format == "e4m3"
    names = [compose_config([f"precision={each}"], tmp_path).precision.name for each in ("deep/er", "named", "mxfp8")]
    assert names == ["er", "chosen", "mxfp8"]


SWALLOW = ["recipe=cpt/swallow_70b", "model.init_from=null", "data.tokenizer.kind=bytes"]


@pytest.mark.parametrize(
    ("words", "group"),
    [
        ([*SWALLOW, "parallel=hsdp"], "parallel"),
        ([*SWALLOW, "parallel=hsdp", "~callbacks.sample"], "parallel"),
        (["recipe=llama3_405b_3d", "precision=mxfp8"], "precision"),
        (["recipe=frontier_22b", "model=llama_8b"], "model"),
        (["recipe=quickstart", "schedule=cosine"], "schedule"),
        (["recipe=quickstart", "optim=muon"], "optim"),
    ],
)
def test_a_group_selected_next_to_a_preset_replaces_the_presets_keys(words, group):
    (choice,) = (word for word in words if word.startswith(f"{group}="))
    found, plain = compose_config(words), compose_config([choice])
    assert getattr(found, group).model_dump() == getattr(plain, group).model_dump()


def test_a_file_that_the_preset_selects_keeps_the_presets_keys():
    own = compose_config(SWALLOW)
    assert (own.parallel.pp, own.parallel.tp, own.parallel.zero_stage) == (8, 4, 1)
    for word in ("parallel=fsdp_pp_tp", "model=llama_70b", "precision=fp8_delayed", "optim=adamw"):
        assert config_hash(compose_config([*SWALLOW, word])) == config_hash(own)
    jobs = [config for _, config in compose_sweep([*SWALLOW, "parallel=fsdp_pp_tp,hsdp"])]
    assert [(each.parallel.name, each.parallel.pp, each.parallel.dp_replicate) for each in jobs] == [
        ("fsdp_pp_tp", 8, 1), ("hsdp", 1, 2),
    ]  # fmt: skip
    searched = compose_sweep(["recipe=sweep/time_to_target", "model=gla_tiny", "seed=0", "optim=adamw", "logger=csv"])
    assert {(config.model.name, config.model.num_layers, config.logger.name) for _, config in searched} == {
        ("gla_tiny", 2, "csv")
    }


def test_batches_and_initial_weights_of_a_recipe_stay_under_other_data_and_models():
    found = compose_config(["recipe=frontier_22b", "data=jsonl", "data.sources.jsonl.path=/x", "parallel.tp=2"])
    assert list(found.data.sources) == ["jsonl"]
    assert (found.data.global_batch_size, found.data.sequence_length, found.parallel.tp) == (256, 2048, 2)
    words = ["recipe=cpt/swallow_8b", "model=llama_tiny", "data.tokenizer.kind=bytes"]
    assert compose_config(words).model.init_from == compose_config(words[:1]).model.init_from == "???"
    ordered = [*SWALLOW, "parallel=hsdp", "parallel.tp=2", "~parallel.dp_replicate", "parallel.pp=2"]
    found = compose_config(ordered)
    assert (found.parallel.tp, found.parallel.pp, found.parallel.dp_replicate) == (2, 2, 1)


def needed(recipe: str, folder: Path) -> list[str]:
    """Overrides that some presets require: paths of documents, and of weights, which a model replaces here."""
    sources = {"cpt/replay": ["new", "old"], "cpt/annealing": ["new", "old", "best"]}.get(recipe, [])
    model = ["model=llama_tiny"] if sources or recipe in ("sweep/replay", "ablate/merge") else []
    (file := folder / "documents.jsonl").write_text('{"text": "one"}\n')
    if recipe == "sweep/branches":
        write_config(compose_config([]), folder / "config.yaml")  # a trunk
        model = [f"branch_from={folder}"]
    if recipe.endswith("distil"):
        write_config(compose_config(["recipe=data_constrained"]), folder / "config.yaml")  # a teacher
        return [f"distil.teachers=[{folder}]"]
    if recipe in ("sweep/samplemix", "sweep/curriculum"):
        return [f"data.mixture.scores={scores_in(folder)}"]
    return [*model, *(f"data.sources.{name}.path={file}" for name in sources)]


def scores_in(folder: Path) -> Path:
    """Write a table without rows: its content is compared with the documents only when data are opened."""
    write_scores(folder / "scores.parquet", {name: [] for name in COLUMNS}, {})
    return folder / "scores.parquet"


SWEEPS = [name for name, _ in recipe_files() if name.startswith(("sweep/", "ablate/"))]
IN_FULL = (
    "ladder",
    "time_to_target",
    "optimizers",
    "layouts",
    "lr_by_precision",
    "mxfp4_ablation",
    "gla",
    "precision_2026",
)
"""Plain products of values; `ladder` has 120 jobs. precision_shootout is one, too, and stays in `make test`."""

BY_LOOKS = ("sweep/decide", "sweep/precision_2026")


@pytest.mark.parametrize("recipe", SWEEPS)
def test_every_sweep_needs_m(recipe):
    with pytest.raises(ConfigError, match="Add -m"):
        compose_config([f"recipe={recipe}"])


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(each, marks=pytest.mark.full) if each.partition("/")[2] in IN_FULL else each for each in SWEEPS],
)
def test_every_sweep_composes_job_by_job(recipe, tmp_path):
    jobs = compose_sweep([f"recipe={recipe}", "seed=7", *needed(recipe, tmp_path)])
    assert len(jobs) > 1
    assert all(config.seed == 7 for _, config in jobs) or recipe in BY_LOOKS  # which take further seeds
    for config in {config.model_dump_json(exclude=NOT_CHECKED): config for _, config in jobs}.values():
        check_config(config)


ONE_RUN = [name for name, _ in recipe_files() if name not in SWEEPS]
ALONE = [name for name in ONE_RUN if not name.startswith(("cpt/", "distil"))]
"""Recipes that need no other run's files: tests/frozen composes and checks each."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(each, marks=pytest.mark.full) if each in ALONE else each for each in ONE_RUN]
)
def test_every_recipe_composes_and_passes_the_check(recipe, tmp_path):
    words = needed(recipe, tmp_path)
    config = compose_config([f"recipe={recipe}", *words, *(["model.max_sequence_length=2048"] if words else [])])
    check_config(config)
    assert config.recipe == recipe


def test_weights_take_the_place_of_a_planned_model_and_the_recipe_stays():
    with pytest.raises(ConfigError) as error:
        compose_config(["recipe=cpt/swallow_8b", "model.init_from=/nowhere"])
    assert [problem.key for problem in error.value.problems] == ["model.init_from"]


def test_missing_weights_cause_no_follow_up_problems():
    with pytest.raises(ConfigError) as error:
        compose_sweep(["recipe=ablate/merge", "optim.learning_rate=fast"])
    assert sorted(problem.key for problem in error.value.problems) == ["model.init_from", "optim.learning_rate"]


def test_command_line_wins_over_recipe_and_recipe_over_groups():
    assert compose_config([]).run.experiment == "default"
    recipe = compose_config(["recipe=quickstart"])
    assert recipe.run.experiment == "quickstart"
    mine = compose_config(["recipe=quickstart", "precision=fp32", "run.experiment=mine", "trainer.max_steps=7"])
    assert (mine.precision.name, mine.run.experiment, mine.trainer.max_steps) == ("fp32", "mine", 7)
    assert mine.optim == recipe.optim


def test_all_problems_at_once_each_with_the_nearest_key():
    found = problems_of(
        "modle=x", "model=llama_tiy", "model.hiden_size=3", "+optim.lerning_rate=1", "trainer.max_steps=abc",
        "max_steps=5", "precision=fp33", "data.sources.code.wieght=2", "++callbacks.throughput.windw=3",
    )  # fmt: skip
    assert "'llama_tiny'" in found["model"]
    assert "'fp32'" in found["precision"]
    assert "'model'" in found["modle"]
    assert "'hidden_size'" in found["model.hiden_size"]
    assert "'learning_rate'" in found["optim.lerning_rate"]
    assert "must be a valid integer" in found["trainer.max_steps"]
    assert "'trainer.max_steps'" in found["max_steps"]
    assert "'weight'" in found["data.sources.code.wieght"]
    assert "unknown argument" in found["callbacks.throughput.windw"]
    assert len(found) == 9


def test_a_typo_inside_a_file_is_found(tmp_path):
    (tmp_path / "model").mkdir()
    text = (CONF / "model" / "llama_tiny.yaml").read_text().replace("hidden_size:", "hiden_size:", 1)
    (tmp_path / "model" / "mine.yaml").write_text(text.replace("llama_tiny", "mine"))
    with pytest.raises(ConfigError) as error:
        compose_config(["model=mine"], tmp_path)
    found = {problem.key: problem.text for problem in error.value.problems}
    assert "'hidden_size'" in found["model.hiden_size"]
    assert "must be given" in found["model.hidden_size"]


def test_arguments_of_a_removed_observer_are_removed(tmp_path):
    """The quickstart gives the sample a prompt; without observers there is none to give it to."""
    config = compose_config(["recipe=quickstart", "callbacks=none"])
    assert config.callbacks == {}
    assert compose_config(["recipe=quickstart"]).callbacks["sample"]["prompt"] == "class "
    with pytest.raises(ConfigError, match=r"callbacks\.sample: "):
        compose_config(["recipe=quickstart", "callbacks=none", "callbacks.sample.prompt=x"])
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\ncallbacks:\n  sampel:\n    prompt: x\n")
    with pytest.raises(ConfigError, match=r"callbacks\.sampel: "):
        compose_config(["recipe=mine"], tmp_path)
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\ncallbacks:\n  profile:\n    steps: 9\n")
    with pytest.raises(ConfigError, match=r"callbacks\.profile: "):  # forgot to choose callbacks=profile
        compose_config(["recipe=mine"], tmp_path)


def test_several_values_without_m_are_refused():
    with pytest.raises(ConfigError, match=r"precision: has several values.*\n?seed: has several values"):
        compose_config(["precision=bf16,mxfp8", "seed=0,1"])


def test_types_and_ranges():
    assert "greater than 0" in problems_of("trainer.max_steps=0")["trainer.max_steps"]
    assert "integer" in problems_of("seed=1.5")["seed"]
    assert "boolean" in problems_of("data.shuffle=maybe")["data.shuffle"]
    assert "Known here: constant, cosine, wsd." in problems_of("schedule.name=step")["schedule.name"]
    assert compose_config(["optim.learning_rate=1"]).optim.learning_rate == 1.0


def test_an_argument_that_is_not_an_override_is_reported():
    assert "is not an override" in problems_of("trainer.max_steps")["trainer.max_steps"]


def test_own_recipes_from_a_folder(tmp_path, capsys):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\n# Mine.\ndefaults:\n  - override /precision: fp32\n  - _self_\nseed: 5\n"
    )
    config = compose_config(["recipe=mine"], tmp_path)
    assert (config.recipe, config.precision.name, config.seed) == ("mine", "fp32", 5)
    assert main(["recipes", "--config-dir", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^mine +Mine\.$", listed, re.MULTILINE)
    assert "quickstart" in listed
    assert main(["recipes", "--config-dir", str(tmp_path / "nowhere")]) == 2


def test_paths_are_absolute_whatever_the_working_directory(tmp_path, monkeypatch):
    here = compose_config(["run.name=x"]).run.dir
    monkeypatch.chdir(tmp_path)
    assert compose_config(["run.name=x"]).run.dir == here
    assert compose_config(["run.dir=out"]).run.dir == str(tmp_path / "out")
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path / "elsewhere"))
    assert compose_config(["run.name=x"]).run.dir == str(tmp_path / "elsewhere" / "default" / "x")


def test_config_yaml_round_trips_and_takes_value_overrides(tmp_path):
    config = compose_config(["recipe=quickstart", "seed=3"])
    write_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", []) == config
    assert not config.parallel.compile
    assert load_config(tmp_path / "config.yaml", ["trainer.compile=true"]).parallel.compile
    again = load_config(tmp_path / "config.yaml", ["seed=4", f"run.dir={tmp_path / 'again'}"])
    assert again.seed == 4
    assert again.model_dump(exclude={"seed", "run"}) == config.model_dump(exclude={"seed", "run"})
    (tmp_path / "typo.yaml").write_text(yaml.safe_dump({**config.model_dump(), "sead": 1}))
    with pytest.raises(ConfigError, match="'seed'"):
        load_config(tmp_path / "typo.yaml", [])
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "missing.yaml", [])


def test_groups_of_a_config_file_can_be_exchanged(tmp_path):
    file = tmp_path / "config.yaml"
    config = compose_config(["recipe=quickstart", "trainer.compile=true", "run.name=x", "optim.beta1=0.5"])
    write_config(config, file)
    words = ["parallel.dp_shard=2", "parallel=zero3", "precision=mxfp4_sr", "model=llama_60m"]  # groups come first
    again = read_file(file, words).checked()
    fresh = compose_config(["recipe=quickstart", "trainer.compile=true", "run.name=x", "optim.beta1=0.5", *words])
    assert again.parallel == fresh.parallel
    assert (again.parallel.dp_shard, again.parallel.compile) == (2, True)
    assert (again.precision, again.model, again.optim) == (fresh.precision, compose_config(words).model, config.optim)
    assert again.data.tokenizer.vocab_size == again.model.vocab_size != config.model.vocab_size
    own = tmp_path / "own"
    (own / "parallel").mkdir(parents=True)
    (own / "parallel" / "mine.yaml").write_text("name: mine\nzero_stage: 2\ndp_shard: 4\n")
    assert read_file(file, ["parallel=mine"], own).checked().parallel.zero_stage == 2
    for words, said in (
        (["precision=fp33"], "Did you mean 'fp32'"),
        (["recipe=other"], "cannot be changed with --config"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_file(file, words)


def test_a_sweep_is_a_product_and_its_problems_are_reported_once():
    jobs = compose_sweep(["recipe=quickstart", "precision=fp32,bf16", "seed=1,2"])
    assert [(config.precision.name, config.seed) for _, config in jobs] == [
        ("fp32", 1),
        ("fp32", 2),
        ("bf16", 1),
        ("bf16", 2),
    ]
    with pytest.raises(ConfigError) as error:
        compose_sweep(["seed=1,2", "trainer.max_stps=4"])
    assert len(error.value.problems) == 1


def test_cross_group_rules():
    config = compose_config([
        "model.num_heads=5", "model.num_kv_heads=3", "data.sequence_length=100000", 
        "schedule.warmup_steps=2000", "schedule.total_steps=2000",
        "trainer.devices=2", "data.global_batch_size=7", "data.micro_batch_size=2",
    ])  # fmt: skip
    with pytest.raises(ConfigError) as error:
        check_config(config)
    keys = {problem.key for problem in error.value.problems}
    assert {"model.hidden_size", "model.num_kv_heads", "data.sequence_length", "schedule.warmup_steps"} <= keys
    assert {"parallel=single", "data.global_batch_size"} <= keys


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_heads": 5, "num_kv_heads": 5}, "model.hidden_size"),
        ({"num_kv_heads": 7}, "model.num_kv_heads"),
        ({"head_dim": 15}, "model.head_dim"),
        ({"position": "learned", "rope_scaling": {"factor": 8.0}}, "model.rope_scaling"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, key):
    model = compose_config([]).model
    if "rope_scaling" in changes:
        changes = {**changes, "rope_scaling": compose_config(["model=llama_8b"]).model.rope_scaling}
    assert shape_problems(model) == []
    assert [problem.key for problem in shape_problems(model.model_copy(update=changes))] == [key]


@pytest.mark.parametrize(
    ("recipe", "said"), [("sweep/samplemix", "prepare data=python --score"), ("sweep/distil", "Give finished runs")]
)
def test_a_missing_input_is_reported_with_the_command_that_makes_it(recipe, said):
    with pytest.raises(ConfigError, match=said):
        compose_sweep([f"recipe={recipe}"])


def test_precision_2026_has_every_recipe_with_a_4_bit_operand():
    preset = yaml.safe_load((CONF.parent / "recipes" / "sweep" / "precision_2026.yaml").read_text())
    (baseline, *arms) = preset["hydra"]["sweeper"]["params"]["precision"].replace("\n", "").replace(" ", "").split(",")
    four_bits = {
        recipe.name
        for recipe in shipped_recipes()
        for casts in recipe.cast_sets().values()
        if any(cast.quantizes and cast.number_format.code_bits == 4 for cast in casts.values())
    }
    assert baseline == "bf16"
    assert sorted(arms) == sorted(four_bits - {"nvfp4"})  # nvfp4_all_blocks, in a model of so few blocks
