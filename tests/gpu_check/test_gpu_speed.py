"""Speed on a CPU: the timed functions, their baselines, and a hand-written model equal to ours."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

from gpu_check import emulation, layers, runs, setting, speed, steps
from gpu_check.checks import MFU, NATIVE_STEP, closing
from gpu_check.journal import Row
from gpu_check.speed import PlainLlama, plain_step
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from tests.gpu_check.check_rows import measured


def planted_run(monkeypatch, rates):
    """Have runs of `lightning-llm train` leave these tokens/s, without one."""

    def finish(self, clock, steps=None):
        self.folder.mkdir()
        lines = [
            {"step": i, "loss": 1.0, "tokens_per_second": rate, "data_seconds": 0.0, "timing_warmup": rate == 1}
            for i, rate in enumerate(rates)
        ]
        (self.folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"torn')

    monkeypatch.setattr(runs.subprocess, "Popen", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(runs.Run, "finish", finish)


def test_speed_holds_train_against_a_hand_written_loop_and_native_fp8_against_bf16(hopper_on_cpu, call, monkeypatch):
    planted_run(monkeypatch, [1, 1, 400_000, 300_000, 500_000])
    found = {row.what: row for row in measured("speed", speed, call)}
    assert [row.note for row in found.values() if row.status == "error"] == []
    rates = {what: row.value for what, row in found.items() if row.unit == "tokens/s"}
    assert list(rates) == [
        "llama_1b, bf16, train", "llama_1b, bf16, hand-written loop", "llama_1b, bf16, our model in a loop",
        *(f"llama_1b, {name}, native, our model in a loop" for name in speed.ORDER),
    ]  # fmt: skip
    assert list(rates.values()) == [400_000] + [2 * 64 / 1e-3] * 5
    over = found["llama_1b, bf16: train's tokens/s over a hand-written loop's"]
    assert (over.status, over.value) == ("ok", 400_000 / 128_000)
    per_token = speed.flops_per_token(speed.model_config("llama_1b"), 64)
    assert found[f"{MFU} train"].value == pytest.approx(100 * 400_000 * per_token / 1e9)
    assert {found[f"{NATIVE_STEP} {name}"].value for name in speed.ORDER} == {1}
    assert closing(call.journal, ())[2].endswith("not met, 1 times (fp8_current)")
    ratios = [row for row in found.values() if "native: bf16's time over it" in row.what]
    assert (len(ratios), {row.status for row in ratios}) == (len(setting.native_recipes()), {"ok"})


def test_emulation_prices_every_recipe_and_two_training_steps(hopper_on_cpu, call, monkeypatch):
    monkeypatch.setattr(emulation, "FIRST", ("mxfp8",))
    monkeypatch.setattr(emulation, "TRAINED", ("mxfp8",))
    items = [item.name for item in emulation.items(call)]
    assert items[:2] == ["layers, mxfp8", "a step, mxfp8"]
    assert len(items) == 1 + len([name for name, recipe in setting.recipes().items() if recipe.quantizes])
    wanted = {"layers, mxfp8", "layers, fp8_current", "a step, mxfp8"}.__contains__
    found = {row.what: row for row in measured("emulation", emulation, call, wanted)}
    step = "llama_1b, a step, mxfp8, emulated: time over bf16's"
    assert found[step].note == "no bf16 baseline: speed measures it"
    assert found["8b-class layers, mxfp8, emulated: time over bf16's"].value == 1
    call.journal.begin("speed", "x")
    call.journal.add("speed", "x", Row(speed.LOOP_RATE, 2 * 128_000))
    (row,) = [row for row in measured("emulation", emulation, call, wanted) if row.what == step]
    assert (row.value, row.status) == (2, "off")


def test_no_recipe_is_measured_against_itself(hopper_on_cpu, call, monkeypatch):
    """Where bf16's own measurement broke there is no ratio, of layers and of steps."""
    eager = speed.recipes()
    for place in (speed, layers):
        monkeypatch.setattr(place, "recipes", lambda: {**eager, "bf16": None})
    monkeypatch.setattr(speed, "lacking", lambda modules: ["hydra"])
    found = measured("speed", speed, call)
    broken = {row.what for row in found if row.status == "error"}
    assert broken == {
        "our model in a loop",
        "our model in a loop, cudnn",
        *(f"layers, {name}" for name in setting.native_recipes()),
    }
    ratios = [row for row in found if " over " in row.what or row.what.startswith(NATIVE_STEP)]
    assert [(row.status, row.value) for row in ratios] == [("not available", None)] * (1 + len(speed.ORDER))


@pytest.mark.parametrize("tied", [True, False])
def test_the_hand_written_model_is_the_same_llama(tied):
    """Same parameters, same logits: by weights copied from one to the other, in fp32."""
    sizes = {**steps.SIZES, "num_kv_heads": 2, "tie_embeddings": tied, "rope_scaling": None}
    config = setting.model_config("llama_tiny", **sizes)
    ours, plain = Decoder(config, torch.float32), PlainLlama(config, 32, "cpu")
    initialise(ours, 0)
    blocks = {
        "attention.q_proj": "q", "attention.k_proj": "k", "attention.v_proj": "v", "attention.o_proj": "o",
        "feed_forward.gate_proj": "gate", "feed_forward.up_proj": "up", "feed_forward.down_proj": "down",
        "attention_norm": "attention_norm", "feed_forward_norm": "ffn_norm",
    }  # fmt: skip
    given, state = ours.state_dict(), plain.state_dict()
    named = {"embedding.weight": given["embedding.weight"], "norm.weight": given["norm.weight"]}
    named["head.weight"] = given["embedding.weight" if tied else "head.weight"]
    for layer in range(config.num_layers):
        for theirs, his in blocks.items():
            named[f"blocks.{layer}.{his}.weight"] = given[f"layers.{layer}.{theirs}.weight"]
    assert named.keys() == state.keys()
    assert len(given) == len(named) - tied
    plain.load_state_dict(named)
    tokens = torch.randint(config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain(tokens), ours(tokens), rtol=1e-4, atol=1e-5)
    step = plain_step(config, 2, 16, "cpu", compiled=False)
    step()
    step()


def test_what_is_timed_is_warm_and_takes_turns(on_cpu, monkeypatch):
    monkeypatch.setattr(setting, "WARMUP_SECONDS", 0.02)
    calls = []

    def work(name, seconds):
        calls.append(name)
        time.sleep(seconds)

    contenders = {"a": lambda: work("a", 0.004), "b": lambda: work("b", 0.001)}
    taken = setting.milliseconds(contenders, repeats=1, rounds=3)
    assert "".join(calls[-6:]) == "abbaab"
    assert calls[:-6].count("b") > calls[:-6].count("a") >= 3
    assert taken["a"] >= 4
    assert 1 <= taken["b"] < taken["a"]
