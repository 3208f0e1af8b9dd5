"""Reader of the log of MaxText (AI-Hypercomputer/maxtext, `metric_logger.py` of 2024 to August 2026)."""

import re

from lightning_llm.compare.curves.readers.cells import NUMBER, Line, number
from lightning_llm.compare.curves.readers.program_log import Found, read_program_log
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader

STEP = re.compile(r"completed (?:profiler activation/deactivation )?step: (?P<step>\d+), (?P<rest>.*)$")
EVALUATION = re.compile(r"(?:eval metrics after step: |Completed eval after train step )(?P<step>\d+), (?P<rest>.*)$")
PAIR = re.compile(rf"(?P<name>[a-z_]*loss)[:=] ?(?P<value>{NUMBER})(?=,|$)", re.IGNORECASE)
PARAMETER = re.compile(r"Config param (\w+): (.*)$")
STANDARD = {
    "init_weights_seed": "seed", "steps": "total_steps", "global_batch_size_to_train_on": "global_batch_size",
    "max_target_length": "sequence_length", "tokenizer_path": "tokenizer", "vocab_size": "vocab_size",
    "data_shuffle_seed": "data_shuffle_seed", "dataset_path": "dataset_path", "quantization": "quantization",
}  # fmt: skip
"""Parameters of MaxText that are kept, and their names here."""
SHOWN = "completed step: 0, seconds: 1.353, ..., total_weights: 1572864, loss: 10.874"
NOTE = "MaxText prints losses with 3 decimals; its metrics_file (JSON Lines) has all digits."


def recognizes(source: LogSource) -> bool:
    """Return whether it has a step of MaxText with a loss, or its parameters."""
    lines = source.head.splitlines()
    is_step = any((found := STEP.search(line)) and "loss:" in found["rest"] for line in lines)
    return is_step or sum(PARAMETER.search(line) is not None for line in lines) > 5


def parse(line: Line) -> Found | None:
    """Return the contents of a line."""
    text = line.text.rstrip()
    if found := STEP.search(text):
        return Found(int(found["step"]), _losses(found["rest"]))
    if found := EVALUATION.search(text):
        return Found(int(found["step"]), {f"eval_{name}": value for name, value in _losses(found["rest"]).items()})
    if found := PARAMETER.search(text):
        name, value = STANDARD.get(found[1]), found[2].strip()
        starts = found[1] == "run_name"
        settings = {name: int(value) if value.isdigit() else value} if name and value not in ("", "None") else {}
        return Found(starts=starts, settings=settings) if starts or settings else None
    return None


def _losses(text: str) -> dict[str, float]:
    found = {pair["name"]: number(pair["value"].replace(",", "")) for pair in PAIR.finditer(text)}
    return {name: value for name, value in found.items() if value is not None}


def read(source: LogSource) -> LoggedTable:
    """Return the losses of each step, and those of evaluations with the prefix "eval_".

    Raises:
        ValueError: it has no losses, or lines of several runs.
    """
    log = read_program_log(source, parse, SHOWN)
    batch, length = log.settings.get("global_batch_size"), log.settings.get("sequence_length")
    if isinstance(batch, int) and isinstance(length, int):
        log.settings["tokens_per_step"] = batch * length
    return log.table("maxtext", (NOTE,))


READER = Reader("maxtext", recognizes, read)
