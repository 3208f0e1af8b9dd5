"""`golden record` and `golden check` of a user's recipe: content of the file, findings, and refusals."""

import json
import math
from pathlib import Path

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.cli import golden as ranks
from lightning_llm.golden.curve import as_fp32
from lightning_llm.golden.file import read_golden
from lightning_llm.golden.measure import nudge_weights
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.linear import Linear
from tests.planted import infinite_gradient, wgrad_of_wrong_tensor
from tests.run_metrics import read_metrics

STEPS = 3
LINEARS = 2 * 7 + 1
"""Calls of a linear layer per micro-batch: seven in each of two blocks, and the head. Two micro-batches per step."""
UP_PROJ_OF_BLOCK_1 = 7 + 5


@pytest.fixture(scope="module")
def words(small_run, tmp_path_factory):
    """The overrides of a recipe of six steps with a warm-up that is longer than the recording."""
    return small_run(tmp_path_factory.mktemp("recipe"), "schedule.warmup_steps=4")


@pytest.fixture(scope="module")
def recorded(words, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("golden") / "mine.json"
    assert main(["golden", "record", *words, "--steps", str(STEPS), "--file", str(file)]) == 0
    return file


def check(words, file, *more) -> int:
    return main(["golden", "check", *words, "--file", str(file), *more])


def checked(words, file, capsys, *more):
    """Return the exit code and the data that `golden check --json` prints."""
    capsys.readouterr()
    code = check(words, file, "--json", *more)
    return code, json.loads(capsys.readouterr().out)


def changed(file, tmp_path, **values) -> Path:
    """Return a copy of a golden file with other values by dotted keys ("origin/versions.torch")."""
    data = json.loads(file.read_text())
    for path, value in values.items():
        *above, last = path.split("/")
        node = data
        for key in above:
            node = node[key]
        node[last] = value
    (tmp_path / "changed.json").write_text(json.dumps(data))
    return tmp_path / "changed.json"


def test_the_file_has_the_first_steps_of_the_run_itself(recorded, words, tmp_path):
    moved = [word for word in words if not word.startswith("run.")]
    assert main(["train", *moved, f"run.dir={tmp_path / 'run'}", "trainer.validate_every_steps=null"]) == 0
    trained = read_metrics(tmp_path / "run")[:STEPS]
    golden = read_golden(recorded)
    assert golden.curve.lr == [each["lr"] for each in trained]
    assert golden.curve.loss == [as_fp32(each["loss"]) for each in trained]
    assert golden.curve.grad_norm == [as_fp32(each["grad_norm"]) for each in trained]
    # They are all of the gradient: their squares sum to the square of its norm, up to fp32's rounding of each.
    assert len(golden.curve.gradient_norms) == LINEARS + 2 * 2 + 2
    for step, norm in enumerate(golden.curve.grad_norm):
        total = math.sqrt(sum(its[step] ** 2 for its in golden.curve.gradient_norms.values()))
        assert total == pytest.approx(norm, rel=2e-7)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert golden.origin["versions.torch"] == summary["versions"]["torch"]
    assert golden.origin["data_hash"] == summary["data_hash"]
    assert golden.hashes["config"] != golden.hashes["precision"]
    text = recorded.read_text()
    assert str(tmp_path.parent) not in text  # no place of this machine, in a file that is committed
    assert len(text) < 12_000


def test_the_same_recipe_is_equal_wherever_it_is_kept(recorded, words, capsys):
    assert check([*words, "run.name=other", "callbacks=default"], recorded) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"equal   {STEPS} steps, 21 parameters: the same bits as {recorded}\n")
    assert "same    recipe, layout, machine, versions and code are as recorded" in told


def test_a_wgrad_of_the_wrong_tensor_is_named_at_the_step_where_it_begins(recorded, words, capsys, monkeypatch):
    planted = wgrad_of_wrong_tensor(Linear.multiply, lambda call: call % LINEARS == UP_PROJ_OF_BLOCK_1)
    monkeypatch.setattr(Linear, "multiply", planted)
    code, found = checked(words, recorded, capsys)
    first = found["first_difference"]
    assert (code, found["outcome"]) == (1, "different")
    assert (first["step"], first["quantity"]) == (1, "gradient_norm")
    assert first["parameter"] == "layers.1.feed_forward.up_proj.weight"
    assert first["others"] == 1  # the norm of all together: every other gradient of step 1, and its loss, are equal
    assert first["relative_difference"] > 1e-3
    assert check(words, recorded) == 1
    told = capsys.readouterr().out
    assert told.startswith(f"DIFFERENT from {recorded} at step 1: the gradient norm of layers.1.feed_forward.up_proj.")
    assert "the loss of step 1 is equal, and so are gradients nearer to it" in told


