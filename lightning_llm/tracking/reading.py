"""Reading a run for comparisons, from `config.yaml`, `metrics.jsonl` and `summary.json` in its folder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import RECORDS, ChainHead
from lightning_llm.base.terminal import shown
from lightning_llm.config.config_hash import config_digest, flatten
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.aliases import migrate
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.yaml_file import without_escapes
from lightning_llm.data.mixing.addressing import SKIPPED_SAMPLES
from lightning_llm.model.flops import count_parameters
from lightning_llm.plan.describe import layout_facts
from lightning_llm.plan.resolve import plan_of
from lightning_llm.precision.native.decide import DEVICES
from lightning_llm.tracking.evaluations import PREFIX, comparable, read_evaluations
from lightning_llm.tracking.files import (
    END,
    NON_FINITE,
    NOT_OF_LOSS,
    SOURCE_HASHES,
    STRAGGLER,
    Record,
    ended_not_finite,
    facts_digest,
    number_of,
    read_lines,
    steps_in_words,
    summary_of,
)
from lightning_llm.tracking.final_figures import stalled
from lightning_llm.tracking.provenance import origin_of

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
WRITTEN = (*(key for key, each in Config.model_fields.items() if each.is_required()), "seed")
"""Keys in the `config.yaml` of every run; the last of them is near its end."""
MOST_MISSING = 1000
"""Maximum number of missing steps to find for a message."""
EARLIER = "earlier."
"""Prefix of keys with other values in previous sessions of a resumed run: "earlier.code_hash"."""


@dataclass
class Run:
    """One run, as read from its folder for a comparison.

    `validations`: {"val_loss", "val_loss/SOURCE", ...: {step: loss in nats per token}}. `tokens` seen and
    `train_seconds` (without validations) are also by step of a validation. Counts are numbers of optimizer steps;
    `spikes` counts steps with an `event`: a spike, a level shift of the loss, or a divergence.
    """

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    validations: dict[str, dict[int, float]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    train_seconds: dict[int, float] = field(default_factory=dict)
    first_step: int = 0
    """First step of its records; above 1 after a resume from another folder (resume=PATH); 0 without records."""
    last_step: int = 0
    last_loss: float = math.nan
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    """Number of skipped steps at the end, without a later update."""
    stopping_event: str = ""
    """Event of the step that ended the run before its update, from the spike detector."""
    spikes: int = 0
    typed: Config | None = None
    evaluated_on: dict[str, str] = field(default_factory=dict)
    """Identity of the data of each metric of `evaluate`, by "eval/NAME"."""
    higher_is_better: set[str] = field(default_factory=set)
    """The metrics of `evaluate` for which higher is better."""
    unverified: str = ""
    """Why its records could not be verified, "" if they were."""
    overrides: tuple[str, ...] = ()
    """Overrides of a sweep's job, if nothing else is known about it; its config then contains only the seed."""
    logged_on: str = ""
    """Axis of the curve that another trainer logged ("steps", "tokens" or a column); "" for a run of this program."""

    @property
    def name(self) -> str:
        """Name of the run in texts: the last two names of its folder, such as "20261121-170000/3"."""
        return str(shown("/".join(self.folder.parts[-2:])))

    @property
    def seed(self) -> int:
        """The run's seed; runs of different arms are paired by it."""
        return int(self.config.get("seed", 0))

    @property
    def branch(self) -> dict[str, Any]:
        """Facts in the summary about the parent run of a branch; {} for other runs."""
        found = self.summary.get("branch")
        return found if isinstance(found, dict) else {}

    @property
    def branch_step(self) -> int:
        """Step at which a branch begins; 0 for other runs."""
        step = self.branch.get("step")
        return step if isinstance(step, int) else 0

    @property
    def status(self) -> str:
        """Status in the summary: how the run ended, or "running"."""
        if self.summary.get("ended_by"):
            return "ended early"
        if self.summary:
            return str(self.summary.get("status", "running"))
        return "no summary.json" if self.last_step else "not started"

    @property
    def started_at(self) -> str:
        """Start time in ISO 8601 format."""
        return str(self.summary.get("started_at", ""))

    @property
    def finished(self) -> bool:
        """True if the run reached its last step."""
        return self.status == "finished"

    @property
    def non_finite(self) -> bool:
        """Whether the run had a loss or gradient that was not finite."""
        stopped = ended_not_finite(self.summary)
        losses = self.validations.get("val_loss", {})
        last = losses[max(losses)] if losses else 0.0
        lost = self.finished and self.last_step > 0 and not math.isfinite(self.last_loss)
        lost |= self.finished and stalled(self.last_step - self.first_step + 1, self.skipped_in_a_row)
        return stopped or lost or not math.isfinite(last) or self.stopping_event == "non_finite"

    @property
    def diverged(self) -> bool:
        """Whether the run diverged: not finite, or ended by `spikes.policy` because of a divergence.

        The latter is a stop on a divergence, or any stop under policy=skip, which stops after too many skipped updates
        in a row. A stop under policy=stop on a single spike or level shift only leaves the run unfinished.
        """
        gave_up = bool(self.stopping_event) and self.config.get("spikes.policy") == "skip"
        return self.non_finite or self.stopping_event == "divergence" or gave_up

    @cached_property
    def parameters(self) -> int | None:
        """Number of parameters of the model with its unpadded vocabulary; None if the config has no complete model."""
        if self.typed is not None:
            return count_parameters(self.typed.model).total
        model = {key.removeprefix("model."): value for key, value in self.config.items() if key.startswith("model.")}
        try:
            return count_parameters(ModelConfig.model_validate(model)).total
        except ValidationError:
            found = self.summary.get("parameters")
            return int(found) if isinstance(found, int) else None

    @cached_property
    def bitwise_layout(self) -> bool:
        """Whether the layout gives bitwise the results of a single rank (docs/explanation/same_bits.md)."""
        if self.typed is None:
            return False
        try:
            ran = self.typed.parallel.model_copy(update={"compile": facts(self)["compiled"]})
            plan = plan_of(self.typed.model_copy(update={"parallel": ran}), DEVICES["cpu"])
            return bool(layout_facts(plan)["bitwise"])
        except ConfigError:
            return False

    def figure(self, key: str) -> float | None:
        """Return the number at `key` of the summary; None if it is missing or not finite."""
        value = self.summary.get(key)
        value = NON_FINITE.get(value, value) if isinstance(value, str) else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        try:
            return float(value) if math.isfinite(value) else None
        except OverflowError:
            return None

    @cached_property
    def at_once(self) -> int:
        """Maximum number of jobs of its sweep at the same time on its machine; 1 for a run outside of a sweep."""
        in_sweep = (self.folder.parent / "sweep.json").is_file() and self.config.get(
            "launcher.name", "local"
        ) == "local"
        at_once = self.config.get("launcher.at_once")
        return at_once if in_sweep and type(at_once) is int else 1

    @property
    def peak_memory_bytes(self) -> float | None:
        """Peak memory of the device in bytes, or else of the host; None if not recorded."""
        return self.figure("device_memory_peak_bytes") or self.figure("host_memory_peak_bytes")


