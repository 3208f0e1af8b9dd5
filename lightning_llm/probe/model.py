"""The model of the verb `probe`: weights of a run, checkpoint or Hugging Face folder under one recipe; its batches."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema import Config, ModelConfig, PrecisionConfig
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.opening import open_corpus
from lightning_llm.linalg.tensors import DTYPES
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.model.weights.load import whole_decoder
from lightning_llm.plan.check import check_config
from lightning_llm.precision.linear.swap import sum_in_fp32, swap_linears
from lightning_llm.probe.passes import Passes
from lightning_llm.run.subject import Subject


class TokenBatch(NamedTuple):
    """One micro-batch, int64 [B, T] each; labels are -100 where there is no target, `document_ids` may be None."""

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor | None

    def to(self, device: torch.device) -> "TokenBatch":
        """Return the batch on `device`."""
        ids = self.document_ids
        return TokenBatch(self.tokens.to(device), self.labels.to(device), None if ids is None else ids.to(device))


def read_batches(subject: Subject, count: int) -> tuple[list[TokenBatch], str]:
    """Return (up to `count` micro-batches, their origin as text), evenly spread over the held-out sequences.

    Without held-out sequences they are training batches.
    """
    config = subject.config
    corpus: Corpus = open_corpus(config.data, config.seed, config.model.vocab_size, config.trainer.max_steps)
    if corpus.validation_sequences:
        held: list[Any] = list(corpus.validation_batches(config.data.micro_batch_size))
        chosen = [held[i * len(held) // count] for i in range(count)] if len(held) > count else held
        return [TokenBatch(b.tokens, b.labels, b.document_ids) for b in chosen], "held out"
    made = corpus.micro_batches(0, range(count))
    ids = made.document_ids
    batches = [TokenBatch(made.tokens[i], made.labels[i], None if ids is None else ids[i]) for i in range(count)]
    return batches, "the text itself"


def with_recipe(subject: Subject, recipe: PrecisionConfig | None) -> Config:
    """Return the subject's config with `recipe` (None: its own recipe), its casts emulated.

    Raises:
        ConfigError: the recipe quantizes nothing, or cannot be used for this model.
    """
    own = subject.config.precision
    if not (recipe or own).quantizes:
        which = f"'{recipe.name}' quantizes" if recipe else f"the run's own, '{own.name}', quantizes"
        text = f"{which} nothing, so there is nothing to probe. Use precision=NAME[,NAME...] or precision=all."
        raise ConfigError(Problem("precision", text))
    emulated = (recipe or own).model_copy(update={"backend": "emulated"})
    config = subject.config.model_copy(update={"precision": emulated})
    check_config(config)
    return config


class ProbedModel(Passes):
    """Passes of a `Decoder` with these weights, in which `recipe` quantizes the linear layers."""

    def __init__(
        self,
        shape: ModelConfig,
        weights: Mapping[str, Tensor],
        recipe: PrecisionConfig,
        batches: Sequence[TokenBatch],
        device: torch.device,
        seed: int,
    ):
        """Raise ConfigError if the recipe quantizes no layer, or its casts cannot be compiled as it demands.

        `shape`: the model's config; `weights`: {parameter: tensor}; `seed`: of random bits of casts.
        """
        sum_in_fp32()
        self.decoder = whole_decoder(
            shape,
            weights,
            DTYPES[recipe.compute_dtype],
            device=device,
            swap=lambda empty: swap_linears(empty, recipe, shape.num_layers, device.type),
        )
        super().__init__(self.decoder, recipe, shape.num_layers, [batch.to(device) for batch in batches], seed)
        self.targets = sum(int((batch.labels != -100).sum()) for batch in self.batches)

    def loss(self, batch: TokenBatch) -> Tensor:
        """Return the sum of the losses of a batch over the number of targets of all batches."""
        logits = self.decoder(batch.tokens, document_ids=batch.document_ids)  # [B, T, V]
        z_loss = self.decoder.config.output_z_loss or 0.0
        return next_token_loss_sum(logits, batch.labels, z_loss) / self.targets

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Context in which the decoder computes in fp32 (its weights are fp32 anyway)."""
        compute_dtype, self.decoder.compute_dtype = self.decoder.compute_dtype, torch.float32
        try:
            yield
        finally:
            self.decoder.compute_dtype = compute_dtype