def test_later_effects_need_later_rungs(recorded, words, capsys, monkeypatch):
    planted = wgrad_of_wrong_tensor(Linear.multiply, lambda call: call == 2 * 2 * LINEARS)  # q_proj of block 0
    monkeypatch.setattr(Linear, "multiply", planted)
    first = checked(words, recorded, capsys)[1]["first_difference"]
    assert (first["step"], first["parameter"]) == (3, "layers.0.attention.q_proj.weight")


def test_another_machine_is_named_and_told_how_to_get_a_band(recorded, words, capsys, tmp_path):
    lr = read_golden(recorded).curve.lr
    loss = [each * (1 + 1e-6) for each in read_golden(recorded).curve.loss]
    other = changed(recorded, tmp_path, **{"origin/versions.torch": "2.12.0", "curve/loss": loss, "curve/lr": lr})
    assert check(words, other) == 1
    told = capsys.readouterr().out
    assert "at step 1: the loss is" in told
    assert "relative difference 1e-06, must be equal" in told
    assert "machine versions.torch: 2.12.0 -> " in told
    assert "note    this machine or layout may round otherwise" in told
    capsys.readouterr()
    equal = changed(recorded, tmp_path, **{"origin/versions.torch": "2.12.0"})
    code, found = checked(words, equal, capsys)
    assert (code, found["outcome"], found["may_round_otherwise"]) == (0, "equal", True)


@pytest.fixture(scope="module")
def nudged(words, tmp_path_factory) -> Path:
    """A golden file with a band of runs that begin with other last bits, all made in this process."""
    file = tmp_path_factory.mktemp("nudged") / "mine.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_in_own_ranks", ranks._here)
        options = "--steps", "2", "--repeats", "3", "--nudge", "--file", str(file)
        assert main(["golden", "record", *words, *options]) == 0
    return file


def test_a_band_accepts_other_rounding_and_rejects_a_fault(nudged, words, capsys, monkeypatch, tmp_path):
    noise = read_golden(nudged).noise
    assert (noise.runs, noise.nudged) == (4, True)
    assert 1e-9 < max(noise.sd.loss) < 1e-5  # of a loss near 6, in fp32
    off = [each * (1 + 3e-7) for each in read_golden(nudged).curve.loss]
    here = changed(nudged, tmp_path, **{"curve/loss": off})
    assert checked(words, here, capsys)[1]["outcome"] == "different"  # this machine is the recorded one: bits
    assert checked(words, here, capsys, "--band")[1]["outcome"] == "within_band"
    elsewhere = changed(here, tmp_path, **{"origin/fingerprint.cpu": "AVX2"})
    code, found = checked(words, elsewhere, capsys)
    assert (code, found["outcome"], found["band"]["runs"]) == (0, "within_band", 4)
    assert found["differences"]["machine"]["fingerprint.cpu"][0] == "AVX2"
    assert found["band"]["loss"] < 1e-4
    planted = wgrad_of_wrong_tensor(Linear.multiply, lambda call: call % LINEARS == UP_PROJ_OF_BLOCK_1)
    monkeypatch.setattr(Linear, "multiply", planted)
    code, found = checked(words, elsewhere, capsys)
    first = found["first_difference"]
    assert (code, first["step"], first["parameter"]) == (1, 1, "layers.1.feed_forward.up_proj.weight")
    assert not first["allowed_from"] <= first["now"] <= first["allowed_to"]
    assert first["allowed_from"] < first["recorded"] < first["allowed_to"]


def test_nudged_weights_are_off_as_far_as_sums_round():
    generator = torch.Generator().manual_seed(0)
    weights = {"wide": torch.randn(64, 1024, generator=generator), "vector": torch.ones(96), "zero": torch.zeros(8)}
    weights["low"] = torch.randn(32, 64, generator=generator).bfloat16()

    def moved(number):
        model = torch.nn.ParameterDict({name: torch.nn.Parameter(its.clone()) for name, its in weights.items()})
        nudge_weights(model, number)
        return {name: its.detach() for name, its in model.items()}

    one, again, other = moved(1), moved(1), moved(2)
    for name, its in weights.items():
        assert torch.equal(one[name], again[name])
        assert (one[name] != its).all()
    off = ((one["wide"].double() - weights["wide"].double()) / weights["wide"].double()).abs() * 2**24
    assert off.mean() == pytest.approx(32, rel=1e-3)  # the root of 1024 sums' terms
    assert 0.48 < (one["wide"] > weights["wide"]).double().mean() < 0.52
    assert 0.48 < ((one["wide"] > weights["wide"]) == (other["wide"] > weights["wide"])).double().mean() < 0.52
    assert set(one["low"].view(torch.int16).sub(weights["low"].view(torch.int16)).unique().tolist()) == {-1, 1}