def read_run(folder: Path) -> Run:
    """Return the run in `folder`, with its records verified as far as possible (`Run.unverified`).

    Text from its files is escaped, because it is untrusted and is shown in terminals and reports.

    Raises:
        ConfigError: a file is missing, damaged, or was changed after the run.
    """
    try:
        if not (folder / "config.yaml").exists():
            raise ValueError("config.yaml is missing")
        tree = _whole_config((folder / "config.yaml").read_text(encoding="utf-8"))
        migrate(tree)
        run = Run(folder, flatten(tree), summary_of(folder))
        head = _read_metrics(run, folder / "metrics.jsonl")
        run.unverified = _verify(run, head)
        _read_evaluations(run)
        _check_end(run)
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())[:300]
        raise ConfigError(Problem(str(folder), f"cannot be read as a run: config.yaml is not YAML ({why})")) from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(Problem(str(folder), f"cannot be read as a run: {why}")) from error
    try:
        run.typed = Config.model_validate(tree)
        run.config = flatten(run.typed.model_dump(mode="json"))
    except ValidationError:  # of another version: only its raw values can be compared
        pass
    run.config, run.summary = shown(run.config), shown(run.summary)
    return run


def _verify(run: Run, head: ChainHead) -> str:
    """Return why the records are not verified, "" if they are; `head`: head of the hash chain of metrics.jsonl.

    Raises:
        ValueError: a file was changed after the run.
    """
    summary = run.summary
    sealed, digest = summary.get(RECORDS), summary.get("config_digest")
    if digest is not None:
        if summary.get("seed") != run.config["seed"]:
            raise ValueError(
                f"config.yaml was changed: seed is {run.config['seed']!r}, but the run had {summary.get('seed')!r}. "
                "Restore it"
            )
        if digest != config_digest(run.config):
            raise ValueError("config.yaml was changed: it does not match config_digest in summary.json. Restore it")
    if sealed is None:
        if digest is None:
            return "an earlier release wrote them, or their digests were removed"
        if run.status in ("finished", "ended early"):
            raise ValueError(
                f"summary.json was changed: '{RECORDS}', which every ended run has, is missing. Restore it"
            )
        return "the run has not ended"
    written = ChainHead.from_data(sealed)
    if problem := written.problem(head):
        raise ValueError(f"metrics.jsonl {problem}")
    if sealed.get("facts") != facts_digest(summary):
        raise ValueError("summary.json was changed: its seed, hashes or versions do not match their digest. Restore it")
    if sealed.get("end", end := facts_digest(summary, END)) != end:
        raise ValueError("summary.json was changed: its status or detail does not match its digest. Restore it")
    steps = written.unverified_steps
    return f"an earlier release wrote those up to step {steps}" if steps else ""


