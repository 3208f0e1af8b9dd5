"""A run as the verdict sees it: what its folder says in `config.yaml`, `metrics.jsonl` and `summary.json`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lightning_llm.config.identity import flatten
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.migrations import migrate
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.data.skipped import SKIPPED_SAMPLES
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.model.flops import count_parameters
from lightning_llm.plan.describe import layout_facts
from lightning_llm.plan.resolve import plan_of
from lightning_llm.precision.native.capability import DEVICES
from lightning_llm.record.evaluations import PREFIX, read_evaluations
from lightning_llm.record.files import NON_FINITE, SOURCE_HASHES, STRAGGLER, ended_not_finite, read_records, summary_of
from lightning_llm.record.provenance import origin_of
from lightning_llm.record.skipped_updates import stalled

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
WRITTEN = (*(key for key, each in Config.model_fields.items() if each.is_required()), "seed")
"""Keys that stand in the `config.yaml` of every run, the last of them near its end."""
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
    words: tuple[str, ...] = ()
    """Of a job of a sweep of which they are all that is known: its config, which is empty but for the seed, is not."""

    @property
    def name(self) -> str:
        """The folder's last two names, enough to know it by: "20261121-170000/3"."""
        return "/".join(self.folder.parts[-2:])

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
        """Whether the layout trains to the bits of a single rank (docs/parallel.md)."""
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
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    @cached_property
    def at_once(self) -> int:
        """How many jobs of its sweep ran on its machine at the same time, at most; 1 for a run that is of no sweep."""
        in_sweep = (self.folder.parent / "sweep.json").is_file() and self.config.get(
            "launcher.name", "local"
        ) == "local"
        return int(self.config.get("launcher.at_once") or 1) if in_sweep else 1

    @property
    def peak_memory_bytes(self) -> float | None:
        """The device's peak where there is one, else the host's."""
        return self.figure("device_memory_peak_bytes") or self.figure("host_memory_peak_bytes")


def read_run(folder: Path) -> Run:
    """Return the run of `folder`.

    Raises:
        ConfigError: a file is missing, or cannot be read as what it should be.
    """
    try:
        tree = _whole_config((folder / "config.yaml").read_text(encoding="utf-8"))
        migrate(tree)
        run = Run(folder, flatten(tree), summary_of(folder))
        _read_metrics(run, folder / "metrics.jsonl")
        _read_evaluations(run)
        if run.finished and not run.last_step:
            raise ValueError("its summary says that it finished, and metrics.jsonl is missing or empty")
        steps = run.config.get("trainer.max_steps")  # of a run that a callback ended, `finished` is false
        if run.finished and isinstance(steps, int) and run.last_step < steps:
            raise ValueError(
                f"its summary says that it finished, and metrics.jsonl ends at step {run.last_step} of {steps}"
            )
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())[:300]
        raise ConfigError(Problem(str(folder), f"cannot be read as a run: config.yaml is no YAML ({why})")) from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:  # of a damaged record or summary
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(Problem(str(folder), f"cannot be read as a run: {why}")) from error
    try:
        run.typed = Config.model_validate(tree)
        run.config = flatten(run.typed.model_dump(mode="json"))
    except ValidationError:  # of another version: its own words are all there is to compare by
        pass
    return run


def _whole_config(text: str) -> dict[str, Any]:
    """Return what `config.yaml` holds; the rest of one that was cut off is YAML, too, and another recipe.

    Raises:
        ValueError: it is no mapping, or lacks what every run has written.
    """
    tree = yaml.load(text, Loader)
    if not isinstance(tree, dict):
        raise ValueError("config.yaml holds no mapping")
    if lacking := [key for key in WRITTEN if key not in tree]:
        raise ValueError(f"config.yaml lacks {', '.join(lacking)}, so it was cut off or changed")
    return tree


def _read_metrics(run: Run, path: Path) -> None:
    seconds = 0.0
    for record in read_records(path) if path.exists() else ():
        step = record["step"]
        losses = {key: value for key, value in record.items() if key.startswith("val_loss")}
        if losses:
            for key, value in losses.items():
                if float(value) < 0:
                    raise ValueError(f"metrics.jsonl has {key} = {value} at step {step}; no cross-entropy is below 0")
                run.validations.setdefault(key, {})[step] = float(value)
            run.tokens[step] = record.get("tokens", 0)
            run.train_seconds[step] = seconds
            continue
        run.spikes += record.get("event", STRAGGLER) != STRAGGLER
        if record.get("event_action") == "stop":  # its update was not made
            run.stopping_event = record["event"]
            continue
        seconds += record.get("step_seconds", 0.0)
        run.first_step, run.last_step = run.first_step or step, step
        run.skipped_steps += bool(record.get("skipped"))
        run.skipped_in_a_row = run.skipped_in_a_row + 1 if record.get("skipped") else 0
        if not record.get("skipped"):  # what was left out did not reach the weights
            run.last_loss = float(record.get("loss", math.nan))


def _read_evaluations(run: Run) -> None:
    step_tokens: list[Any] = [run.config.get(f"data.{key}") for key in ("global_batch_size", "sequence_length")]
    for step, metrics in read_evaluations(run.folder).items():
        for name, each in metrics.items():
            key = f"{PREFIX}{name}"
            run.validations.setdefault(key, {})[step] = each["value"]
            run.evaluated_on[key] = str(each.get("of", ""))  # the newest step's
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
