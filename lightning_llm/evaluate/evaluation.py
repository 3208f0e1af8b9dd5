"""Evaluation of trained weights: losses and tasks of one model, an average or an ensemble, and their record."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_llm.base.errors import ConfigError
from lightning_llm.base.terminal import show_progress
from lightning_llm.config.workspace import default_outputs
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.opening import open_corpus
from lightning_llm.evaluate.request import EvaluationRequest
from lightning_llm.evaluate.validation import (
    EnsembleGain,
    TrainedModel,
    ensemble_gain,
    losses_as_metrics,
    validation_losses,
)
from lightning_llm.evaluate.weights import AverageWeights, decoder_of, sharded_decoder_of, tokenizer_of
from lightning_llm.model.ensemble import COMBINATIONS, Combine, Ensemble
from lightning_llm.model.weights.load import InitialWeights, whole_state
from lightning_llm.parallel.apply import InitialSlice
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.process_group import leave_process_group
from lightning_llm.run.inputs import agree_on_inputs
from lightning_llm.run.launch.environment import is_first_rank
from lightning_llm.run.opening import choose_device
from lightning_llm.run.subject import Subject, verified_weights
from lightning_llm.tracking.evaluations import Metrics, record_evaluation
from lightning_llm.tracking.files import write_json
from lightning_llm.tracking.run_state import state_of

AS_CODES = re.compile(r"^as_\w+?/")
"""Prefix of the metrics of a model whose weights were rounded to a format, as in "as_nvfp4/val_loss"."""


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation, and the `file` that contains them.

    `how`: combination of several `members` ("average", "ensemble"), "" for one model. `step`: optimizer steps of the
    first member's training, None if unknown. `by_combination`: {combination: {metric: its "value" and "of", the data}};
    the combination is "probabilities" or "logits" (what an ensemble averages), for one model only the first. `gain`:
    gain in loss of an ensemble over its members, None without one.
    """

    how: str
    members: list[str]
    step: int | None
    by_combination: Mapping[Combine, Metrics] = field(repr=False)
    file: Path = Path()
    gain: EnsembleGain | None = None

    @property
    def metrics(self) -> Metrics:
        """The metrics; of an ensemble those of the mean of probabilities."""
        return self.by_combination["probabilities"]

    @property
    def values(self) -> dict[str, float]:
        """The metrics' values by name."""
        return {name: each["value"] for name, each in self.metrics.items()}

    def about(self) -> dict[str, Any]:
        """Return the subject of the metrics as JSON data."""
        return {"of": self.how or "model", "members": self.members, "step": self.step}

    def as_data(self) -> dict[str, Any]:
        """Return the data that --json prints."""
        several = {combine: _with_nulls(its) for combine, its in self.by_combination.items()}
        gain = {"gain": self.gain.as_data()} if self.gain else {}
        metrics = several if self.how == "ensemble" else _with_nulls(self.metrics)
        return self.about() | {"file": str(self.file), "metrics": metrics} | gain

    def as_json(self) -> dict[str, Any]:
        """Return all of it, for another process; see `from_json`."""
        return {**asdict(self), "file": str(self.file)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Evaluation":
        """Return the evaluation described by `as_json`."""
        gain = data.get("gain")
        return cls(**{**data, "file": Path(data["file"]), "gain": EnsembleGain.from_data(gain) if gain else None})


def _with_nulls(metrics: Metrics) -> dict[str, float | None]:
    """Return the metrics' values by name, and null for a loss per byte that is unknown."""
    suffixes = [name.removeprefix("val_loss") for name in metrics if name.partition("/")[0] == "val_loss"]
    per_byte = [f"{name}{suffix}" for suffix in suffixes for name in ("bits_per_byte", "byte_perplexity")]
    return {**dict.fromkeys(per_byte), **{name: each["value"] for name, each in metrics.items()}}


def _note_unknown_bytes(corpus: Corpus) -> None:
    """Print the sources without a known size of text, which have no loss per byte."""
    unknown = [name for name, (tokens, size) in corpus.validation_text().items() if tokens and size is None]
    if unknown:
        text = (
            f"note   no bits_per_byte and byte_perplexity: the bytes of {', '.join(unknown)} are unknown. It was "
            "tokenized elsewhere, or by an earlier release (then delete its token cache in data.cache_dir)"
        )
        print(text, file=sys.stderr)


def evaluate_models(request: EvaluationRequest, output: Path | None) -> Evaluation:
    """Run the evaluation, write its results, and return them.

    Results go to the run's folder, or to the file `output`. If ranks share the model, each computes its part, and rank
    0 collects and writes the results.

    Raises:
        ConfigError: weights or data cannot be read, or differ between ranks.
    """
    first = request.subjects[0]
    config, threads = first.config, torch.get_num_threads()
    try:
        if config.trainer.threads:
            torch.set_num_threads(config.trainer.threads)
        with _ranks_joined(request) as (layout, device):
            corpus, weights = _agreed_inputs(request, layout)
            if corpus is not None and is_first_rank():
                _note_unknown_bytes(corpus)
            combinations = COMBINATIONS if request.how == "ensemble" else COMBINATIONS[:1]
            found = {
                combine: _named(
                    request,
                    _losses(weights, corpus, layout, device, combine)
                    | _task_results(request, weights, layout, device, combine),
                )
                for combine in combinations
            }
            gain = _gain(weights, corpus, layout, device) if request.how == "ensemble" else None
    finally:
        torch.set_num_threads(threads)  # the caller continues
    done = Evaluation(request.how, request.members, first.step, found, gain=gain)
    return replace(done, file=_write(request, done, output)) if is_first_rank() else done


@contextmanager
def _ranks_joined(request: EvaluationRequest) -> Iterator[tuple[Layout, torch.device]]:
    """Yield this rank's layout and device; a group that was joined for it is left when all has gone well.

    After a failure the other ranks see a lost peer, and the launcher reports the first failure.
    """
    config, degrees = request.subjects[0].config, request.degrees
    device = request.device if degrees.world == 1 else choose_device(config)
    was_joined = dist.is_initialized()
    alone = degrees.world == 1 and config.parallel.zero_stage == 0  # even if this process is in a group
    layout = Layout(config.parallel, degrees) if alone else Layout.joined(config.parallel, degrees, device)
    failed = True
    try:
        yield layout, device
        failed = False
    finally:
        if not was_joined and not (failed and degrees.world > 1):
            leave_process_group()


Parts = list[tuple[Subject, InitialSlice]]
"""The models to run: (subject, function that returns slices of its weights)."""


def _agreed_inputs(request: EvaluationRequest, layout: Layout) -> tuple[Corpus | None, Parts]:
    """Return the data to validate on and the weights, the same on every rank. Collective."""
    config = request.subjects[0].config
    corpus, weights, refusal = None, Parts(), None
    names = {"the weights": "\n".join(request.members)}
    try:
        if request.validates:
            corpus = open_corpus(
                config.data,
                config.seed,
                config.model.vocab_size,
                config.trainer.max_steps,
                progress=sys.stderr.isatty() and is_first_rank(),
            )
            names["the data"] = corpus.validation_fingerprint
        weights = [(each, InitialWeights(verified_weights(each), each.config.model)) for each in request.subjects]
    except ConfigError as error:
        refusal = error
    if layout.mesh is not None:
        agree_on_inputs(names, refusal)
    elif refusal is not None:
        raise refusal
    if request.how == "average":
        return corpus, [(request.subjects[0], AverageWeights([initial for _, initial in weights]))]
    return corpus, weights


def _losses(weights: Parts, corpus: Corpus | None, layout: Layout, device: torch.device, combine: Combine) -> Metrics:
    """Return the validation losses; the models are gone when this returns, and tasks have their memory."""
    if corpus is None:
        return {}
    models = [TrainedModel.from_subject(subject, initial, layout, device) for subject, initial in weights]
    errors: dict[str, float] = {}
    losses = validation_losses(models, weights[0][0], corpus, device, combine, _progress("validation"), errors)
    return losses_as_metrics(losses, errors, corpus)


def _named(request: EvaluationRequest, metrics: Metrics) -> Metrics:
    """Return `metrics` with the prefix `AS_CODES` if weights are read as codes."""
    return {f"as_{request.codes}/{name}": each for name, each in metrics.items()} if request.codes else metrics


def _gain(weights: Parts, corpus: Corpus | None, layout: Layout, device: torch.device) -> EnsembleGain | None:
    if corpus is None:
        return None
    models = [TrainedModel.from_subject(subject, initial, layout, device) for subject, initial in weights]
    data = weights[0][0].config.data
    return ensemble_gain(models, corpus, data.watched, data.micro_batch_size, device, _progress("each sequence"))


def _task_results(
    request: EvaluationRequest, weights: Parts, layout: Layout, device: torch.device, combine: Combine
) -> Metrics:
    if request.tasks is None:
        return {}
    from lightning_llm.evaluate.harness import OwnModel
    from lightning_llm.evaluate.task_settings import model_defaults

    dtype = request.compute_dtype or ""
    if layout.mesh is None:
        states = [(subject, whole_state(initial, subject.config.model)) for subject, initial in weights]
        decoders = [decoder_of(subject, state, device, dtype) for subject, state in states]
        model: Any = Ensemble.from_members(decoders, combine)
    else:
        ((subject, initial),) = weights
        model = sharded_decoder_of(subject, initial, layout, device, dtype)
    first = request.subjects[0]
    defaults, ignored = model_defaults(first.folder)
    for note in ignored if is_first_rank() else ():
        print(f"note   {note}", file=sys.stderr)
    own = OwnModel(model, tokenizer_of(first), device, request.batch_size, first.weights.end_tokens, defaults)
    return request.tasks.metrics(own, request.limit)


def _write(request: EvaluationRequest, done: Evaluation, output: Path | None) -> Path:
    """Write the results to the run's folder or, for several models, to a file; return the file."""
    first = request.subjects[0]
    if not request.how and first.checkpoint is not None and output is None:
        unknown = [name for name, value in _with_nulls(done.metrics).items() if value is None]
        ended = state_of(first.folder) != "running"
        file = record_evaluation(first.folder, first.checkpoint.step, done.metrics, ended, unknown, request.digest)
        from lightning_llm.tracking.mlflow.tracker import track_evaluations

        if problem := track_evaluations(first.config, first.folder):
            print(f"not in MLflow ({problem}); later: lightning-llm sync {first.folder}", file=sys.stderr)
        return file
    name = "-".join([*([request.how] if request.how else []), *(subject.name for subject in request.subjects)])[:200]
    file = Path(output or Path(default_outputs(), "evaluate", f"{name}.json")).expanduser().absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    metrics = dict(done.by_combination) if done.how == "ensemble" else done.metrics
    gain = {"gain": done.gain.as_data()} if done.gain else {}
    write_json(file, done.about() | {"metrics": metrics} | gain)
    return file


def _progress(title: str) -> Callable[[int, int], None]:
    if not is_first_rank():
        return lambda done, of: None
    return lambda done, of: show_progress(f"{title}: {done} of {of} batches" if done < of else "")