def _check_end(run: Run) -> None:
    """Raise ValueError if the records of a finished run do not end at its last step."""
    if not run.finished:
        return
    if not run.last_step:
        raise ValueError("its status is finished, but metrics.jsonl is missing or empty")
    steps, last = run.config.get("trainer.max_steps"), run.last_step  # a run ended by a callback is not `finished`
    if isinstance(steps, int) and last != steps:
        raise ValueError(f"its status is finished, but metrics.jsonl ends at step {last} of {steps}")
    if max(run.validations.get("val_loss", {}), default=last) != last:
        raise ValueError(f"its status is finished, but metrics.jsonl has no validation at step {last}")


def _whole_config(text: str) -> dict[str, Any]:
    """Return the content of `config.yaml`. A truncated file may still be valid YAML, so required keys are checked.

    Raises:
        ValueError: it is not a mapping, or required keys are missing.
    """
    tree = without_escapes(yaml.load(text, Loader))
    if not isinstance(tree, dict):
        raise ValueError("config.yaml is not a mapping")
    if lacking := [key for key in WRITTEN if key not in tree]:
        raise ValueError(f"config.yaml has no {', '.join(lacking)}: it was truncated or changed")
    if type(tree["seed"]) is not int:
        raise ValueError(f"config.yaml has seed {str(tree['seed'])[:40]!r}, which is not an integer")
    return tree


