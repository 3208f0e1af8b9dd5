"""Validation losses of trained weights, with the validation batches and the forward pass of the run itself.

For an ensemble also its gain over its members, with an interval over the scored sequences.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from lightning_llm.config.schema import PrecisionConfig
from lightning_llm.data.corpus import Corpus
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.ensemble import COMBINATIONS, Combine, Ensemble
from lightning_llm.model.loss import IGNORED_LABEL
from lightning_llm.parallel.apply import InitialSlice
from lightning_llm.parallel.layout import Layout
from lightning_llm.run.subject import Subject, delayed_state
from lightning_llm.tracking.evaluations import Metrics
from lightning_llm.train.parallel_model import ParallelModel
from lightning_llm.train.quantization import Quantization
from lightning_llm.train.validation import VIEWS, Validation

CONFIDENCE = 0.95


@dataclass(frozen=True)
class TrainedModel:
    """This rank's part of a decoder after `step` steps, under its precision recipe with emulated casts."""

    parallel: ParallelModel
    step: int

    @property
    def model(self) -> Decoder:
        """The decoder, or this rank's part of it."""
        return self.parallel.model

    @property
    def quantization(self) -> Quantization:
        """The object that applies the model's precision recipe."""
        return self.parallel.quantization

    @classmethod
    def from_subject(
        cls, subject: Subject, initial: InitialSlice, layout: Layout, device: torch.device
    ) -> "TrainedModel":
        """Return the model of `subject` with weights from `initial` and delayed scales from the checkpoint. Collective.

        `layout`: how ranks share the model.
        """
        recipe = subject.config.precision.model_copy(update={"backend": "emulated"})
        config = subject.config.model_copy(update={"precision": recipe})
        quantization = Quantization(recipe, config.seed, config.trainer.max_steps)
        parallel = ParallelModel.build(config, layout, device, quantization, initial)
        parallel.model.eval()
        step = subject.checkpoint.step if subject.checkpoint else 0
        quantization.begin_step(parallel.model, max(0, step - 1))  # a run validates in the phase of the step it made
        scales = {
            f"{layer}.{key}": value for layer, its in delayed_state(subject).items() for key, value in its.items()
        }
        quantization.load_state(parallel.model, {name: tensor.to(device) for name, tensor in scales.items()})
        return cls(parallel, step)


class Recipes:
    """Stand-in for `Quantization` in `Validation`, for several models that each have their own `Quantization`."""

    def __init__(self, models: Sequence[TrainedModel]):
        self.models = models
        self.changes_forward = any(each.quantization.changes_forward for each in models)
        quantized = [each.quantization.recipe for each in models if each.quantization.recipe.quantizes]
        self.recipe: PrecisionConfig = (quantized or [models[0].quantization.recipe])[0]

    def begin_validation_batch(self, model: nn.Module, step: int, index: int, at_once: Sequence[int] = ()) -> None:
        """Set the key of each model's random bits as in that model's own training run.

        `at_once`: see `Quantization.begin_micro_batch`.
        """
        for each in self.models:
            each.quantization.begin_validation_batch(each.model, each.step, index, at_once)

    @contextmanager
    def high_precision(self, model: nn.Module) -> Iterator[None]:
        """Context in which all models run unquantized."""
        with ExitStack() as stack:
            for each in self.models:
                stack.enter_context(each.quantization.high_precision(each.model))
            yield


@torch.no_grad()
def validation_losses(
    models: Sequence[TrainedModel],
    subject: Subject,
    corpus: Corpus,
    device: torch.device,
    combine: Combine = "probabilities",
    progress: Callable[[int, int], None] = lambda done, of: None,
    errors: dict[str, float] | None = None,
) -> dict[str, float]:
    """Return the mean losses in nats per token as a run records them ("val_loss", "val_loss/SOURCE", ...).

    And of `val_loss`, per byte of text: "bits_per_byte" and "byte_perplexity", also per source; left out where the
    bytes are unknown, see `Corpus.validation_text`. The loss of a document's end counts. The same on every rank of the
    model's layout; several models lie in this process each. Collective. `errors` receives the standard errors of the
    losses in one process, see `standard_errors`.
    """
    parallel = models[0].parallel
    if len(models) > 1:
        ensemble = Ensemble.from_members([each.model for each in models], combine)
        parallel = ParallelModel.in_this_process(ensemble, Recipes(models))
    layout, watched = parallel.layout, subject.config.data.watched
    validation = Validation(parallel, corpus.names, watched, device)
    validation.begin()
    size = subject.config.data.micro_batch_size
    batches = list(corpus.validation_batches(size, layout.dp_rank, layout.degrees.dp))
    totals = [validation.sums.clone()]
    for index, batch in enumerate(batches):
        validation.add(batch.to(device), index, models[0].step)
        totals.append(validation.sums.clone())
        progress(index + 1, len(batches))
    losses: dict[str, float] = validation.finish()
    if errors is not None and layout.mesh is None:
        errors |= standard_errors(torch.stack(totals).diff(dim=0).cpu(), corpus.names, watched)
    return losses | _per_byte(losses, corpus.validation_text(), watched)


