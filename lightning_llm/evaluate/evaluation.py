"""Measuring weights that are there: losses and tasks of one model, of an average or of an ensemble, and the record."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_llm.config.workspace import default_outputs
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.opening import open_corpus
from lightning_llm.evaluate.members import COMBINATIONS, Combine, Ensemble, average_weights
from lightning_llm.evaluate.request import Request
from lightning_llm.evaluate.validation import TrainedModel, validation_losses
from lightning_llm.evaluate.weights import decoder_of, tokenizer_of
from lightning_llm.probe.subject import Subject, read_weights
from lightning_llm.record.evaluations import Metrics, record_evaluation
from lightning_llm.record.files import write_json
from lightning_llm.record.state import state_of


@dataclass(frozen=True)
class Evaluation:
    """What was measured of weights, and the `file` that it was written to.

    `how`: by what several `members` were made one ("average", "ensemble"), "" for one model. `step`: optimizer steps
    of the first one's training, None where nothing says so. `by_combination`: of an ensemble by "probabilities" and by
    "logits", else the first alone: by metric its "value" (of "val_loss" nats per token), and "of" what data it is.
    """

    how: str
    members: list[str]
    step: int | None
    by_combination: Mapping[Combine, Metrics] = field(repr=False)
    file: Path = Path()

    @property
    def metrics(self) -> Metrics:
        """The metrics; of an ensemble those of the mean of probabilities."""
        return self.by_combination["probabilities"]

    @property
    def values(self) -> dict[str, float]:
        """The metrics' values by name."""
        return {name: each["value"] for name, each in self.metrics.items()}

    def about(self) -> dict[str, Any]:
        """Return what the metrics are of."""
        return {"of": self.how or "model", "members": self.members, "step": self.step}

    def as_data(self) -> dict[str, Any]:
        """Return what --json prints."""
        several = {
            combine: {name: each["value"] for name, each in its.items()} for combine, its in self.by_combination.items()
        }
        return self.about() | {"file": str(self.file), "metrics": several if self.how == "ensemble" else self.values}


def evaluate_models(request: Request, output: Path | None) -> Evaluation:
    """Measure what is asked for and write it into the run's folder, or to the file `output`; return it.

    Raises:
        ConfigError: weights or data cannot be read.
    """
    first = request.subjects[0]
    config, threads = first.config, torch.get_num_threads()
    try:
        if config.trainer.threads:
            torch.set_num_threads(config.trainer.threads)
        corpus = None
        if request.validates:
            corpus = open_corpus(
                config.data,
                config.seed,
                config.model.vocab_size,
                config.trainer.max_steps,
                progress=sys.stderr.isatty(),
            )
        weights = _weights(request)
        combinations = COMBINATIONS if request.how == "ensemble" else COMBINATIONS[:1]
        found = {combine: _measured(request, weights, corpus, combine) for combine in combinations}
    finally:
        torch.set_num_threads(threads)  # whoever calls this goes on
    step = None if first.checkpoint is None else first.checkpoint.step
    done = Evaluation(request.how, request.members, step, found)
    return replace(done, file=_write(request, done, output))


def _weights(request: Request) -> list[tuple[Subject, Mapping[str, Tensor]]]:
    """Return the models to run: one with the mean of all weights, or each with its own."""
    if request.how == "average":
        return [(request.subjects[0], average_weights(request.subjects))]
    return [(subject, read_weights(subject)) for subject in request.subjects]


def _measured(
    request: Request,
    weights: list[tuple[Subject, Mapping[str, Tensor]]],
    corpus: Corpus | None,
    combine: Combine,
) -> Metrics:
    first, device, found = request.subjects[0], request.device, Metrics()
    if corpus is not None:
        models = [TrainedModel.of(subject, its, device) for subject, its in weights]
        losses = validation_losses(models, first, corpus, device, combine, _progress("validation"))
        of = f"validation data {corpus.validation_fingerprint}"
        found |= {name: {"value": value, "higher_is_better": False, "of": of} for name, value in losses.items()}
    if request.tasks is not None:
        from lightning_llm.evaluate.harness import OwnModel

        decoders = [decoder_of(subject, its, device, request.compute_dtype or "") for subject, its in weights]
        model = OwnModel(Ensemble.of(decoders, combine), tokenizer_of(first), device, request.batch_size)
        limit = "all samples" if request.limit is None else f"the first {request.limit} samples"
        for name, each in request.tasks.results(model, request.limit).items():
            found[name] = {**each, "of": f"version {each['version']}, {limit}"}
    return found


def _write(request: Request, done: Evaluation, output: Path | None) -> Path:
    """Write the results where they belong, with the run or, of several models, to a file; return the file."""
    first = request.subjects[0]
    if not request.how and first.checkpoint is not None and output is None:
        file = record_evaluation(first.folder, first.checkpoint.step, done.metrics, state_of(first.folder) != "running")
        from lightning_llm.record.mlflow.evaluations import track_evaluations

        if problem := track_evaluations(first.config, first.folder):
            print(f"not in MLflow ({problem}); later: lightning-llm sync {first.folder}", file=sys.stderr)
        return file
    name = "-".join([*([request.how] if request.how else []), *(subject.name for subject in request.subjects)])[:200]
    file = Path(output or Path(default_outputs(), "evaluate", f"{name}.json")).expanduser().absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    metrics = dict(done.by_combination) if done.how == "ensemble" else done.metrics
    write_json(file, done.about() | {"metrics": metrics})
    return file


def _progress(title: str) -> Callable[[int, int], None]:
    def show(done: int, of: int) -> None:
        if sys.stderr.isatty():
            text = f"{title}: {done} of {of} batches" if done < of else ""
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    return show
