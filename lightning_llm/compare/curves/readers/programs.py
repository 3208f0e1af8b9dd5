"""Readers of the lines that a training program prints: torchtitan, nanochat, nanoGPT, litgpt and MaxText."""

import re
from abc import ABC, abstractmethod
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_llm.compare.curves.readers.attempts import Attempts, columns_by_step, merged
from lightning_llm.compare.curves.table import ESCAPES, NUMBER, Line, LoggedTable, LogSource, lines_of, number


@dataclass
class LineContent:
    """Content of one line of a log: `values` of a `step`, `settings`, or the start of the program (`starts`)."""

    step: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    starts: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ProgramLog:
    """All values of a log and its settings.

    `writers`: {rank, "" without ranks: its values by step}; `settings`: the value that a key had last; `changed`: keys
    that had several values within the log.
    """

    writers: dict[str, Attempts] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    def add(self, line: Line, content: LineContent) -> None:
        """Add the content of one line. Raises ValueError if its values cannot be those of the same run."""
        writer = self.writers.setdefault(line.rank, Attempts())
        if content.starts:
            writer.starts()
        for key, value in content.settings.items():
            if self.settings.setdefault(key, value) != value:
                self.changed.append(key)
            self.settings[key] = value
        if content.step is not None and content.values:
            writer.add(f"line {line.number}", content.step, content.values)

    def add_tokens_per_step(self) -> None:
        """Add the setting `tokens_per_step` if the batch size and the sequence length are known."""
        batch, length = self.settings.get("global_batch_size"), self.settings.get("sequence_length")
        if isinstance(batch, int) and isinstance(length, int):
            self.settings["tokens_per_step"] = batch * length


class Program(ABC):
    """Base class of training programs with logs that can be read. An instance reads one log.

    `format`: the name of its reader; `shown`: an example of a line with a loss, for messages; `notes`: sentences on
    how the log was read; `smoothed`: as in `LoggedTable`; `marks`: patterns of lines that no other program prints.
    """

    format: ClassVar[str]
    shown: ClassVar[str]
    notes: ClassVar[tuple[str, ...]] = ()
    smoothed: ClassVar[Mapping[str, str]] = {}
    marks: ClassVar[tuple[re.Pattern[str], ...]] = ()

    @classmethod
    def recognizes(cls, source: LogSource) -> bool:
        """Return whether the start of the log has a line of this program."""
        lines = ESCAPES.sub("", source.head).splitlines()
        return any(pattern.search(line) for line in lines for pattern in cls.marks)

    @classmethod
    def read(cls, source: LogSource) -> LoggedTable:
        """Return the losses of each step, and the settings that the log states.

        Raises:
            ValueError: it is not a file, has no losses, or has lines of several runs or of ranks that contradict each
                other.
        """
        program, log = cls(), ProgramLog()
        for line in lines_of(source.file):
            if (content := program.parse(line)) is not None:
                log.add(line, content)
        notes = program.complete(log)
        rows, resumed = merged(log.writers)
        if not rows:
            raise ValueError(f"it has no line such as `{cls.shown}`. Name the log of the rank that prints the loss.")
        if log.changed:
            notes = (*notes, f"Settings changed within the log: {', '.join(sorted(set(log.changed)))}.")
        return LoggedTable(
            cls.format, source.address, columns_by_step(rows), log.settings, (*resumed, *notes), smoothed=cls.smoothed
        )

    @abstractmethod
    def parse(self, line: Line) -> LineContent | None:
        """Return the content of a line, None for a line without a loss or a setting."""

    def complete(self, log: ProgramLog) -> tuple[str, ...]:
        """Add to the finished `log` the values and settings that follow from others. Return the notes."""
        return self.notes


def _float(text: str | None) -> float | None:
    return number((text or "").replace(",", ""))


def _int(text: str) -> int:
    return int(text.replace(",", ""))


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


