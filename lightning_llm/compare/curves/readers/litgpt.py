"""Reader of the output of litgpt (Lightning-AI/litgpt, `pretrain.py` and `finetune/` of 2024 to June 2026)."""

import re

from lightning_llm.compare.curves.readers.cells import NUMBER, Line, number
from lightning_llm.compare.curves.readers.program_log import Found, read_program_log
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader

ITERATION = re.compile(
    rf"^Epoch \d+ \| iter (?P<iter>\d+) step (?P<step>\d+) \| loss train: (?P<loss>{NUMBER}), val: [^|]*\| "
    r"iter time: [\d.]+ ms(?P<complete> \(step\))?",
    re.IGNORECASE,
)
VALIDATION = re.compile(rf"^iter (?P<iter>\d+): val loss (?P<loss>{NUMBER}), val time", re.IGNORECASE)
RESUMES = re.compile(r"^Resuming training from ")
SEED = re.compile(r"^\s*\{?'?seed'?[:=] (\d+),?\s*\}?$")
SHOWN = "Epoch 1 | iter 16 step 1 | loss train: 10.912, val: n/a | iter time: 390.20 ms (step)"
NOTE = "litgpt prints training losses with 3 decimals; its logger (CSV, TensorBoard, W&B) has all digits."


def recognizes(source: LogSource) -> bool:
    """Return whether it has an iteration of litgpt."""
    return any(ITERATION.match(line) for line in source.head.splitlines())


class _Parser:
    """Contents of lines, by optimizer step. A validation names only its iteration, which follows that step's line."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, line: Line) -> Found | None:
        text = line.text.strip()
        if found := ITERATION.match(text):
            self.step, loss = int(found["step"]), number(found["loss"].replace(",", ""))
            return Found(self.step, {"loss": loss}) if found["complete"] and loss is not None else None
        if found := VALIDATION.match(text):
            loss = number(found["loss"].replace(",", ""))
            return Found(self.step, {"val_loss": loss}) if loss is not None else None
        if RESUMES.match(text):
            return Found(starts=True)
        if found := SEED.match(text):
            return Found(settings={"seed": int(found[1])})
        return None


def read(source: LogSource) -> LoggedTable:
    """Return the training loss (`loss`) and the validation loss (`val_loss`) of each optimizer step.

    Lines within a step, after some of its micro-batches, are left out.

    Raises:
        ValueError: it has no losses, or lines of several runs.
    """
    return read_program_log(source, _Parser(), SHOWN).table("litgpt", (NOTE,))


READER = Reader("litgpt", recognizes, read)
