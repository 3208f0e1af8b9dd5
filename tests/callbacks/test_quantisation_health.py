"""Quantization health over real runs: it changes nothing, detects planted values, and reports where NaN began."""

import json
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_llm import quantize
from lightning_llm.callbacks.quantisation_health import QuantisationHealth
from lightning_llm.config.compose import compose_config
from lightning_llm.precision.linear.plan import SLOT_NAMES
from lightning_llm.train.spikes import NonFiniteError
from tests.parallel.traced_run import run_with
from tests.precision.any_module.models import Model, batches, eager, loss_of
from tests.run_metrics import curve, read_metrics, same_weights

BAD = "layers.1.feed_forward.down_proj"


class Plant(pl.Callback):
    """Calls a function of the model before step `step`."""

    def __init__(self, function, step=1):
        self.function, self.step = function, step

    def on_train_batch_start(self, trainer, pl_module, *_):
        if pl_module.completed_steps + 1 == self.step:
            with torch.no_grad():
                self.function(pl_module.model)


def config_of(small_run, folder, precision, *more):
    return compose_config([*small_run(folder), f"precision={precision}", "precision.casts=eager", *more])


def rows(folder):
    """Return health.jsonl as {step: {(module, slot): figures}}."""
    found = {}
    for line in (folder / "health.jsonl").read_text().splitlines():
        record = json.loads(line)
        names = record["columns"][2:]
        found[record["step"]] = {(row[0], row[1]): dict(zip(names, row[2:], strict=True)) for row in record["rows"]}
    return found


def outliers(folder):
    """Return the outliers of health.jsonl as {step: {(module, operand): figures}}."""
    found = {}
    for line in (folder / "health.jsonl").read_text().splitlines():
        record = json.loads(line)
        names = record["outliers"]["columns"][2:]
        its = record["outliers"]["rows"]
        found[record["step"]] = {(row[0], row[1]): dict(zip(names, row[2:], strict=True)) for row in its}
    return found


def test_outlier_channels_are_those_of_numpy(small_run, tmp_path, capsys):
    """Figures of x, w and dy of one layer, also of an operand that a later slot casts, from the tensors themselves."""
    layers = {BAD: [], "layers.0.attention.k_proj": []}

    def catch(model):
        model.get_submodule(BAD).weight[3, 5] = 50.0
        for name, kept in layers.items():
            layer = model.get_submodule(name)
            kept.append(layer.weight.detach().to(torch.bfloat16).float().numpy().copy())

            def look(module, inputs, output, kept=kept):
                kept.append(inputs[0].detach().float().numpy().reshape(-1, module.in_features))
                if output.requires_grad:
                    width = module.out_features
                    output.register_hook(lambda dy: kept.append(dy.float().numpy().reshape(-1, width)))

            layer.register_forward_hook(look)

    words = "precision.fprop.x.format=high", "trainer.max_steps=1", "schedule.warmup_steps=0"
    modules = [f"precision.modules.{end}_blocks_high_precision=0" for end in ("first", "last")]
    config = config_of(small_run, tmp_path, "fp8_current", *words, *modules)
    run_with(config, Plant(catch), QuantisationHealth(every_steps=2))
    found, metrics = outliers(tmp_path / "run")[1], read_metrics(tmp_path / "run")[0]
    micro_batches = config.data.global_batch_size // config.data.micro_batch_size
    for name, (w, *passes) in layers.items():
        passes = passes[: 2 * micro_batches]
        xs, dys = passes[0::2], passes[1::2]
        for operand, matrix in (("x", np.concatenate(xs)), ("w", w), ("dy", np.concatenate(dys))):
            amax = np.abs(matrix).max(axis=0).astype(float)
            used = np.sort(amax[amax > 0])
            median = used[(len(used) - 1) // 2]
            expected = {
                "max_over_median": amax.max() / median,
                "p99_over_median": np.quantile(used, 0.99) / median,
                "channel": amax.argmax(),
                "channels": len(amax),
            }
            assert found[name, operand] == pytest.approx(expected, rel=1e-5), (name, operand)
    assert found[BAD, "w"]["channel"] == 5
    assert metrics["health/w/max_over_median/layers.1"] == pytest.approx(found[BAD, "w"]["max_over_median"], rel=1e-5)
    for operand in ("x", "w", "dy"):
        largest = max(its["max_over_median"] for (_, role), its in found.items() if role == operand)
        assert metrics[f"health/{operand}/max_over_median"] == pytest.approx(largest, rel=1e-5)
    table = (tmp_path / "run/health.txt").read_text()
    assert table.strip() in capsys.readouterr().out
    assert [BAD, "w"] in [line.split()[:2] for line in table.split("outliers, the largest amax")[1].splitlines()]
    assert (tmp_path / "run/outliers.svg").read_text().count('<g id="axes_') == 3


@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.full), ("parallel.activation_checkpoint=full",)])
def test_losses_and_weights_have_the_same_bits(more, small_run, tmp_path):
    words = ["trainer.max_steps=4", "checkpoint.every_steps=4"]
    run_with(config_of(small_run, tmp_path / "bare", "nvfp4", *words, *more))
    run_with(config_of(small_run, tmp_path / "seen", "nvfp4", *words, *more), QuantisationHealth(every_steps=2))
    bare, seen = tmp_path / "bare/run", tmp_path / "seen/run"
    assert curve(seen) == curve(bare)
    assert same_weights(seen, bare, 4)
    assert sorted(rows(seen)) == [1, 2, 4]
    records = [record for record in read_metrics(seen) if "loss" in record]
    assert [record["step"] for record in records if "health/fprop.x/sqnr_db" in record] == [1, 2, 4]
    if not more:
        return
    run_with(config_of(small_run, tmp_path / "plain", "nvfp4", *words), QuantisationHealth(every_steps=2))
    assert rows(tmp_path / "plain/run") == rows(seen), "a recomputation was observed a second time"


