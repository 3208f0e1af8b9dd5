"""A run as the verdict sees it: what its folder says in `config.yaml`, `metrics.jsonl` and `summary.json`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.terminal import shown
from lightning_llm.config.config_hash import config_digest, flatten
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.migrations import migrate
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.yaml_file import without_escapes
from lightning_llm.data.mixing.skipped import SKIPPED_SAMPLES
from lightning_llm.model.flops import count_parameters
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.text.describe import layout_facts
from lightning_llm.precision.native.capability import DEVICES
from lightning_llm.tracking.chain import RECORDS, ChainHead
from lightning_llm.tracking.evaluations import PREFIX, read_evaluations
from lightning_llm.tracking.files import (
    END,
    NON_FINITE,
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
"""Keys that stand in the `config.yaml` of every run, the last of them near its end."""
MOST_MISSING = 1000
"""Of missing steps that are looked for: a message names a few."""
EARLIER = "earlier."
"""Before the key of what a resumed run had otherwise in an earlier part: "earlier.code_hash"."""


@dataclass
class Run:
    """One run. `validations`: {"val_loss" and its kin: {step: loss in nats per token}}; by step of a validation also
    `tokens` seen and `train_seconds`, validations left out. Counts are of optimizer steps; `spikes`: of those with an
    `event`, which is a spike, a shift of the loss's level, or a divergence."""

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    validations: dict[str, dict[int, float]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    train_seconds: dict[int, float] = field(default_factory=dict)
    first_step: int = 0
    """Of its records, above 1 where an earlier part lies in another folder (resume=PATH); 0 where there are none."""
    last_step: int = 0
    last_loss: float = math.nan
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    """Of these, the last ones: no update followed."""
    stopping_event: str = ""
    """What the step was, by the spike detector, before whose update the run was ended."""
    spikes: int = 0
    typed: Config | None = None
    evaluated_on: dict[str, str] = field(default_factory=dict)
    """Of metrics that `evaluate` measured, "eval/NAME": what on."""
    higher_is_better: set[str] = field(default_factory=set)
    """Of these, those that a better model has more of."""
    unverified: str = ""
    """Why its records could not be verified, empty where they were."""
    words: tuple[str, ...] = ()
    """Of a job of a sweep of which they are all that is known: its config, which is empty but for the seed, is not."""

    @property
    def name(self) -> str:
        """The folder's last two names, enough to know it by: "20261121-170000/3"."""
        return str(shown("/".join(self.folder.parts[-2:])))

    @property
    def seed(self) -> int:
        """The block that the run belongs to."""
        return int(self.config.get("seed", 0))

    @property
    def branch(self) -> dict[str, Any]:
        """What the summary says of the trunk that the run branched off; {} of one that did not."""
        found = self.summary.get("branch")
        return found if isinstance(found, dict) else {}

    @property
    def branch_step(self) -> int:
        """The step that the run branched off at; 0 of one that did not."""
        step = self.branch.get("step")
        return step if isinstance(step, int) else 0

    @property
    def status(self) -> str:
        """How the run ended, "running" where it has not, as far as its summary says."""
        if self.summary.get("ended_by"):
            return "ended early"
        if self.summary:
            return str(self.summary.get("status", "running"))
        return "it has no summary.json" if self.last_step else "never begun"

    @property
    def started_at(self) -> str:
        """When the run began, in ISO 8601, which sorts."""
        return str(self.summary.get("started_at", ""))

    @property
    def finished(self) -> bool:
        """Whether it reached its last step."""
        return self.status == "finished"

    @property
    def non_finite(self) -> bool:
        """Whether it ended, or went on, with a loss or a gradient that is no number."""
        stopped = ended_not_finite(self.summary)
        losses = self.validations.get("val_loss", {})
        last = losses[max(losses)] if losses else 0.0
        lost = self.finished and self.last_step > 0 and not math.isfinite(self.last_loss)
        lost |= self.finished and stalled(self.last_step - self.first_step + 1, self.skipped_in_a_row)
        return stopped or lost or not math.isfinite(last) or self.stopping_event == "non_finite"

    @property
    def lost_its_loss(self) -> bool:
        """Whether it diverged on the way: not finite, or ended by `spikes.policy` because of it.

        That is a stop on a divergence, or any under policy=skip, which stops where as many updates in a row were left
        out as it may. One by policy=stop on a single spike or a shift says nothing of the kind: the run is unfinished.
        """
        gave_up = bool(self.stopping_event) and self.config.get("spikes.policy") == "skip"
        return self.non_finite or self.stopping_event == "divergence" or gave_up

    @cached_property
    def parameters(self) -> int | None:
        """Parameters of the model, over its true vocabulary; None where the config has no whole model."""
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
        """Whether the layout trains to the bits of a single rank (docs/explanation/same_bits.md)."""
        if self.typed is None:
            return False
        try:
            ran = self.typed.parallel.model_copy(update={"compile": facts(self)["compiled"]})
            plan = plan_of(self.typed.model_copy(update={"parallel": ran}), DEVICES["cpu"])
            return bool(layout_facts(plan)["bitwise"])
        except ConfigError:
            return False

    def figure(self, key: str) -> float | None:
        """Return a final figure of the summary, None where it was not measured or is no finite number."""
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
        """How many jobs of its sweep ran on its machine at the same time, at most; 1 for a run that is of no sweep."""
        in_sweep = (self.folder.parent / "sweep.json").is_file() and self.config.get(
            "launcher.name", "local"
        ) == "local"
        at_once = self.config.get("launcher.at_once")
        return at_once if in_sweep and type(at_once) is int else 1

    @property
    def peak_memory_bytes(self) -> float | None:
        """The device's peak where there is one, else the host's."""
        return self.figure("device_memory_peak_bytes") or self.figure("host_memory_peak_bytes")


def read_run(folder: Path) -> Run:
    """Return the run of `folder`, its records verified as far as it says what they were (`Run.unverified`).

    Text from its files is escaped: it may come from anywhere, and goes to terminals and reports.

    Raises:
        ConfigError: a file is missing, cannot be read as what it should be, or is not what the run wrote.
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
        raise ConfigError(Problem(str(folder), f"cannot be read as a run: config.yaml is no YAML ({why})")) from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(Problem(str(folder), f"cannot be read as a run: {why}")) from error
    try:
        run.typed = Config.model_validate(tree)
        run.config = flatten(run.typed.model_dump(mode="json"))
    except ValidationError:  # of another version: its own words are all there is to compare by
        pass
    run.config, run.summary = shown(run.config), shown(run.summary)
    return run


def _verify(run: Run, head: ChainHead) -> str:
    """Return why the records are not verified, "" where they are; `head`: of the hash chain over metrics.jsonl.

    Raises:
        ValueError: a file is not what the run wrote.
    """
    summary = run.summary
    sealed, digest = summary.get(RECORDS), summary.get("config_digest")
    if digest is not None:
        if summary.get("seed") != run.config["seed"]:
            raise ValueError(
                f"config.yaml was changed: seed is {run.config['seed']!r}, the run's {summary.get('seed')!r}"
            )
        if digest != config_digest(run.config):
            raise ValueError("config.yaml was changed: it is not the config that the run recorded (config_digest)")
    if sealed is None:
        if digest is None:
            return "an earlier release wrote them, or their digests were removed"
        if run.status in ("finished", "ended early"):
            raise ValueError(f"summary.json was changed: it lacks '{RECORDS}', which the end of a run writes")
        return "the run did not come to its end"
    written = ChainHead.from_data(sealed)
    if problem := written.problem(head):
        raise ValueError(f"metrics.jsonl {problem}")
    if sealed.get("facts") != facts_digest(summary):
        raise ValueError("summary.json was changed: its seed, hashes or versions are not those that the run recorded")
    if sealed.get("end", end := facts_digest(summary, END)) != end:
        raise ValueError("summary.json was changed: its status or detail is not the one that the run recorded")
    steps = written.unverified_steps
    return f"an earlier release wrote those up to step {steps}" if steps else ""


def _check_end(run: Run) -> None:
    """Raise ValueError where the records end elsewhere than the summary and the config say."""
    if not run.finished:
        return
    if not run.last_step:
        raise ValueError("its summary says that it finished, and metrics.jsonl is missing or empty")
    steps, last = run.config.get("trainer.max_steps"), run.last_step  # one that a callback ended has not `finished`
    if isinstance(steps, int) and last != steps:
        raise ValueError(f"its summary says that it finished, and metrics.jsonl ends at step {last} of {steps}")
    if max(run.validations.get("val_loss", {}), default=last) != last:
        raise ValueError(f"its summary says that it finished, and metrics.jsonl lacks the validation of step {last}")


def _whole_config(text: str) -> dict[str, Any]:
    """Return what `config.yaml` holds; the rest of one that was cut off is YAML, too, and another recipe.

    Raises:
        ValueError: it is no mapping, or lacks what every run has written.
    """
    tree = without_escapes(yaml.load(text, Loader))
    if not isinstance(tree, dict):
        raise ValueError("config.yaml holds no mapping")
    if lacking := [key for key in WRITTEN if key not in tree]:
        raise ValueError(f"config.yaml lacks {', '.join(lacking)}, so it was cut off or changed")
    if type(tree["seed"]) is not int:
        raise ValueError(f"config.yaml has seed {str(tree['seed'])[:40]!r}, which is no whole number")
    return tree


def _read_metrics(run: Run, path: Path) -> ChainHead:
    """Add what the records say; return the head of their hash chain.

    Raises:
        ValueError: they contradict each other: a step twice or missing, out of order, a validation beyond the last.
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
        run.spikes += record.get("event", STRAGGLER) != STRAGGLER
        if record.get("event_action") == "stop":  # its update was not made
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
        if not record.get("skipped"):  # what was left out did not reach the weights
            run.last_loss = loss
    begun = run.summary.get("begun_at_step")
    if isinstance(begun, int) and run.first_step > begun + 1:
        missing = [*range(begun + 1, min(run.first_step, begun + 1 + MOST_MISSING)), *missing]
    if missing:
        raise ValueError(
            f"metrics.jsonl lacks the record{'s' if len(missing) > 1 else ''} of {steps_in_words(missing)}"
        )
    validated = max((step for losses in run.validations.values() for step in losses), default=0)
    if run.last_step and validated > run.last_step:
        raise ValueError(f"metrics.jsonl has a validation at step {validated}, beyond its last step, {run.last_step}")
    if run.finished and path.exists() and path.stat().st_size != size:
        raise ValueError("metrics.jsonl ends in a line that was cut off")
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
        raise ValueError(f"metrics.jsonl has tokens = {str(tokens)[:40]!r} at step {step}, which is no whole number")
    run.tokens[step] = tokens
    run.train_seconds[step] = seconds


def _read_evaluations(run: Run) -> None:
    step_tokens: list[Any] = [run.config.get(f"data.{key}") for key in ("global_batch_size", "sequence_length")]
    for step, metrics in read_evaluations(run.folder).items():
        for name, each in metrics.items():
            key = shown(f"{PREFIX}{name}")
            run.validations.setdefault(key, {})[step] = each["value"]
            run.evaluated_on[key] = shown(str(each.get("of", "")))  # the newest step's
            if each.get("higher_is_better"):
                run.higher_is_better.add(key)
        if all(isinstance(each, int) for each in step_tokens):
            run.tokens.setdefault(step, step * math.prod(step_tokens))


def measured_on(run: Run, metric: str) -> str | None:
    """Return what tells the data that `metric` was measured on from any other; None where no record of the run says.

    Of one source's loss ("val_loss/prose") that is a hash of what was scored of it, of another validation the hash of
    all that its mean is over, and of what `evaluate` measured ("eval/...") its own words.
    """
    if metric in run.evaluated_on:
        return run.evaluated_on[metric] or None
    if source := metric.partition("/")[2]:
        found = (run.summary.get(SOURCE_HASHES) or {}).get(source)
    else:
        found = run.summary.get("validation_hash")
    return None if found is None else str(found)


def facts(run: Run) -> Mapping[str, Any]:
    """Return what the run's summary says of where its numbers come from, flat; what was not recorded is left out.

    Of a resumed run also what earlier parts of it had otherwise.
    """
    earlier = run.summary.get("earlier") or {}
    asked: dict[str, Any] = {"compiled": bool(run.config.get("parallel.compile"))}  # all that earlier summaries leave
    if skipped := run.config.get("data.skip_samples"):
        asked[SKIPPED_SAMPLES] = skipped
    return asked | origin_of(run.summary) | {f"{EARLIER}{key}": values for key, values in earlier.items()}
