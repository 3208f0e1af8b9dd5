"""Logs that training programs print, read back. The lines follow the programs' sources, which the readers name."""

import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.compare.curves.readers import read_table
from lightning_llm.compare.curves.readers.attempts import Attempts
from lightning_llm.compare.curves.table import LoggedTable

LOGS = Path(__file__).parent / "logs"
RED, GREEN, ORANGE, CYAN, RESET = "\033[31m", "\033[32m", "\033[38;2;180;60;0m", "\033[36m", "\033[39m"


def read(folder: Path, text: str, name: str = "run.log") -> LoggedTable:
    """Return the table of a log with `text`."""
    (folder / name).write_text(text)
    return read_table(str(folder / name))


def problem(folder: Path, text: str) -> str:
    """Return the problem that reading a log with `text` reports."""
    with pytest.raises(ConfigError) as raised:
        read(folder, text)
    assert len(raised.value.problems) == 1
    return str(raised.value)


def titan(step: int, loss: float | str, rank: str = "", color: bool = True, norm: str = "1.2345") -> str:
    """Return a line of torchtitan's `MetricsProcessor.log`."""
    loss = loss if isinstance(loss, str) else f"{loss:8.5f}"
    line = (
        f"{RED}step: {step:2}  {GREEN}loss: {loss}  {ORANGE}grad_norm: {norm:>7}  {GREEN}memory:  1.26GiB(1.58%)  "
        f"{GREEN}tps: 12,345  {CYAN}tflops: 1.06  {RED}mfu: 0.34%{RESET}"
    )
    line = line if color else "".join(part.partition("m")[2] for part in ("m" + line).split("\033"))
    return f"{rank}[titan] 2026-08-21 10:00:00,123 - root - INFO - {line}\n"


TITAN_START = (
    "[titan] 2026-08-21 10:00:00,123 - root - INFO - Trainer is initialized with local batch size 8, global batch size "
    "64, gradient accumulation steps 1, sequence length 2048, total steps 10 (warmup 2)\n"
    "[titan] 2026-08-21 10:00:00,123 - root - INFO - Training starts at step 1\n"
)


def test_torchtitan_steps_validations_and_settings_are_read(tmp_path: Path):
    validation = f"[titan] x - root - INFO - \033[33mvalidate step:  2  {GREEN}loss:  7.6543  {CYAN}memory:  1.0GiB\n"
    table = read(tmp_path, TITAN_START + titan(1, 8.1376) + titan(2, 7.70001) + validation + titan(3, "     nan"))
    assert table.format == "torchtitan"
    assert table.columns["step"].tolist() == [1, 2, 3]
    assert table.columns["loss"].tolist() == [8.1376, 7.70001, math.inf]  # a NaN that was logged is a divergence
    assert table.columns["grad_norm"].tolist() == [1.2345] * 3
    np.testing.assert_array_equal(table.columns["val_loss"], [math.nan, 7.6543, math.nan])
    assert table.settings == {
        "global_batch_size": 64, "sequence_length": 2048, "tokens_per_step": 64 * 2048, "total_steps": 10,
    }  # fmt: skip


def test_earlier_and_later_versions_of_torchtitan_are_read(tmp_path: Path):
    old = "[rank0]:2024-08-01 10:00:00,1 - root - INFO - step:  1  loss: 10.9423  memory: 1.00GiB(1.2%)  wps: 1,234\n"
    assert read(tmp_path, old).columns["loss"].tolist() == [10.9423]
    new = (
        "[titan] x - root - INFO - Trainer is initialized with 16384 tokens per DP rank, 131072 tokens per train step, "
        "gradient accumulation steps 1, maximum context length 2048, total steps 10 (warmup 2)\n"
        '[titan] x - root - INFO - Running with configs: {\n  "debug": {\n    "seed": 42,\n'
        '    "hf_assets_path": "./assets/hf/Llama-3.1-8B"\n'
    )
    table = read(tmp_path, new + titan(1, 8.0, color=False))
    assert table.settings == {
        "tokens_per_step": 131072, "sequence_length": 2048, "total_steps": 10, "seed": 42,
        "tokenizer": "./assets/hf/Llama-3.1-8B",
    }  # fmt: skip


def test_negative_losses_of_pipeline_ranks_without_the_loss_are_left_out(tmp_path: Path):
    lines = [titan(step, loss, f"[rank{rank}]:") for step in (1, 2) for rank, loss in enumerate((-1.0, 8.0 - step))]
    assert read(tmp_path, "".join(lines)).columns["loss"].tolist() == [7.0, 6.0]
    assert "rank that prints the loss" in problem(tmp_path, "".join(lines[::2]))


