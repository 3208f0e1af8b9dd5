"""Reader of the log of Megatron-LM and of programs derived from it."""

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_llm.compare.curves.readers.programs import LineContent, Program, ProgramLog
from lightning_llm.compare.curves.table import Line, LogSource, integer_or_text, number

SPEEDS = re.compile(r"elapsed|throughput|energy|power|memory", re.IGNORECASE)
SKIPPED = "number of skipped iterations"
TOKENIZERS = ("tokenizer_type", "tokenizer_model", "vocab_file")


class Megatron(Program):
    """Megatron-LM (NVIDIA/Megatron-LM, `training_log` and `evaluate_and_print_results` of v2.0 to main of August 2026).

    Columns: all numbers of an iteration under Megatron's names, and `tokens` where the arguments have the sequence
    length. A validation has the name of its TensorBoard tag: "lm loss validation".
    """

    format = "megatron"
    shown = "iteration        1/      10 | consumed samples:            8 | ... | lm loss: 1.039000E+01 | ..."
    step = re.compile(r"\biteration\s+(?P<step>\d+)/\s*(?P<last>\d+) \|(?P<pairs>.*)$")
    validation = re.compile(
        r"\bvalidation(?P<set>-\S+)? loss at iteration (?P<step>\d+)(?P<where> on \w+ set)? \| (?P<pairs>.*)$"
    )
    arguments = re.compile(r"-{10,} (?:\w+ )?arguments -{10,}")
    argument = re.compile(r"^\s*(?P<name>[A-Za-z]\w*) \.{2,} (?P<value>.*)$")
    standard: ClassVar = {
        "seq_length": "sequence_length", "train_iters": "total_steps", "padded_vocab_size": "vocab_size",
    }  # fmt: skip
    """Names of Megatron's arguments that have a standard name here."""

    @classmethod
    def recognizes(cls, source: LogSource) -> bool:
        """Return whether the start of the log has an iteration or a list of arguments as Megatron-LM prints them."""
        lines = source.head.splitlines()
        is_step = any((at := cls.step.search(line)) and "elapsed time per iteration" in at["pairs"] for line in lines)
        return is_step or (
            any(map(cls.arguments.search, lines)) and sum(cls.argument.match(line) is not None for line in lines) > 5
        )

    def parse(self, line: Line) -> LineContent | None:
        text = line.text
        if step := self.step.search(text):
            return LineContent(int(step["step"]), _pairs(step["pairs"]))
        if found := self.validation.search(text):
            where = found["where"] or f" validation{found['set'] or ''}"
            values = {
                name.removesuffix(" value") + where: value
                for name, value in _pairs(found["pairs"]).items()
                if name.endswith(" value")
            }
            return LineContent(int(found["step"]), values)
        if self.arguments.search(text):
            return LineContent(starts=True)
        if (argument := self.argument.match(text)) and (value := argument["value"].strip()) != "None":
            name = argument["name"]
            return LineContent(settings={self.standard.get(name, name): integer_or_text(value)})
        return None

    def complete(self, log: ProgramLog) -> tuple[str, ...]:
        tokenizer = ", ".join(str(log.settings[name]) for name in TOKENIZERS if name in log.settings)
        if tokenizer:
            log.settings["tokenizer"] = tokenizer
        if "rampup_batch_size" not in log.settings:
            log.add_tokens_per_step()
        diverged = _complete(log, log.settings.get("sequence_length"))
        notes = [f"Its mean loss is not a number, so not printed, at {diverged} steps: diverged."] if diverged else []
        if isinstance(interval := log.settings.get("log_interval"), int) and interval > 1:
            notes.append(f"Each training loss is the mean over the last {interval} iterations (log_interval).")
        return tuple(notes)


def _pairs(text: str) -> dict[str, float]:
    """Return the numbers of " lm loss: 1.0E+01 | grad norm: 2.000 |"; a pair without its closing bar is incomplete."""
    found = {}
    for pair in text.split("|")[:-1]:
        name, _, value = pair.rpartition(":")
        parsed = number(value)
        if parsed is not None and name.strip() and not SPEEDS.search(name):
            found[name.strip()] = parsed
    return found


def _complete(log: ProgramLog, length: Any) -> int:
    """Add tokens; mark losses that Megatron leaves out, and leave out the zeros of skipped iterations.

    A mean loss is printed if it is positive (or zero, in later versions), so a NaN is not printed. With all iterations
    skipped because of an overflow there is no mean, and 0 is printed or nothing.

    Returns the number of rows in which the mean loss is not a number.
    """
    diverged = 0
    for writer in log.writers.values():
        training: list[Mapping[str, float]] = [row for row in writer.rows.values() if "consumed samples" in row]
        losses = {name for row in training for name in row if "loss" in name and name not in ("loss scale",)}
        losses = {name for name in losses if not name.endswith(("validation", "set"))}
        interval = log.settings.get("log_interval", 1)
        for row in writer.rows.values():
            if "consumed samples" not in row:
                continue
            if isinstance(length, int):
                row["tokens"] = row["consumed samples"] * length
            all_skipped = row.get(SKIPPED, 0) >= (interval if isinstance(interval, int) else 1)
            main = next((name for name in ("lm loss", *sorted(losses)) if name in losses), None)
            if main is None:
                continue
            if all_skipped:
                if row.get(main) == 0:
                    del row[main]
            elif main not in row and SKIPPED in row:  # without it the line is cut off
                row[main] = math.inf
                diverged += 1
    return diverged
