"""The verb `evaluate`: validation losses and lm-eval tasks of weights that are there, kept with their run."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_llm.config.workspace import default_outputs
from lightning_llm.data.corpus import Corpus, open_corpus
from lightning_llm.evaluate.members import COMBINATIONS, Combine, Ensemble, average_weights
from lightning_llm.evaluate.request import Request, request_of
from lightning_llm.evaluate.validation import TrainedModel, validation_losses
from lightning_llm.evaluate.weights import decoder_of, tokenizer_of
from lightning_llm.probe.subject import Subject, read_weights
from lightning_llm.record.evaluations import Metrics, record_evaluation
from lightning_llm.record.files import write_json
from lightning_llm.record.state import state_of


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure, print, and write the results into the run's folder; return 0."""
    request = request_of(arguments)
    config = request.subjects[0].config
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    corpus = None
    if request.validates:
        corpus = open_corpus(
            config.data, config.seed, config.model.vocab_size, config.trainer.max_steps, progress=sys.stderr.isatty()
        )
    weights = _weights(request)
    combinations = COMBINATIONS if request.how == "ensemble" else COMBINATIONS[:1]
    found = {combine: _measured(request, weights, corpus, combine, arguments) for combine in combinations}
    file = _write(request, found, arguments.output)
    if arguments.json:
        print(json.dumps(_facts(request, found, file), indent=1))
    else:
        several = request.how == "ensemble"
        _print({f"mean of {combine}" if several else "value": its for combine, its in found.items()})
    print(f"written    {file}", file=sys.stderr)
    return 0


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
    arguments: argparse.Namespace,
) -> Metrics:
    first, device, found = request.subjects[0], request.device, Metrics()
    if corpus is not None:
        models = [TrainedModel.of(subject, its, device) for subject, its in weights]
        losses = validation_losses(models, first, corpus, device, combine, _progress("validation"))
        of = f"validation data {corpus.validation_fingerprint}"
        found |= {name: {"value": value, "higher_is_better": False, "of": of} for name, value in losses.items()}
    if request.tasks is not None:
        from lightning_llm.evaluate.harness import OwnModel

        decoders = [decoder_of(subject, its, device, arguments.compute_dtype or "") for subject, its in weights]
        model = OwnModel(Ensemble.of(decoders, combine), tokenizer_of(first), device, arguments.batch_size)
        limit = "all samples" if arguments.limit is None else f"the first {arguments.limit} samples"
        for name, each in request.tasks.results(model, arguments.limit).items():
            found[name] = {**each, "of": f"version {each['version']}, {limit}"}
    return found


def _write(request: Request, found: Mapping[Combine, Metrics], output: Path | None) -> Path:
    """Write the results where they belong, with the run or, of several models, to a file; return the file."""
    first = request.subjects[0]
    if not request.how and first.checkpoint is not None and output is None:
        file = record_evaluation(
            first.folder, first.checkpoint.step, found["probabilities"], state_of(first.folder) != "running"
        )
        from lightning_llm.record.mlflow.evaluations import track_evaluations

        if problem := track_evaluations(first.config, first.folder):
            print(f"not in MLflow ({problem}); later: lightning-llm sync {first.folder}", file=sys.stderr)
        return file
    name = "-".join([*([request.how] if request.how else []), *(subject.name for subject in request.subjects)])[:200]
    file = Path(output or Path(default_outputs(), "evaluate", f"{name}.json")).expanduser().absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, _about(request) | {"metrics": _by_combination(request, found)})
    return file


def _about(request: Request) -> dict[str, Any]:
    first = request.subjects[0].checkpoint
    members = [
        str(subject.folder if subject.checkpoint is None else subject.checkpoint.folder) for subject in request.subjects
    ]
    return {"of": request.how or "model", "members": members, "step": None if first is None else first.step}


def _by_combination(request: Request, found: Mapping[Combine, Any]) -> Any:
    """Return the metrics; of an ensemble by "probabilities" and "logits"."""
    return dict(found) if request.how == "ensemble" else found["probabilities"]


def _facts(request: Request, found: Mapping[Combine, Metrics], file: Path) -> dict[str, Any]:
    values = {combine: {name: each["value"] for name, each in its.items()} for combine, its in found.items()}
    return _about(request) | {"file": str(file), "metrics": _by_combination(request, values)}


def _progress(title: str) -> Callable[[int, int], None]:
    def show(done: int, of: int) -> None:
        if sys.stderr.isatty():
            text = f"{title}: {done} of {of} batches" if done < of else ""
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    return show


def _print(found: Mapping[str, Metrics]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("metric")
    for name in found:
        table.add_column(name, justify="right")
    table.add_column("standard error", justify="right")
    for metric, each in next(iter(found.values())).items():
        error = each.get("stderr")
        values = [f"{its[metric]['value']:.4f}" for its in found.values()]
        table.add_row(metric, *values, "" if error is None else f"{error:.4f}")
    Console().print(table)
