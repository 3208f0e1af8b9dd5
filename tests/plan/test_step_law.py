"""Step Law: rates and batches against the numbers printed by the authors' tool."""

import csv
import math
from pathlib import Path

import pytest

from benchmarks import step_law as benchmark
from benchmarks.rotation import InputError
from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash
from lightning_llm.config.sweep_space import compose_sweep
from lightning_llm.plan.step_law import (
    batch_tokens_at_steps,
    law_batch_tokens,
    law_learning_rate,
    law_notes,
    law_row,
)

BOTH = ["optim.learning_rate=step_law", "data.global_batch_size=step_law"]
LARGE = ["model=llama_350m", "data.sequence_length=2048", "schedule=cosine", "schedule.final_learning_rate=1e-5"]


@pytest.mark.parametrize(
    ("parameters", "tokens", "rate", "batch"),
    [
        (7e9, 1.4e12, "9.347e-04", 4996961.32433304),
        (1e9, 20e9, "1.013e-03", 441832.5016348999),
        (429260800, 50e9, "2.455e-03", 745519.9425816238),
        (124e6, 2.5e9, "2.368e-03", 134785.60767053821),
    ],
)
def test_rate_and_batch_are_those_of_the_authors_tool(parameters, tokens, rate, batch):
    """`code/fit_tool.py pred-opt-lr-bs N D 2048` of step-law/steplaw at 32a8f4c printed these."""
    assert f"{law_learning_rate(parameters, tokens):.3e}" == rate
    assert law_batch_tokens(tokens) == pytest.approx(batch, rel=1e-13)


@pytest.mark.parametrize("factor", [0.5, 1, 3])
def test_the_batch_at_a_number_of_steps_is_the_laws_for_the_tokens_that_it_makes(factor):
    batch = batch_tokens_at_steps(10_000, factor)
    assert batch == pytest.approx(factor * law_batch_tokens(10_000 * batch), rel=1e-12)


def test_step_law_becomes_numbers_before_hashing():
    config = compose_config([*LARGE, *BOTH, "trainer.max_steps=20e9tokens", "data.micro_batch_size=8"])
    sequences, steps = config.data.global_batch_size, config.trainer.max_steps
    assert sequences == 216 == round(law_batch_tokens(20e9) / 2048 / 8) * 8
    assert steps == round(20e9 / (216 * 2048))
    law = config.step_law
    assert law.parameters == 24 * (4 * 1024**2 + 3 * 1024 * config.model.ffn_hidden_size)
    assert config.optim.learning_rate == float(f"{law_learning_rate(law.parameters, steps * 216 * 2048):.3e}")
    typed = [
        f"optim.learning_rate={config.optim.learning_rate}",
        f"data.global_batch_size={sequences}",
        f"trainer.max_steps={steps}",
        "data.micro_batch_size=8",
    ]
    by_hand = compose_config([*LARGE, *typed])
    assert config_hash(config) == config_hash(by_hand)
    assert config.model_dump() == by_hand.model_dump() | {"run": config.run.model_dump()}
    assert by_hand.step_law is None


def test_the_batch_is_a_multiple_of_ranks_by_micro_batch():
    ranks = ["parallel=ddp", "world=32", "data.micro_batch_size=4", "trainer.max_steps=20e9tokens"]
    config = compose_config([*LARGE, *BOTH, *ranks])
    assert config.data.global_batch_size == 256  # 216 by the law, of 128 a piece
    assert config.step_law.rounded_to == 128
    assert "rounding makes the batch 1.2 x Step Law's" in "\n".join(law_notes(config.step_law))


def test_runs_outside_the_fitted_range_are_noted(capsys):
    assert law_notes(compose_config([*LARGE, *BOTH, "trainer.max_steps=20e9tokens"]).step_law) == []
    assert main(["plan", "recipe=quickstart", *BOTH, "optim=muon"]) == 0
    said = capsys.readouterr().out
    assert "N = 1,769,472 without embeddings, D = 491,520 tokens; learning rate 0.003552; batch 1,042 tokens" in said
    assert (
        "(a multiple of 2); N and D are outside the fitted range, other settings differ from the fit (see notes)"
        in said
    )
    assert "N = 1,769,472 and D = 491,520 are extrapolated" in said
    assert "fitted on sequences of 2,048 tokens (here 256), AdamW (here muon), a rate that decays to 1e-5" in said


def test_the_row_and_the_notes_agree():
    for more, row in (
        ([], "N and D are inside the fitted range"),
        (
            ["schedule.final_learning_rate=2e-5"],
            "N and D are inside the fitted range, other settings differ from the fit",
        ),
        (["schedule=constant"], "N and D are inside the fitted range, other settings differ from the fit"),
    ):
        law = compose_config([*LARGE[:3], *(more or LARGE[3:]), *BOTH, "trainer.max_steps=20e9tokens"]).step_law
        assert row in law_row(law.as_data())[1]
        assert ("differ from the fit" in row) == bool(law_notes(law))


def test_a_grid_is_centred_by_it():
    grid = "optim.learning_rate=step_law*0.5,step_law,step_law*2"
    rates = [config.optim.learning_rate for _, config in compose_sweep(["recipe=quickstart", grid])]
    assert rates[0] == pytest.approx(rates[1] / 2, rel=1e-3)
    assert rates[2] == pytest.approx(rates[1] * 2, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["optim.learning_rate=step_law*0"], "=step_law*0: must be a number from"),
        (["optim.learning_rate=step_law*1e7"], "=step_law*1e7: must be a number from 1e-06 to 1e+06 of step_law"),
        (["data.global_batch_size=step_law*x"], "=step_law*x: must be a number from"),
        (["trainer.max_steps=0tokens"], "=0tokens: must be a number above 0 of tokens"),
        (["optim.learning_rate=steplaw"], "='steplaw': must be a valid number"),
        (["optim=muon", "optim.adjust_learning_rate=original", *BOTH], "or optim.adjust_learning_rate=match_rms_adamw"),
        ([*BOTH, "trainer.max_steps=no", "seed=-1"], "seed=-1"),
    ],
)
def test_malformed_step_laws_are_refused(words, text):
    with pytest.raises(ConfigError) as refused:
        compose_config(words)
    assert text in "\n".join(map(str, refused.value.problems))


def test_the_benchmark_finds_the_run_nearest_the_law(tmp_path):
    rate, batch = law_learning_rate(3e8, 1e10), law_batch_tokens(1e10) / 2048
    file = tmp_path / "dense.csv"
    rows = [
        {"lr": rate * 2.0**i, "bs": batch * 2.0**j, "smooth loss": 2.5 * (1 + 0.01 * (i - 1) ** 2 + 0.02 * j**2)}
        for i in range(-4, 5) for j in range(-4, 4)
    ]  # fmt: skip
    for row in rows:
        row |= {"N": 3e8, "D": 1e10, "h": 1024, "ffnh": 4096, "numl": 8}
    rows.append(rows[0] | {"N": 4e8})  # alone, and no grid
    rows.append(rows[0] | {"smooth loss": math.nan})
    write(file, rows)
    assert benchmark.group_gaps(file, 60) == [pytest.approx(0.01)]  # the law's place is one step from the best
    assert [value for _, value, _ in benchmark.measure(file)] == [1.0, pytest.approx(1.0), pytest.approx(1.0)]
    write(file, [{"N": 1}])
    with pytest.raises(InputError, match="no column D, bs, ffnh"):
        benchmark.group_gaps(file, 60)


def write(file: Path, rows: list[dict]) -> None:
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, rows[0])
        writer.writeheader()
        writer.writerows(rows)