class TorchTitan(Program):
    """torchtitan (pytorch/torchtitan, `components/metrics.py` of v0.1.0 to main of August 2026).

    Columns: `loss`, `val_loss` and `grad_norm`. Ranks of a pipeline without its last stage log a negative loss, which
    is left out.
    """

    format = "torchtitan"
    shown = "step:  1  loss:  8.13760  grad_norm:  0.7000  memory:  1.00GiB(1.00%)  tps: 1,000"
    step = re.compile(
        r"(?P<validate>validate )?step:\s*(?P<step>\d+)\s+loss:\s*(?P<rest>\S+\s+(?:grad_norm|memory):.*)$"
    )
    loss = re.compile(rf"(?P<loss>{NUMBER})\s+(?:grad_norm:\s*(?P<norm>{NUMBER})\s)?", re.IGNORECASE)
    start = re.compile(r"Training starts at step \d+")
    batch = re.compile(
        r"global batch size (\d+), gradient accumulation steps \d+, sequence length (\d+), total steps (\d+)"
    )
    batch_in_tokens = re.compile(r"(\d+) tokens per train step, .*maximum context length (\d+), total steps (\d+)")
    seed = re.compile(r"[\"']seed[\"']: (\d+)")
    tokenizer = re.compile(r"[\"'](?:hf_assets_path|tokenizer_path)[\"']: [\"']([^\"']+)[\"']")
    marks = (step, re.compile(r"\[titan\]"))

    def parse(self, line: Line) -> LineContent | None:
        text = line.text
        if step := self.step.search(text):
            logged = self.loss.match(step["rest"])
            if not logged or (loss := _float(logged["loss"])) is None or loss < 0:
                return None
            values = (
                {"val_loss": loss} if step["validate"] else _known({"loss": loss, "grad_norm": _float(logged["norm"])})
            )
            return LineContent(int(step["step"]), values)
        settings: dict[str, Any] = {}
        if batch := self.batch.search(text):
            size, length, steps = map(int, batch.groups())
            settings |= {"global_batch_size": size, "sequence_length": length, "tokens_per_step": size * length}
            settings |= {"total_steps": steps}
        elif tokens := self.batch_in_tokens.search(text):
            names = ("tokens_per_step", "sequence_length", "total_steps")
            settings |= dict(zip(names, map(int, tokens.groups()), strict=True))
        if seed := self.seed.search(text):
            settings["seed"] = int(seed[1])
        if tokenizer := self.tokenizer.search(text):
            settings["tokenizer"] = tokenizer[1]
        starts = self.start.search(text) is not None
        return LineContent(starts=starts, settings=settings) if starts or settings else None


class NanoChat(Program):
    """nanochat (karpathy/nanochat, `scripts/base_train.py` of October 2025 to July 2026).

    Columns: the smoothed training loss (`loss`), the loss without smoothing (`train/raw_loss`) and `val/bpb`.
    """

    format = "nanochat"
    shown = "step 00000/21400 (0.00%) | loss: 11.090355 | lrm: 1.00 | ..."
    decay = 0.9
    """Decay of the moving average that nanochat prints as the training loss (`ema_beta`)."""
    smoothed: ClassVar = {"loss": f"moving average with decay {decay}"}
    notes = (f"The printed loss is a {smoothed['loss']}; train/raw_loss is computed from it, exact to about 1e-5.",)
    step = re.compile(rf"^step (\d+)(?:/\d+)? \([\d.]+%\) \| loss: ({NUMBER}) \|", re.IGNORECASE)
    validation = re.compile(rf"^Step (\d+) \| (Validation bpb|CORE metric): ({NUMBER})$", re.IGNORECASE)
    columns: ClassVar = {"Validation bpb": "val/bpb", "CORE metric": "core_metric"}
    resumes = re.compile(r"^Resuming optimization from step \d+")
    batch = re.compile(r"^Total batch size ([\d,]+) =>")
    settings: ClassVar = {
        "sequence_length": re.compile(r"^Tokens / micro-batch / rank: \d+ x (\d+) ="),
        "vocab_size": re.compile(r"^Vocab size: ([\d,]+)"),
        "total_steps": re.compile(r"^(?:Using user-provided|Calculated) number of iterations.*: ([\d,]+)$"),
    }
    marks = (step, validation)

    def parse(self, line: Line) -> LineContent | None:
        text = line.text.strip()
        if found := self.step.match(text):
            return LineContent(int(found[1]), _known({"loss": _float(found[2])}))
        if found := self.validation.match(text):
            return LineContent(int(found[1]), _known({self.columns[found[2]]: _float(found[3])}))
        if found := self.batch.match(text):
            return LineContent(starts=True, settings={"tokens_per_step": _int(found[1])})
        if self.resumes.match(text):
            return LineContent(starts=True)
        for key, pattern in self.settings.items():
            if found := pattern.match(text):
                return LineContent(settings={key: _int(found[1])})
        return None

    def complete(self, log: ProgramLog) -> tuple[str, ...]:
        for writer in log.writers.values():
            printed = {step: row["loss"] for step, row in writer.rows.items() if "loss" in row}
            for step, value in self.without_average(printed).items():
                writer.rows[step]["train/raw_loss"] = value
        return self.notes

    def without_average(self, printed: dict[int, float]) -> dict[int, float]:
        """Return {step: loss of its last micro-batch} from {step: printed average}.

        nanochat prints m[t] / (1 - decay**(t+1)) with m[t] = decay m[t-1] + (1 - decay) loss[t], which is solved for
        loss[t] where the step before is printed, too.
        """
        average = {step: value * (1 - self.decay ** (step + 1)) for step, value in printed.items()}
        average[-1] = 0.0
        known = [step for step in printed if step - 1 in average]
        return {step: (average[step] - self.decay * average[step - 1]) / (1 - self.decay) for step in known}


