"""Reader of the output of nanochat (karpathy/nanochat, `scripts/base_train.py` of October 2025 to July 2026)."""

import re

from lightning_llm.compare.curves.readers.cells import NUMBER, Line, number
from lightning_llm.compare.curves.readers.program_log import Found, read_program_log
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader

STEP = re.compile(rf"^step (\d+)(?:/\d+)? \([\d.]+%\) \| loss: ({NUMBER}) \|", re.IGNORECASE)
VALIDATION = re.compile(rf"^Step (\d+) \| (Validation bpb|CORE metric): ({NUMBER})$", re.IGNORECASE)
COLUMNS = {"Validation bpb": "val/bpb", "CORE metric": "core_metric"}
RESUMES = re.compile(r"^Resuming optimization from step \d+")
BATCH = re.compile(r"^Total batch size ([\d,]+) =>")
MICRO_BATCH = re.compile(r"^Tokens / micro-batch / rank: \d+ x (\d+) =")
VOCABULARY = re.compile(r"^Vocab size: ([\d,]+)")
STEPS = re.compile(r"^(?:Using user-provided|Calculated) number of iterations.*: ([\d,]+)$")
DECAY = 0.9
"""Decay of the moving average that nanochat prints as the training loss (`ema_beta`)."""
SMOOTHED = f"moving average with decay {DECAY}"
RAW = "train/raw_loss"
SHOWN = "step 00000/21400 (0.00%) | loss: 11.090355 | lrm: 1.00 | ..."


def recognizes(source: LogSource) -> bool:
    """Return whether it has a step or an evaluation of nanochat."""
    return any(STEP.match(line) or VALIDATION.match(line) for line in source.head.splitlines())


def parse(line: Line) -> Found | None:
    """Return the contents of a line."""
    text = line.text.strip()
    name, logged, at = "", None, 0
    if found := STEP.match(text):
        at, name, logged = int(found[1]), "loss", number(found[2].replace(",", ""))
    elif found := VALIDATION.match(text):
        at, name, logged = int(found[1]), COLUMNS[found[2]], number(found[3].replace(",", ""))
    if logged is not None:
        return Found(at, {name: logged})
    if BATCH.match(text) or RESUMES.match(text):
        found = BATCH.match(text)
        return Found(starts=True, settings={"tokens_per_step": _whole(found[1])} if found else {})
    for key, pattern in (("sequence_length", MICRO_BATCH), ("vocab_size", VOCABULARY), ("total_steps", STEPS)):
        if found := pattern.match(text):
            return Found(settings={key: _whole(found[1])})
    return None


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def read(source: LogSource) -> LoggedTable:
    """Return the smoothed training loss (`loss`), the loss without smoothing (`train/raw_loss`) and `val/bpb`.

    Raises:
        ValueError: it has no losses, or lines of several runs.
    """
    log = read_program_log(source, parse, SHOWN)
    for writer in log.writers.values():
        for step, value in without_average(
            {at: row["loss"] for at, row in writer.rows.items() if "loss" in row}
        ).items():
            writer.rows[step][RAW] = value
    notes = (f"The printed loss is a {SMOOTHED}; {RAW} is computed from it, exact to about 1e-5.",)
    return log.table("nanochat", notes, {"loss": SMOOTHED})


def without_average(printed: dict[int, float]) -> dict[int, float]:
    """Return the losses of the last micro-batch of each step, from the printed averages by step.

    nanochat prints m[t] / (1 - DECAY**(t+1)) with m[t] = DECAY m[t-1] + (1 - DECAY) loss[t], which is solved for
    loss[t] where the step before is printed, too.
    """
    average = {step: value * (1 - DECAY ** (step + 1)) for step, value in printed.items()}
    average[-1] = 0.0
    return {step: (average[step] - DECAY * average[step - 1]) / (1 - DECAY) for step in printed if step - 1 in average}


READER = Reader("nanochat", recognizes, read)
