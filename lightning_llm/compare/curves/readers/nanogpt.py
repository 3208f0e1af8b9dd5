"""Reader of the output of nanoGPT (karpathy/nanoGPT, `train.py` and `configurator.py` of December 2022 to 2025)."""

import re
from ast import literal_eval
from typing import Any

from lightning_llm.compare.curves.readers.cells import NUMBER, Line, number
from lightning_llm.compare.curves.readers.program_log import Found, read_program_log
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader

ITERATION = re.compile(rf"^iter (\d+): loss ({NUMBER}), time", re.IGNORECASE)
EVALUATION = re.compile(rf"^step (\d+): train loss ({NUMBER}), val loss ({NUMBER})", re.IGNORECASE)
STARTS = re.compile(r"^(Initializing a new model from scratch|Resuming training from |Initializing from OpenAI GPT-2)")
TOKENS = re.compile(r"^tokens per iteration will be: ([\d,]+)")
VOCABULARY = re.compile(r"^found vocab_size = (\d+) ")
OVERRIDE = re.compile(r"^(?:Overriding: )?([a-z]\w*) = ([^#]+?)\s*(?:#.*)?$")
STANDARD = {"block_size": "sequence_length", "max_iters": "total_steps", "seed": "seed", "dataset": "tokenizer"}
"""nanoGPT's keys with a standard name here. It has one tokenizer per data set."""
SHOWN = "iter 0: loss 10.9892, time 66.90ms, mfu -100.00%"
NOTE = (
    "The loss of an iteration is that of its last micro-batch on rank 0; val/loss is the mean over eval_iters batches."
)


def recognizes(source: LogSource) -> bool:
    """Return whether it has an iteration or an evaluation of nanoGPT."""
    return any(ITERATION.match(line) or EVALUATION.match(line) for line in source.head.splitlines())


def parse(line: Line) -> Found | None:
    """Return the contents of a line."""
    text = line.text.strip()
    if found := ITERATION.match(text):
        return Found(int(found[1]), _numbers(loss=found[2]))
    if found := EVALUATION.match(text):
        return Found(int(found[1]), _numbers(**{"train/loss": found[2], "val/loss": found[3]}))
    if STARTS.match(text):
        return Found(starts=True)
    if found := TOKENS.match(text):
        return Found(settings={"tokens_per_step": int(found[1].replace(",", ""))})
    if found := VOCABULARY.match(text):
        return Found(settings={"vocab_size": int(found[1])})
    if found := OVERRIDE.match(text):
        return Found(settings={STANDARD.get(found[1], found[1]): _value(found[2])})
    return None


def _numbers(**texts: str) -> dict[str, float]:
    found = {name: number(text.replace(",", "")) for name, text in texts.items()}
    return {name: value for name, value in found.items() if value is not None}


def _value(text: str) -> Any:
    try:
        value = literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float | str) else text


def read(source: LogSource) -> LoggedTable:
    """Return the loss of each iteration (`loss`), and the evaluated losses under their W&B names.

    Raises:
        ValueError: it has no losses, or lines of several runs.
    """
    return read_program_log(source, parse, SHOWN).table("nanogpt", (NOTE,))


READER = Reader("nanogpt", recognizes, read)