def losses_as_metrics(losses: Mapping[str, float], errors: Mapping[str, float], corpus: Corpus) -> Metrics:
    """Return losses as entries of an evaluation, with the identity of their data and their standard `errors`."""
    found = Metrics()
    for name, value in losses.items():
        source = name.partition("/")[2]  # "val_loss/prose" and its like are of one source
        scored = corpus.source_fingerprints[source] if source else corpus.validation_fingerprint
        found[name] = {"value": value, "higher_is_better": False, "of": f"validation data {scored}"}
        found[name] |= {"stderr": errors[name]} if name in errors else {}
    return found


def standard_errors(parts: Tensor, names: Sequence[str], watched: Collection[str]) -> dict[str, float]:
    """Return the standard error of each loss, nats per token, with each batch as one draw of text.

    `parts`: sums of losses and counts of tokens by batch, view and source, fp64 [batches, views, sources, 2]. A loss is
    a ratio r of two sums; its variance is n / (n - 1) sum (l - r c)^2 / (sum c)^2 over the n batches with tokens (W. G.
    Cochran, Sampling Techniques, 1977, 6.4). Losses of fewer than two batches have none.
    """
    trained = torch.tensor([name not in watched for name in names])
    found: dict[str, float] = {}
    for place, view in enumerate(VIEWS):
        own = parts[:, place]  # [batches, sources, 2]
        averaged = own[:, trained] if own[:, trained, 1].sum() else own
        columns = {view: averaged.sum(1), **{f"{view}/{name}": own[:, i] for i, name in enumerate(names)}}
        for key, column in columns.items():
            losses, counts = column[column[:, 1] > 0].T  # [batches] each
            if (number := len(counts)) > 1:
                residuals = losses - losses.sum() / counts.sum() * counts
                found[key] = math.sqrt(number / (number - 1) * float(residuals.square().sum())) / float(counts.sum())
    return found


def _per_byte(
    losses: Mapping[str, float], text: Mapping[str, tuple[int, int | None]], watched: Collection[str]
) -> dict[str, float]:
    """Return the losses per byte of text, without those of unknown bytes; `text`: see `Corpus.validation_text`.

    The one over sources is of those that `losses["val_loss"]` is of.
    """
    trained = [its for name, its in text.items() if name not in watched]
    scored = [its for its in trained if its[0]] or [its for its in text.values() if its[0]]
    found = {}
    for suffix, parts in {"": scored, **{f"/{name}": [its] for name, its in text.items()}}.items():
        size = sum(size for _, size in parts if size is not None)
        if all(known is not None for _, known in parts) and size and f"val_loss{suffix}" in losses:
            nats = losses[f"val_loss{suffix}"] * sum(tokens for tokens, _ in parts) / size
            found[f"bits_per_byte{suffix}"] = nats / math.log(2)
            found[f"byte_perplexity{suffix}"] = float(np.exp(nats))  # infinite, where math.exp raises
    return found


@dataclass(frozen=True)
class Gap:
    """Difference of `val_loss` with its 95 % interval [`low`, `high`], nats per token; below 0: the ensemble is better.

    The interval is about these models on other text of this kind: each sequence is one draw. It does not extend to
    other members.
    """

    gap: float
    low: float
    high: float

    @classmethod
    def from_differences(cls, differences: np.ndarray, tokens: np.ndarray) -> "Gap":
        """Return the gap from each sequence's sum of loss differences and its number of target tokens, [sequences].

        A ratio of sums; its variance is that of the residuals (W. G. Cochran, Sampling Techniques, 1977, section 2.11).
        """
        gap, count = differences.sum() / tokens.sum(), len(tokens)
        if count < 2:
            return cls(float(gap), -math.inf, math.inf)
        spread = math.sqrt(count / (count - 1) * ((differences - gap * tokens) ** 2).sum()) / tokens.sum()
        half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * spread
        return cls(float(gap), float(gap - half), float(gap + half))