def _read_metrics(run: Run, path: Path) -> ChainHead:
    """Read the records into `run`; return the head of their hash chain.

    Raises:
        ValueError: they are inconsistent: a step twice, missing or out of order, or a validation after the last step.
    """
    seconds, head, last, size = 0.0, ChainHead(), 0, 0
    missing: list[int] = []
    for line, record in read_lines(path) if path.exists() else ():
        head, size, step = head.after(line), size + len(line), record["step"]
        if step < last:
            raise ValueError(f"metrics.jsonl has step {step} after step {last}")
        last = step
        if any(key.startswith("val_loss") for key in record):
            _add_validation(run, record, seconds)
            continue
        run.spikes += record.get("event", STRAGGLER) not in NOT_OF_LOSS
        if record.get("event_action") == "stop":  # a step without an update
            run.stopping_event = str(record.get("event"))
            continue
        if step == run.last_step and run.first_step:
            raise ValueError(f"metrics.jsonl has step {step} twice")
        if run.first_step and len(missing) < MOST_MISSING:
            missing += range(run.last_step + 1, min(step, run.last_step + 1 + MOST_MISSING))
        seconds += number_of(record, "step_seconds", 0.0)
        run.first_step, run.last_step = run.first_step or step, step
        run.skipped_steps += bool(record.get("skipped"))
        run.skipped_in_a_row = run.skipped_in_a_row + 1 if record.get("skipped") else 0
        loss = number_of(record, "loss")
        if not record.get("skipped"):  # a skipped update does not change the weights
            run.last_loss = loss
    begun = run.summary.get("begun_at_step")
    if isinstance(begun, int) and run.first_step > begun + 1:
        missing = [*range(begun + 1, min(run.first_step, begun + 1 + MOST_MISSING)), *missing]
    if missing:
        raise ValueError(f"metrics.jsonl has no record{'s' if len(missing) > 1 else ''} of {steps_in_words(missing)}")
    validated = max((step for losses in run.validations.values() for step in losses), default=0)
    if run.last_step and validated > run.last_step:
        raise ValueError(f"metrics.jsonl has a validation at step {validated}, after its last step {run.last_step}")
    if run.finished and path.exists() and path.stat().st_size != size:
        raise ValueError("metrics.jsonl ends in an incomplete line")
    return head


def _add_validation(run: Run, record: Record, seconds: float) -> None:
    step = record["step"]
    for key in (key for key in record if key.startswith("val_loss")):
        value, known = number_of(record, key), run.validations.setdefault(shown(key), {})
        if value < 0:
            raise ValueError(f"metrics.jsonl has {key} = {value} at step {step}; no cross-entropy is below 0")
        if step in known and repr(known[step]) != repr(value):
            raise ValueError(f"metrics.jsonl has {key} twice at step {step}: {known[step]} and {value}")
        known[step] = value
    tokens = record.get("tokens", 0)
    if type(tokens) is not int:
        raise ValueError(f"metrics.jsonl has tokens = {str(tokens)[:40]!r} at step {step}, which is not an integer")
    run.tokens[step] = tokens
    run.train_seconds[step] = seconds


def _read_evaluations(run: Run) -> None:
    step_tokens: list[Any] = [run.config.get(f"data.{key}") for key in ("global_batch_size", "sequence_length")]
    for step, metrics in comparable(read_evaluations(run.folder)).items():
        for name, each in metrics.items():
            key = shown(f"{PREFIX}{name}")
            run.validations.setdefault(key, {})[step] = each["value"]
            run.evaluated_on[key] = shown(str(each.get("of", "")))
            if each.get("higher_is_better"):
                run.higher_is_better.add(key)
        if all(isinstance(each, int) for each in step_tokens):
            run.tokens.setdefault(step, step * math.prod(step_tokens))


def measured_on(run: Run, metric: str) -> str | None:
    """Return the identity of the data that `metric` was measured on; None if it is not recorded.

    For the loss of one source ("val_loss/prose") this is the hash of its validation data, for other validations the
    hash over all sources, and for metrics of `evaluate` ("eval/...") a text.
    """
    if metric in run.evaluated_on:
        return run.evaluated_on[metric] or None
    if source := metric.partition("/")[2]:
        found = (run.summary.get(SOURCE_HASHES) or {}).get(source)
    else:
        found = run.summary.get("validation_hash")
    return None if found is None else str(found)


def facts(run: Run) -> Mapping[str, Any]:
    """Return {flat key: value} of the recorded facts that influence the run's numbers; see `provenance.origin_of`.

    For a resumed run they include values that differed in previous sessions.
    """
    earlier = run.summary.get("earlier") or {}
    asked: dict[str, Any] = {"compiled": bool(run.config.get("parallel.compile"))}  # of earlier releases
    if skipped := run.config.get("data.skip_samples"):
        asked[SKIPPED_SAMPLES] = skipped
    return asked | origin_of(run.summary) | {f"{EARLIER}{key}": values for key, values in earlier.items()}
