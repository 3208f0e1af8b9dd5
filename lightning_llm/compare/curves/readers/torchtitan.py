"""Reader of the log of torchtitan (pytorch/torchtitan, `components/metrics.py` of v0.1.0 to main of August 2026)."""

import re
from typing import Any

from lightning_llm.compare.curves.readers.cells import ESCAPES, NUMBER, Line, number
from lightning_llm.compare.curves.readers.program_log import Found, read_program_log
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader

STEP = re.compile(r"(?P<validate>validate )?step:\s*(?P<step>\d+)\s+loss:\s*(?P<rest>\S+\s+(?:grad_norm|memory):.*)$")
LOSS = re.compile(rf"(?P<loss>{NUMBER})\s+(?:grad_norm:\s*(?P<norm>{NUMBER})\s)?", re.IGNORECASE)
STARTS = re.compile(r"Training starts at step \d+")
BATCH = re.compile(
    r"global batch size (\d+), gradient accumulation steps \d+, sequence length (\d+), total steps (\d+)"
)
BATCH_IN_TOKENS = re.compile(r"(\d+) tokens per train step, .*maximum context length (\d+), total steps (\d+)")
SEED = re.compile(r"[\"']seed[\"']: (\d+)")
TOKENIZER = re.compile(r"[\"'](?:hf_assets_path|tokenizer_path)[\"']: [\"']([^\"']+)[\"']")
SHOWN = "step:  1  loss:  8.13760  grad_norm:  0.7000  memory:  1.00GiB(1.00%)  tps: 1,000"


def recognizes(source: LogSource) -> bool:
    """Return whether a line has torchtitan's step and loss, or its line before the first step."""
    text = ESCAPES.sub("", source.head)
    return any(STEP.search(line) or "[titan]" in line for line in text.splitlines())


def parse(line: Line) -> Found | None:
    """Return the contents of a line.

    Ranks of a pipeline that do not have its last stage log a negative loss, which is left out.
    """
    text = line.text
    if step := STEP.search(text):
        if not (logged := LOSS.match(step["rest"])):
            return None
        loss, norm = number(logged["loss"].replace(",", "")), number((logged["norm"] or "").replace(",", ""))
        values = {"val_loss": loss} if step["validate"] else {"loss": loss, "grad_norm": norm}
        if loss is None or loss < 0:
            return None
        return Found(int(step["step"]), {name: value for name, value in values.items() if value is not None})
    settings: dict[str, Any] = {}
    if batch := BATCH.search(text):
        size, length, steps = map(int, batch.groups())
        settings |= {"global_batch_size": size, "sequence_length": length, "tokens_per_step": size * length}
        settings |= {"total_steps": steps}
    elif tokens := BATCH_IN_TOKENS.search(text):
        settings |= dict(
            zip(("tokens_per_step", "sequence_length", "total_steps"), map(int, tokens.groups()), strict=True)
        )
    if seed := SEED.search(text):
        settings["seed"] = int(seed[1])
    if tokenizer := TOKENIZER.search(text):
        settings["tokenizer"] = tokenizer[1]
    starts = STARTS.search(text) is not None
    return Found(starts=starts, settings=settings) if starts or settings else None


def read(source: LogSource) -> LoggedTable:
    """Return the training loss (`loss`), the validation loss (`val_loss`) and the gradient norm of each step.

    Raises:
        ValueError: it has no losses, or several ranks that contradict each other.
    """
    return read_program_log(source, parse, SHOWN).table("torchtitan")


READER = Reader("torchtitan", recognizes, read)