@dataclass(frozen=True)
class EnsembleGain:
    """Gain in loss of an ensemble over its members.

    `members`: `val_loss` of each member. `to_best`, `to_mean`: {combination: the ensemble's loss minus that of the best
    member, or minus the members' mean loss}; the combination is the mean of "probabilities" or of "logits".
    """

    members: list[float]
    to_best: dict[Combine, Gap]
    to_mean: dict[Combine, Gap]

    def as_data(self) -> dict[str, Any]:
        """Return the gain as JSON data."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "EnsembleGain":
        """Return the gain that `as_data` wrote."""
        gaps = {key: {name: Gap(**each) for name, each in data[key].items()} for key in ("to_best", "to_mean")}
        return cls(data["members"], gaps["to_best"], gaps["to_mean"])

    def lines(self) -> list[str]:
        """Return the gain as lines of text for a terminal."""
        best = min(self.members)
        found = ["val_loss of each alone: " + ", ".join(f"{loss:.4f}" for loss in self.members)]
        for combine, gap in self.to_best.items():
            mean = self.to_mean[combine]
            found.append(
                f"mean of {combine}: {gap.gap:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}] against the best ({best:.4f}), "
                f"{mean.gap:+.4f} [{mean.low:+.4f}, {mean.high:+.4f}] against the mean of the members"
            )
        return [*found, f"(intervals at {CONFIDENCE:.0%} over the sequences scored, not over members)"]


@torch.no_grad()
def ensemble_gain(
    models: Sequence[TrainedModel],
    corpus: Corpus,
    watched: Collection[str],
    batch_size: int,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> EnsembleGain:
    """Return how much lower the loss of the ensemble of `models` is, on the sequences that `val_loss` scores.

    `watched`: names of sources that are only validated, which `val_loss` leaves out.
    """
    recipes, losses, tokens = Recipes(models), [], []
    trained = torch.tensor([name not in watched for name in corpus.names])
    batches = list(corpus.validation_batches(batch_size))
    for index, batch in enumerate(batches):
        recipes.begin_validation_batch(models[0].model, models[0].step, index)
        here = batch.to(device)
        logits = [each.model(here.tokens, None, here.document_ids) for each in models]
        labels = here.labels.masked_fill(~trained.to(device)[here.sources][:, None], IGNORED_LABEL)  # [B, T]
        losses.append(_sums([each[..., : models[0].model.config.vocab_size] for each in logits], labels))
        tokens.append((labels != IGNORED_LABEL).sum(-1))
        progress(index + 1, len(batches))
    counts = torch.cat(tokens).double().cpu().numpy()  # [sequences]
    sums = torch.cat(losses, dim=1).cpu().numpy()[:, counts > 0]  # [members + combinations, sequences]
    counts = counts[counts > 0]
    members, combined = sums[: len(models)], dict(zip(COMBINATIONS, sums[len(models) :], strict=True))
    alone = members.sum(1) / counts.sum()
    best, mean = members[alone.argmin()], members.mean(0)
    return EnsembleGain(
        alone.tolist(),
        {combine: Gap.from_differences(each - best, counts) for combine, each in combined.items()},
        {combine: Gap.from_differences(each - mean, counts) for combine, each in combined.items()},
    )


def _sums(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Return the sums over each sequence of the losses of each model and of each combination, [M + 2, B], fp64."""

    def of(each: Tensor) -> Tensor:  # [B]
        chosen = F.cross_entropy(each.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
        return chosen.view_as(labels)  # [B, T]

    alone = torch.stack([of(each.float()) for each in logits])  # [M, B, T]
    probabilities = math.log(len(logits)) - torch.logsumexp(-alone, dim=0)  # [B, T]
    together = of(torch.stack([each.float() for each in logits]).mean(0))
    both = torch.stack([probabilities.masked_fill(labels == IGNORED_LABEL, 0.0), together])
    return torch.cat([alone, both]).double().sum(-1)