def test_equal_losses_of_several_ranks_are_one_and_unequal_ones_are_refused(tmp_path: Path):
    equal = [titan(step, 8.0 - step, f"[rank{rank}]:") for step in (1, 2, 3) for rank in (0, 1)]
    table = read(tmp_path, "".join(equal))
    assert table.columns["loss"].tolist() == [7.0, 6.0, 5.0]
    assert not table.notes
    other = [titan(step, 8.0 - step + rank / 10, f"[rank{rank}]:") for step in (1, 2, 3) for rank in (0, 1)]
    assert "ranks 0 and 1 have different values of 'loss' at step 1: 7 and 7.1" in problem(tmp_path, "".join(other))


@pytest.mark.parametrize("order", [(1, 1, 2, 2, 3, 3), (1, 2, 1, 3, 2, 4, 3)], ids=["in turn", "one behind"])
def test_unequal_losses_of_ranks_without_prefix_are_refused(tmp_path: Path, order: Sequence[int]):
    text = "".join(titan(step, 8.0 + at / 10) for at, step in enumerate(order))
    assert "several ranks or runs are mixed" in problem(tmp_path, text)


def test_after_a_resume_the_last_attempt_counts(tmp_path: Path):
    first = [titan(step, 8.0 - step / 10) for step in range(1, 8)]
    second = [titan(step, 9.0 - step / 10) for step in range(5, 10)]
    for announced in ("", "[titan] x - root - INFO - Training starts at step 5\n"):
        table = read(tmp_path, TITAN_START + "".join(first) + announced + "".join(second))
        assert table.columns["step"].tolist() == list(range(1, 10))
        expected = [8 - step / 10 for step in range(1, 5)] + [9 - step / 10 for step in range(5, 10)]
        np.testing.assert_allclose(table.columns["loss"], expected, atol=1e-9)
        assert table.notes == ("It resumed once, at step 5: 3 points of abandoned attempts are left out.",)


@pytest.mark.parametrize("announced", [False, True])
def test_random_crashes_leave_the_values_of_the_last_attempts(announced: bool):
    """Simulated: 60 steps, a checkpoint every 7, a crash with probability 0.05 per step, a validation every 5."""
    random = np.random.default_rng(0)
    for _ in range(50):
        log, step, losses, validations = Attempts(), 1, {}, {}
        while step <= 60:
            losses[step] = random.normal()
            log.add("line", step, {"loss": losses[step], "rate": 1.0})
            if step % 5 == 0:
                validations[step] = random.normal()
                log.add("line", step, {"val_loss": validations[step]})
            step += 1
            if random.random() < 0.05:
                back = (step - 1) // 7 * 7 + 1
                if not announced and back == step - 1:
                    continue  # a step that repeats again and again may also be one of several ranks, which is refused
                step = back
                losses = {each: value for each, value in losses.items() if each < step}
                validations = {each: value for each, value in validations.items() if each < step}
                if announced:
                    log.starts()
        assert {each: row["loss"] for each, row in log.rows.items()} == losses
        assert {each: row["val_loss"] for each, row in log.rows.items() if "val_loss" in row} == validations
        assert all(row["rate"] == 1.0 for row in log.rows.values())


def test_an_attempt_that_ends_before_the_abandoned_one_ends_the_curve(tmp_path: Path):
    lines = [titan(step, 8.0) for step in (10, 20, 30, 40)] + [titan(step, 7.5) for step in (20, 30)]
    table = read(tmp_path, "".join(lines))
    assert table.columns["step"].tolist() == [10, 20, 30]
    assert table.columns["loss"].tolist() == [8.0, 7.5, 7.5]


ARGUMENTS = """using world size: 8, data-parallel size: 8
------------------------ arguments ------------------------
  global_batch_size ............................... 256
  log_interval .................................... 10
  padded_vocab_size ............................... 50304
  rampup_batch_size ............................... None
  seed ............................................ 1234
  seq_length ...................................... 1024
  tokenizer_model ................................. None
  tokenizer_type .................................. GPT2BPETokenizer
  train_iters ..................................... 100
  vocab_file ...................................... gpt2-vocab.json
-------------------- end of arguments ---------------------
"""


def megatron(step: int, loss: float | None, skipped: int = 0) -> str:
    """Return a line of Megatron-LM's `training_log`."""
    mean = "" if loss is None else f" lm loss: {loss:.6E} |"
    return (
        f" [2026-08-22 10:00:00.123] iteration {step:8d}/     100 | consumed samples: {256 * step:12d} | elapsed time "
        "per iteration (ms): 2345.6 | throughput per GPU (TFLOP/s/GPU): 123.4 | learning rate: 3.000000E-04 | "
        f"global batch size:   256 |{mean} loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations: "
        f"{skipped:3d} | number of nan iterations:   0 |\n"
    )