class NanoGPT(Program):
    """nanoGPT (karpathy/nanoGPT, `train.py` and `configurator.py` of December 2022 to 2025).

    Columns: the loss of each iteration (`loss`), and the evaluated losses under their W&B names.
    """

    format = "nanogpt"
    shown = "iter 0: loss 10.9892, time 66.90ms, mfu -100.00%"
    notes = (
        "The loss of an iteration is that of its last micro-batch on rank 0; val/loss is the mean over eval_iters "
        "batches.",
    )
    iteration = re.compile(rf"^iter (\d+): loss ({NUMBER}), time", re.IGNORECASE)
    evaluation = re.compile(rf"^step (\d+): train loss ({NUMBER}), val loss ({NUMBER})", re.IGNORECASE)
    start = re.compile(
        r"^(Initializing a new model from scratch|Resuming training from |Initializing from OpenAI GPT-2)"
    )
    tokens = re.compile(r"^tokens per iteration will be: ([\d,]+)")
    vocabulary = re.compile(r"^found vocab_size = (\d+) ")
    override = re.compile(r"^(?:Overriding: )?([a-z]\w*) = ([^#]+?)\s*(?:#.*)?$")
    standard: ClassVar = {
        "block_size": "sequence_length", "max_iters": "total_steps", "seed": "seed", "dataset": "tokenizer",
    }  # fmt: skip
    """nanoGPT's keys with a standard name here. It has one tokenizer per data set."""
    marks = (iteration, evaluation)

    def parse(self, line: Line) -> LineContent | None:
        text = line.text.strip()
        if found := self.iteration.match(text):
            return LineContent(int(found[1]), _known({"loss": _float(found[2])}))
        if found := self.evaluation.match(text):
            losses = {"train/loss": _float(found[2]), "val/loss": _float(found[3])}
            return LineContent(int(found[1]), _known(losses))
        if self.start.match(text):
            return LineContent(starts=True)
        if found := self.tokens.match(text):
            return LineContent(settings={"tokens_per_step": _int(found[1])})
        if found := self.vocabulary.match(text):
            return LineContent(settings={"vocab_size": int(found[1])})
        if found := self.override.match(text):
            return LineContent(settings={self.standard.get(found[1], found[1]): _literal(found[2])})
        return None


def _literal(text: str) -> Any:
    try:
        value = literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float | str) else text