def test_a_bad_layer_is_the_worst(small_run, tmp_path, capsys):
    """One huge weight under one scale per tensor: the layer's others fall below the smallest number."""

    def outlier(model):
        model.get_submodule(BAD).weight[3, 5] = 3e4

    words = "precision.modules.first_blocks_high_precision=0", "precision.modules.last_blocks_high_precision=0"
    config = config_of(small_run, tmp_path, "fp8_current", *words)
    run_with(config, Plant(outlier), QuantisationHealth(every_steps=2, worst=3))
    first = rows(tmp_path / "run")[1]
    by_underflow = sorted(first, key=lambda key: -first[key]["underflow_percent"])
    assert set(by_underflow[:2]) == {(BAD, "fprop.w"), (BAD, "dgrad.w")}
    assert first[BAD, "fprop.w"]["underflow_percent"] > 99
    assert first[BAD, "fprop.w"]["scale_log2_max"] > 6
    text = (tmp_path / "run" / "health.txt").read_text()
    assert text.strip() in capsys.readouterr().out
    record = read_metrics(tmp_path / "run")[0]
    assert record["health/fprop.w/underflow_percent"] > 5 > record["health/fprop.x/underflow_percent"]


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_the_message_names_the_origin_of_nan(precision, small_run, tmp_path):
    def spoil(model):
        model.get_submodule(BAD).weight[0, 0] = float("nan")

    config = config_of(small_run, tmp_path, precision)
    with pytest.raises(NonFiniteError) as caught:
        run_with(config, Plant(spoil, step=3), QuantisationHealth())
    assert f"first appeared in {BAD}, operand fprop.w, of micro-batch 0" in str(caught.value)
    assert "step 3" in str(caught.value)
    assert BAD in json.loads((tmp_path / "run/summary.json").read_text())["detail"]


def test_nan_outside_of_linears_is_located(small_run, tmp_path):
    def spoil(model):
        model.norm.weight[0] = float("inf")

    with pytest.raises(NonFiniteError) as caught:
        run_with(config_of(small_run, tmp_path, "mxfp8"), Plant(spoil), QuantisationHealth())
    assert "head, operand fprop.x" in str(caught.value)