def test_megatron_iterations_validations_and_arguments_are_read(tmp_path: Path):
    validation = (
        "-" * 70 + "\n validation loss at iteration 20 | lm loss value: 9.500000E+00 | lm loss PPL: 1.335973E+04 | \n"
        " validation-wiki loss at iteration 20 | lm loss value: 9.250000E+00 | lm loss PPL: 1.04E+04 | \n"
        " validation loss at iteration 20 on test set | lm loss value: 9.750000E+00 | lm loss PPL: 1.7E+04 | \n"
    )
    text = ARGUMENTS + megatron(10, 10.39) + megatron(20, 9.875) + validation
    table = read(tmp_path, text)
    assert table.format == "megatron"
    assert table.columns["step"].tolist() == [10, 20]
    assert table.columns["lm loss"].tolist() == [10.39, 9.875]
    assert table.columns["tokens"].tolist() == [10 * 256 * 1024, 20 * 256 * 1024]
    for column, value in (("validation", 9.5), ("validation-wiki", 9.25), ("on test set", 9.75)):
        np.testing.assert_array_equal(table.columns[f"lm loss {column}"], [math.nan, value])
    expected = {
        "seed": 1234, "global_batch_size": 256, "sequence_length": 1024, "total_steps": 100, "vocab_size": 50304,
        "tokens_per_step": 256 * 1024, "tokenizer": "GPT2BPETokenizer, gpt2-vocab.json",
    }  # fmt: skip
    assert {key: table.settings[key] for key in expected} == expected
    assert any("mean over the last 10 iterations" in note for note in table.notes)
    assert not any("elapsed" in name or "throughput" in name for name in table.columns)


def test_megatron_prints_no_nan_losses_and_zeros_for_skipped_iterations(tmp_path: Path):
    text = ARGUMENTS + megatron(10, 10.0) + megatron(20, 0.0, skipped=10) + megatron(30, None) + megatron(40, 9.0)
    table = read(tmp_path, text)
    np.testing.assert_array_equal(table.columns["lm loss"], [10.0, math.nan, math.inf, 9.0])
    assert any("diverged" in note for note in table.notes)


def test_settings_that_change_when_megatron_resumes_are_noted(tmp_path: Path):
    again = ARGUMENTS.replace("global_batch_size ............................... 256", "global_batch_size ..... 512")
    table = read(tmp_path, ARGUMENTS + megatron(10, 10.0) + megatron(20, 9.5) + again + megatron(20, 9.4))
    assert table.columns["lm loss"].tolist() == [10.0, 9.4]
    assert any("global_batch_size" in note for note in table.notes)


def test_nanogpt_output_of_a_resumed_run_is_read():
    """nanoGPT's train.py printed `logs/nanogpt.txt` on a CPU: stopped after iteration 24, resumed from 20."""
    table = read_table(str(LOGS / "nanogpt.txt"))
    assert table.format == "nanogpt"
    assert table.columns["step"].tolist() == list(range(31))
    assert table.columns["loss"][[0, 19, 20, 24]].tolist() == [2.8228, 2.7536, 2.7347, 2.7255]
    assert table.columns["val/loss"][[0, 10, 20, 30]].tolist() == [2.8084, 2.7854, 2.7341, 2.7259]
    assert int((~np.isnan(table.columns["val/loss"])).sum()) == 4
    assert table.settings["tokens_per_step"] == 512
    assert [table.settings[key] for key in ("tokenizer", "vocab_size", "total_steps")] == ["tiny", 17, 30]
    assert "It resumed once, at step 20: 5 points of abandoned attempts are left out." in table.notes


def nanochat(losses: Sequence[float]) -> str:
    """Return the lines of nanochat's base_train.py for the losses of micro-batches, which it averages."""
    average, lines = 0.0, ["Total batch size 524,288 => gradient accumulation steps: 1", "Vocab size: 65,536"]
    lines.append("Tokens / micro-batch / rank: 32 x 2048 = 65,536")
    for step, loss in enumerate(losses):
        if step % 2 == 0:
            lines.append(f"Step {step:05d} | Validation bpb: {loss / 3:.6f}")
        average = 0.9 * average + 0.1 * loss
        shown = average / (1 - 0.9 ** (step + 1))
        lines.append(f"step {step:05d}/00100 ({step:.2f}%) | loss: {shown:.6f} | lrm: 1.00 | dt: 1.0ms | tok/sec: 1 |")
    return "\n".join(lines) + "\n"


