"""The validation loss of weights that are there, on the batches and through the forward pass of the run itself."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_llm.config.schema import PrecisionConfig
from lightning_llm.data.corpus import IGNORED, Corpus, ValidationBatch
from lightning_llm.evaluate.members import Combine, Ensemble
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.apply import DTYPES
from lightning_llm.parallel.context import SequenceSharder
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.vocabulary import loss_sum_of
from lightning_llm.plan.degrees import resolve_degrees
from lightning_llm.probe.subject import Subject, delayed_state
from lightning_llm.train.parallel_model import ParallelModel
from lightning_llm.train.quantisation import Quantisation
from lightning_llm.train.validation import Validation


@dataclass(frozen=True)
class TrainedModel:
    """A decoder under its recipe, casts emulated, as it was after `step` steps."""

    model: Decoder
    quantisation: Quantisation
    step: int

    @classmethod
    def of(cls, subject: Subject, weights: Mapping[str, Tensor], device: torch.device) -> "TrainedModel":
        """Return the model of `subject` with fp32 `weights` by name; delayed scales are the checkpoint's."""
        config = subject.config
        recipe = config.precision.model_copy(update={"backend": "emulated"})
        with torch.device("meta"):
            model = Decoder(config.model, DTYPES[recipe.compute_dtype])
        quantisation = Quantisation(recipe, config.seed, config.trainer.max_steps)
        quantisation.swap(model, config.model.num_layers, device.type)
        master = DTYPES[recipe.master_dtype]
        model.load_state_dict({name: tensor.to(device, master) for name, tensor in weights.items()}, assign=True)
        step = subject.checkpoint.step if subject.checkpoint else 0
        quantisation.begin_step(model, max(0, step - 1))  # a run validates in the phase of the step that it made
        scales = {
            f"{layer}.{key}": value for layer, its in delayed_state(subject).items() for key, value in its.items()
        }
        quantisation.load_state(model, {name: tensor.to(device) for name, tensor in scales.items()})
        return cls(model.eval().requires_grad_(False), quantisation, step)


class Recipes:
    """What `Validation` asks of a recipe, for several models with each its own."""

    def __init__(self, models: Sequence[TrainedModel]):
        self.models = models
        self.changes_forward = any(each.quantisation.changes_forward for each in models)
        quantised = [each.quantisation.recipe for each in models if each.quantisation.recipe.quantises]
        self.recipe: PrecisionConfig = (quantised or [models[0].quantisation.recipe])[0]

    def begin_validation_batch(self, model: nn.Module, step: int, index: int) -> None:
        """Key each model's random bits as its run does."""
        for each in self.models:
            each.quantisation.begin_validation_batch(each.model, each.step, index)

    @contextmanager
    def high_precision(self, model: nn.Module) -> Iterator[None]:
        """Run all of them without any cast."""
        with ExitStack() as stack:
            for each in self.models:
                stack.enter_context(each.quantisation.high_precision(each.model))
            yield


@torch.no_grad()
def validation_losses(
    models: Sequence[TrainedModel],
    subject: Subject,
    corpus: Corpus,
    device: torch.device,
    combine: Combine = "probabilities",
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, float]:
    """Return the mean losses in nats per token as a run records them ("val_loss", "val_loss/SOURCE", ...).

    And of `val_loss`, per byte of text: "bits_per_byte" and "byte_perplexity", also per source. The end of a document
    has no bytes, and its loss counts.
    """
    layout = Layout(subject.config.parallel, resolve_degrees(subject.config.parallel, 1))
    several: Any = Recipes(models)  # in the place of one model's
    whole: Any = Ensemble.of([each.model for each in models], combine)
    parallel = ParallelModel(whole, layout, [], None, SequenceSharder(layout), loss_sum_of(layout), several)
    watched = subject.config.data.watched
    validation = Validation(parallel, corpus.names, watched, device)
    validation.begin()
    batches = list(corpus.validation_batches(subject.config.data.micro_batch_size))
    for index, batch in enumerate(batches):
        validation.add(_on(batch, device), index, models[0].step)
        progress(index + 1, len(batches))
    losses: dict[str, float] = validation.finish()
    return losses | _per_byte(losses, batches, corpus, watched)


def _on(batch: ValidationBatch, device: torch.device) -> ValidationBatch:
    ids = batch.document_ids
    return replace(
        batch,
        tokens=batch.tokens.to(device),
        labels=batch.labels.to(device),
        document_ids=None if ids is None else ids.to(device),
        sources=batch.sources.to(device),
    )


def _per_byte(
    losses: Mapping[str, float], batches: Sequence[ValidationBatch], corpus: Corpus, watched: Collection[str]
) -> dict[str, float]:
    """Return the losses per byte of text; the one over sources is of those that `losses["val_loss"]` is of."""
    sizes = corpus.tokenizer.token_bytes()  # [vocab_size]
    counts = np.zeros((len(corpus.names), 2), np.int64)  # of tokens and of bytes, by source
    for batch in batches:
        for source in range(len(corpus.names)):
            labels = batch.labels[batch.sources == source].numpy()
            labels = labels[labels != IGNORED]
            counts[source] += len(labels), sizes[labels].sum()
    trained = counts[[name not in watched for name in corpus.names]].sum(0)
    found = {}
    for suffix, (tokens, size) in {
        "": trained if trained[0] else counts.sum(0),
        **dict(zip(map("/{}".format, corpus.names), counts, strict=True)),
    }.items():
        if size and f"val_loss{suffix}" in losses:
            nats = losses[f"val_loss{suffix}"] * tokens / size
            found[f"bits_per_byte{suffix}"] = float(nats / math.log(2))
            found[f"byte_perplexity{suffix}"] = float(np.exp(nats))
    return found