def test_own_callbacks_define_another_sweep_and_observers_do_not(words, recorded, capsys, tmp_path):
    own = ["+callbacks.halved._target_=tests.own_callbacks.Halved", "callbacks=default"]
    file = tmp_path / "halved.json"
    assert main(["golden", "record", *words, *own, "--steps", "1", "--file", str(file)]) == 0
    plain, halved = read_golden(recorded).curve, read_golden(file).curve
    assert halved.loss[0] == plain.loss[0]
    assert {name: as_fp32(its[0] * 2) for name, its in halved.gradient_norms.items()} == {
        name: its[0] for name, its in plain.gradient_norms.items()
    }
    capsys.readouterr()
    assert check(words, file) == 2
    assert "callbacks.halved._target_: is none, and tests.own_callbacks.Halved in" in capsys.readouterr().err


def test_a_failed_run_is_reported(words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Decoder, "forward", infinite_gradient(Decoder.forward, lambda call: call == 2))
    capsys.readouterr()
    file = tmp_path / "failed.json"
    assert main(["golden", "record", *words, "--steps", "3", "--file", str(file)]) == 1
    assert "error: " in (told := capsys.readouterr().err)
    assert "step 2" in told
    assert not file.exists()


def test_another_recipe_is_refused_or_compared_on_demand(recorded, words, capsys):
    capsys.readouterr()
    others = [*words, "optim.learning_rate=2e-3", "seed=5"]
    assert check(others, recorded) == 2
    told = capsys.readouterr().err
    assert f"optim.learning_rate: is 0.002, and 0.001 in {recorded}: another recipe" in told
    assert "seed: is 5, and 0" in told
    code, found = checked(others, recorded, capsys, "--allow-differences")
    assert code == 1
    assert found["first_difference"]["quantity"] == "lr"
    assert found["differences"]["recipe"] == {"optim.learning_rate": [0.001, 0.002], "seed": [0, 5]}


def test_other_data_are_another_recipe(recorded, words, capsys, tmp_path):
    other = changed(recorded, tmp_path, **{"origin/data_hash": "0" * 32})
    capsys.readouterr()
    assert check(words, other) == 2
    assert "data_hash: is " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("action", "options", "said"),
    [
        ("check", ["--file", "NOWHERE"], "is not there. Record it first: lightning-llm golden record"),
        ("check", ["--file", "BROKEN"], "is no golden file, or a damaged one"),
        ("check", ["--file", "UNLIKE"], "its noise does not match its curve"),
        ("check", ["--file", "LATER"], "has format 2, and this release reads 1"),
        ("check", ["--band"], "--band: needs a recorded band"),
        ("check", ["--false-alarms", "0"], "--false-alarms=0: must be above 0"),
        ("check", ["--steps", "4"], "--steps=4: must be 1 to 3"),
        ("check", ["--steps", "0"], "--steps=0: must be 1 to 3"),
        ("record", [], "already exists. Check against it, choose another file, or add --force"),
        (
            "record",
            ["--file", "BROKEN/mine.json"],
            "mine.json cannot be written. Choose a file in a writable folder",
        ),
        ("record", ["--steps", "0", "--force"], "--steps=0: must be at least 1"),
        ("record", ["--repeats", "1", "--force"], "--repeats=1: must be 0 or at least 2"),
        ("record", ["--nudge", "--force"], "--nudge: needs repeats"),
        ("record", ["resume=auto", "--force"], "resume=auto: not allowed: golden curves begin at step 0"),
        ("record", ["optim.learning_rat=1", "--force"], "Did you mean 'learning_rate'?"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_runs(action, options, said, recorded, words, capsys, tmp_path):
    (tmp_path / "BROKEN").write_text('{"format": 1')
    (tmp_path / "LATER").write_text('{"format": 2}')
    data = json.loads(recorded.read_text())
    one_step = {**{key: its[:1] for key, its in data["curve"].items() if key != "gradient_norms"}, "gradient_norms": {}}
    data["noise"] = {"runs": 3, "nudged": False, "mean": one_step, "sd": one_step}
    (tmp_path / "UNLIKE").write_text(json.dumps(data))
    names = [str(tmp_path / each) if each.split("/")[0].isupper() else each for each in options]
    before = recorded.read_bytes()
    file = [] if "--file" in names else ["--file", str(recorded)]
    capsys.readouterr()
    assert main(["golden", action, *words, *file, *names]) == 2
    assert said in capsys.readouterr().err
    assert recorded.read_bytes() == before


def test_without_a_name_the_file_is_the_recipes(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["golden", "record", *words, "--steps", "1"]) == 0
    assert [file.name for file in (tmp_path / "golden").iterdir()] == ["llama_tiny.json"]


def test_the_first_steps_alone_can_be_checked(recorded, words, tmp_path, capsys):
    data = json.loads(recorded.read_text())
    data["curve"]["loss"][2] += 1.0  # step 3 is another, steps 1 and 2 are as recorded
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(data))
    code, facts = checked(words, file, capsys, "--steps", "2")
    assert (code, facts["outcome"], facts["steps"]) == (0, "equal", 2)
    code, facts = checked(words, file, capsys)
    assert (code, facts["steps"], facts["first_difference"]["step"]) == (1, 3, 3)