class LitGPT(Program):
    """litgpt (Lightning-AI/litgpt, `pretrain.py` and `finetune/` of 2024 to June 2026).

    Columns: `loss` and `val_loss` of each optimizer step. Lines within a step, after some of its micro-batches, are
    left out. A validation names only its iteration, which follows that step's line.
    """

    format = "litgpt"
    shown = "Epoch 1 | iter 16 step 1 | loss train: 10.912, val: n/a | iter time: 390.20 ms (step)"
    notes = ("litgpt prints training losses with 3 decimals; its logger (CSV, TensorBoard, W&B) has all digits.",)
    iteration = re.compile(
        rf"^Epoch \d+ \| iter (?P<iter>\d+) step (?P<step>\d+) \| loss train: (?P<loss>{NUMBER}), val: [^|]*\| "
        r"iter time: [\d.]+ ms(?P<complete> \(step\))?",
        re.IGNORECASE,
    )
    validation = re.compile(rf"^iter (?P<iter>\d+): val loss (?P<loss>{NUMBER}), val time", re.IGNORECASE)
    resumes = re.compile(r"^Resuming training from ")
    seed = re.compile(r"^\s*\{?'?seed'?[:=] (\d+),?\s*\}?$")
    marks = (iteration,)

    def __init__(self) -> None:
        self.last_step = 0

    def parse(self, line: Line) -> LineContent | None:
        text = line.text.strip()
        if found := self.iteration.match(text):
            self.last_step = int(found["step"])
            return LineContent(self.last_step, _known({"loss": _float(found["loss"])})) if found["complete"] else None
        if found := self.validation.match(text):
            return LineContent(self.last_step, _known({"val_loss": _float(found["loss"])}))
        if self.resumes.match(text):
            return LineContent(starts=True)
        if found := self.seed.match(text):
            return LineContent(settings={"seed": int(found[1])})
        return None


class MaxText(Program):
    """MaxText (AI-Hypercomputer/maxtext, `metric_logger.py` of 2024 to August 2026).

    Columns: the losses of each step, and those of evaluations with the prefix "eval_".
    """

    format = "maxtext"
    shown = "completed step: 0, seconds: 1.353, ..., total_weights: 1572864, loss: 10.874"
    notes = ("MaxText prints losses with 3 decimals; its metrics_file (JSON Lines) has all digits.",)
    step = re.compile(r"completed (?:profiler activation/deactivation )?step: (?P<step>\d+), (?P<rest>.*)$")
    evaluation = re.compile(
        r"(?:eval metrics after step: |Completed eval after train step )(?P<step>\d+), (?P<rest>.*)$"
    )
    pair = re.compile(rf"(?P<name>[a-z_]*loss)[:=] ?(?P<value>{NUMBER})(?=,|$)", re.IGNORECASE)
    parameter = re.compile(r"Config param (\w+): (.*)$")
    standard: ClassVar = {
        "init_weights_seed": "seed", "steps": "total_steps", "global_batch_size_to_train_on": "global_batch_size",
        "max_target_length": "sequence_length", "tokenizer_path": "tokenizer", "vocab_size": "vocab_size",
        "data_shuffle_seed": "data_shuffle_seed", "dataset_path": "dataset_path", "quantization": "quantization",
    }  # fmt: skip
    """Parameters of MaxText that are kept, and their names here."""

    @classmethod
    def recognizes(cls, source: LogSource) -> bool:
        """Return whether it has a step of MaxText with a loss, or several of its parameters."""
        lines = source.head.splitlines()
        is_step = any((found := cls.step.search(line)) and "loss:" in found["rest"] for line in lines)
        return is_step or sum(cls.parameter.search(line) is not None for line in lines) > 5

    def parse(self, line: Line) -> LineContent | None:
        text = line.text.rstrip()
        if found := self.step.search(text):
            return LineContent(int(found["step"]), self._losses(found["rest"]))
        if found := self.evaluation.search(text):
            losses = {f"eval_{name}": value for name, value in self._losses(found["rest"]).items()}
            return LineContent(int(found["step"]), losses)
        if found := self.parameter.search(text):
            name, value = self.standard.get(found[1]), found[2].strip()
            starts = found[1] == "run_name"
            settings = {name: int(value) if value.isdigit() else value} if name and value not in ("", "None") else {}
            return LineContent(starts=starts, settings=settings) if starts or settings else None
        return None

    def _losses(self, text: str) -> dict[str, float]:
        return _known({pair["name"]: _float(pair["value"]) for pair in self.pair.finditer(text)})

    def complete(self, log: ProgramLog) -> tuple[str, ...]:
        log.add_tokens_per_step()
        return self.notes