def test_the_moving_average_of_nanochat_is_reported_and_undone(tmp_path: Path):
    losses = np.random.default_rng(0).normal(3, 0.3, 40)
    table = read(tmp_path, nanochat(losses))
    assert table.format == "nanochat"
    assert table.smoothed == {"loss": "moving average with decay 0.9"}
    np.testing.assert_allclose(table.columns["train/raw_loss"], losses, atol=2e-5)
    np.testing.assert_allclose(table.columns["val/bpb"][::2], losses[::2] / 3, atol=1e-6)
    assert table.settings == {"tokens_per_step": 524288, "vocab_size": 65536, "sequence_length": 2048}


def test_litgpt_lines_of_complete_steps_are_read(tmp_path: Path):
    text = (
        " 'seed': 42,\n"
        "Epoch 1 | iter 1 step 0 | loss train: 10.912, val: n/a | iter time: 390.20 ms remaining time: 0:01\n"
        "Epoch 1 | iter 2 step 1 | loss train: 10.812, val: n/a | iter time: 390.20 ms (step) remaining time: 0:01\n"
        "iter 2: val loss 10.7123, val time: 12.34 ms\n"
        "Epoch 1 | iter 4 step 2 | loss train: 10.612, val: 10.712 | iter time: 390.20 ms (step) remaining time: 0:01\n"
    )
    table = read(tmp_path, text)
    assert (table.format, table.settings) == ("litgpt", {"seed": 42})
    assert table.columns["step"].tolist() == [1, 2]
    assert table.columns["loss"].tolist() == [10.812, 10.612]
    assert table.columns["val_loss"][0] == 10.7123


def test_maxtext_steps_and_parameters_are_read(tmp_path: Path):
    text = (
        "Config param global_batch_size_to_train_on: 16\nConfig param init_weights_seed: 7\n"
        "Config param max_target_length: 2048\nConfig param quantization: fp8\n"
        "completed step: 0, seconds: 1.353, TFLOP/s/device: 1.0, total_weights: 32768, loss: 10.874\n"
        "completed step: 1, seconds: 1.353, TFLOP/s/device: 1.0, total_weights: 32768, loss: 10.410, "
        "lm_loss: 10.409, perplexity: 33000.000\n"
        "Completed eval after train step 1, loss=10.500, perplexity=36315.503, total_weights=65536\n"
    )
    table = read(tmp_path, text)
    assert table.format == "maxtext"
    assert table.columns["loss"].tolist() == [10.874, 10.41]
    assert table.columns["eval_loss"][1] == 10.5
    assert table.settings["tokens_per_step"] == 16 * 2048
    assert (table.settings["seed"], table.settings["quantization"]) == (7, "fp8")


@pytest.mark.parametrize("form", ["gzip", "utf-16", "windows", "latin-1", "carriage returns"])
def test_a_log_is_the_same_in_every_encoding(tmp_path: Path, form: str):
    text = "Läuft auf Maschine é\n" + TITAN_START + titan(1, 8.5) + titan(2, 8.25)
    data = {
        "gzip": gzip.compress(text.encode()),
        "utf-16": text.encode("utf-16"),
        "windows": text.replace("\n", "\r\n").encode(),
        "latin-1": text.encode("latin-1"),
        "carriage returns": text.replace("[titan]", "50%|###   |\r[titan]").encode(),
    }[form]
    (tmp_path / "out").write_bytes(data)
    table = read_table(str(tmp_path / "out"))
    assert table.columns["loss"].tolist() == [8.5, 8.25]
    assert table.settings["tokens_per_step"] == 64 * 2048


def test_numbers_at_the_end_of_a_cut_off_log_are_left_out(tmp_path: Path):
    text = TITAN_START + titan(1, 8.5, color=False) + titan(2, 8.25, color=False)
    cut = text[: text.rindex("8.25") + 3]
    assert read(tmp_path, cut).columns["loss"].tolist() == [8.5]
    half = megatron(10, 10.0) + megatron(20, 9.875)
    table = read(tmp_path, half[: half.rindex("9.875") + 4])
    np.testing.assert_array_equal(table.columns["lm loss"], [10.0, math.nan])
    whole = gzip.compress(text.encode())
    (tmp_path / "cut.gz").write_bytes(whole[:-12])
    with pytest.raises(ConfigError, match="gzip stream is damaged"):
        read_table(str(tmp_path / "cut.gz"))


def test_a_file_of_no_known_format_is_refused_in_one_line_with_the_formats(tmp_path: Path):
    message = problem(tmp_path, "hello\nloss went down\n")
    assert "\n" not in message
    for name in ("csv", "jsonl", "tensorboard", "wandb-csv", "mlflow", "torchtitan", "megatron", "trainer_state"):
        assert name in message