def test_without_the_callback_nothing_is_looked_for(small_run, tmp_path):
    def spoil(model):
        model.get_submodule(BAD).weight[0, 0] = float("nan")

    with pytest.raises(NonFiniteError) as caught:
        run_with(config_of(small_run, tmp_path, "mxfp8"), Plant(spoil))
    assert "first appeared" not in str(caught.value)


def test_delayed_scales_are_seen_to_change(small_run, tmp_path):
    run_with(config_of(small_run, tmp_path, "fp8_delayed"), QuantisationHealth(every_steps=1))
    found = rows(tmp_path / "run")
    one = "layers.0.attention.q_proj", "fprop.x"
    assert found[1][one]["scales_changed_percent"] is None  # nothing before it
    assert found[2][one]["scales_changed_percent"] == 100  # from 1 to the scale of the first step's amax
    assert found[1][one]["scale_log2_max"] == 0


def test_a_resumed_run_measures_its_steps_again(small_run, tmp_path):
    words = ("trainer.max_steps=4", "checkpoint.every_steps=2")
    run_with(config_of(small_run, tmp_path, "mxfp8", *words), QuantisationHealth(every_steps=1))
    whole = rows(tmp_path / "run")
    checkpoint = Path(tmp_path / "run/checkpoints/step=4")
    checkpoint.rename(checkpoint.with_name("gone"))
    run_with(config_of(small_run, tmp_path, "mxfp8", *words, "resume=auto"), QuantisationHealth(every_steps=1))
    again = rows(tmp_path / "run")
    assert sorted(again) == [1, 2, 3, 4]
    assert len((tmp_path / "run/health.jsonl").read_text().splitlines()) == 4
    drop = "scales_changed_percent"  # needs the step before, which a resumed run did not see
    assert [{**each, drop: 0} for each in again[4].values()] == [{**each, drop: 0} for each in whole[4].values()]


def test_the_group_is_composed(small_run, tmp_path):
    config = compose_config([*small_run(tmp_path), "callbacks=health", "callbacks.quantisation_health.every_steps=7"])
    assert config.callbacks["quantisation_health"]["every_steps"] == 7
    assert "throughput" in config.callbacks


class Foreign(pl.LightningModule):
    """A LightningModule that knows nothing of this package, with batches of two micro-batches per step."""

    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, tokens, _):
        return loss_of(self.model, tokens)

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), 0.1)


def test_any_lightning_module_that_quantize_changed_is_observed(tmp_path, capsys):
    module, plain = Foreign(), Model()
    report = quantize(module, eager("mxfp8"), blocks="model.layers")
    trainer = pl.Trainer(
        max_steps=4, accumulate_grad_batches=2, accelerator="cpu", logger=False, default_root_dir=tmp_path,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[QuantisationHealth(every_steps=2)],
    )  # fmt: skip
    trainer.fit(module, batches(5).flatten(0, 1))
    assert report.at == (4, 0)
    found = rows(tmp_path)
    assert list(found) == [1, 2, 4]
    names = [f"model.layers.{at}.{name}" for at in range(3) for name in ("up", "down")]
    assert list(found[4]) == [(name, slot) for name in names for slot in SLOT_NAMES]
    assert trainer.callback_metrics["health/fprop.w/sqnr_db"] > 20
    assert "quantization health at step 4: the 10 worst of 36 tensors" in capsys.readouterr().out
    assert module.model.layers[0].up.observe is None
    same = quantize(plain, eager("mxfp8"))  # the first step, of both micro-batches
    with same.health() as figures:
        for tokens in batches(5)[0]:
            (loss_of(plain, tokens) / 2).backward()
    first = {(f"model.{name}", slot): each["sqnr_db"] for (name, slot), each in figures.items()}
    assert {key: each["sqnr_db"] for key, each in found[1].items()} == pytest.approx(first, rel=1e-4)
