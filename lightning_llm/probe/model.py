"""A subject's weights under one recipe: passes over the same batches with other slots or layers quantised."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.schema import Config, ModelConfig, PrecisionConfig
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.opening import open_corpus
from lightning_llm.model.dtypes import DTYPES
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.model.weights.load import whole_decoder
from lightning_llm.plan.check import check_config
from lightning_llm.precision.linear.delayed import load_delayed_state, update_delayed
from lightning_llm.precision.linear.module import QuantisedLinear, quantised_layers, set_recipe, set_step_key
from lightning_llm.precision.linear.plan import ROLES, SLOT_NAMES
from lightning_llm.precision.linear.swap import sum_in_fp32, swap_linears
from lightning_llm.run.subject import Subject


class TokenBatch(NamedTuple):
    """One micro-batch: int64 [B, T] each; labels -100 where there is no target; `document_ids` or None."""

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor | None

    def to(self, device: torch.device) -> "TokenBatch":
        """Return the batch on `device`."""
        ids = self.document_ids
        return TokenBatch(self.tokens.to(device), self.labels.to(device), None if ids is None else ids.to(device))


def read_batches(subject: Subject, count: int) -> tuple[list[TokenBatch], str]:
    """Return up to `count` micro-batches, evenly spread over the held-out sequences, and where they are from.

    Training text is taken where nothing is held out.
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
    """Return the subject's config under `recipe`, emulated; None: the run's own.

    Raises ConfigError with all problems of probing the recipe here.
    """
    own = subject.config.precision
    if not (recipe or own).quantises:
        which = f"'{recipe.name}' quantises" if recipe else f"the run's own, '{own.name}', quantises"
        text = f"{which} nothing, so there is nothing to probe. Say precision=NAME[,NAME...] or precision=all."
        raise ConfigError(Problem("precision", text))
    emulated = (recipe or own).model_copy(update={"backend": "emulated"})
    config = subject.config.model_copy(update={"precision": emulated})
    check_config(config)
    return config


@dataclass(frozen=True)
class Pass:
    """Result of forward and backward over all batches: the mean loss, and every parameter's gradient, fp32."""

    loss: float
    gradients: dict[str, Tensor]


@dataclass
class LayerTensors:
    """Unquantized GEMM operands of a layer in the first batch: X [M, K], dY [M, N]; amaxes over all batches."""

    x: Tensor | None = None
    dy: Tensor | None = None
    x_amax: float = 0.0
    dy_amax: float = 0.0


class ProbedModel:
    """`weights` in a `Decoder` with linears swapped by `recipe`; nothing is ever updated.

    Each pass sets the active casts and the unquantized layers, so one model serves all ablations.
    """

    def __init__(
        self,
        shape: ModelConfig,
        weights: Mapping[str, Tensor],
        recipe: PrecisionConfig,
        batches: Sequence[TokenBatch],
        device: torch.device,
        seed: int,
    ):
        """Raises ConfigError where the recipe converts nothing, or its casts are to be compiled and cannot be."""
        sum_in_fp32()
        self.recipe, self.seed, self.device = recipe, seed, device
        self.batches = [batch.to(device) for batch in batches]
        self.targets = sum(int((batch.labels != -100).sum()) for batch in self.batches)
        self.model = whole_decoder(
            shape,
            weights,
            DTYPES[recipe.compute_dtype],
            device=device,
            swap=lambda empty: swap_linears(empty, recipe, shape.num_layers, device.type),
        )
        self._num_layers = shape.num_layers
        set_recipe(self.model, recipe, shape.num_layers)  # its own casts, also where a phase covers the first step
        self.model.requires_grad_(True)
        self.layers = {layer.name: layer for layer in quantised_layers(self.model) if not layer.plan.fixed}
        self.loss_scale = 1.0
        self.tensors: dict[str, LayerTensors] = {}

    @property
    def quantised_slots(self) -> list[str]:
        """The slots that are quantised in some layer."""
        sets = [self.recipe.casts_under(layer.plan.rule) for layer in self.layers.values()]
        return [slot for slot in SLOT_NAMES if any(casts[slot].quantises for casts in sets)]

    @property
    def random(self) -> bool:
        """Whether any cast draws random bits, so that results depend on the key."""
        return any(layer.plan.random for layer in self.layers.values())

    def reference(self) -> Pass:
        """Return the pass in fp32 throughout."""
        compute_dtype, self.model.compute_dtype = self.model.compute_dtype, torch.float32
        try:
            with self._high():
                return self._run(0)
        finally:
            self.model.compute_dtype = compute_dtype

    def high(self) -> Pass:
        """Return the pass in the recipe's compute dtype without any cast, and keep each layer's `tensors`.

        With loss scaling, the largest scale at which the gradients are finite is found first and stays.
        """
        if self.recipe.loss_scaling is not None:
            self.loss_scale = self.recipe.loss_scaling.init_scale
        with self._high():
            while True:
                self.tensors = {name: LayerTensors() for name in self.layers}
                with self._capturing():
                    made = self._run(0)
                finite = all(bool(torch.isfinite(gradient).all()) for gradient in made.gradients.values())
                if finite or self.loss_scale <= 1:
                    return made
                self.loss_scale /= 2

    def calibrate(self, state: Mapping[str, Mapping[str, Tensor]] | None) -> None:
        """Set delayed scales: the checkpoint's own where `state` has them, else by the amaxes of the high pass."""
        delayed = [layer for layer in self.layers.values() if layer.plan.delayed_casts()]
        if not delayed:
            return
        known = {name: dict(its) for name, its in (state or {}).items()}
        missing = set(load_delayed_state(self.model, known))
        kept = {layer.name: (layer.scale, layer.amax_history) for layer in delayed if layer.name not in missing}
        for layer in delayed:
            seen = self.tensors[layer.name]
            amaxes = {"x": seen.x_amax, "w": float(layer.weight.detach().abs().amax()), "dy": seen.dy_amax}
            length = layer.delayed_config().history_length
            layer.scale = torch.ones(len(ROLES), device=self.device)
            layer.amax_history = torch.zeros(length, len(ROLES), device=self.device)
            layer.amax_history[0] = torch.tensor([amaxes[role] for role in ROLES])
        update_delayed(self.model)
        for name, (scale, history) in kept.items():
            self.layers[name].scale, self.layers[name].amax_history = scale, history

    def quantised(self, key: int, recipe: PrecisionConfig | None = None, kept: frozenset[str] = frozenset()) -> Pass:
        """Return the pass with the casts of `recipe` (null: the probed one) in every layer but those of `kept`.

        `key`: for its noise. `recipe` has as many rules in `modules.casts` as the probed one.
        """
        with self._casting(recipe or self.recipe, kept):
            return self._run(key)

    def keys_for(self, layer: str, key: int) -> Tensor | None:
        """Return the random keys that `layer` would get in the first batch of pass `key`."""
        set_step_key(self.model, StepKey(self.seed, key, 0))
        return self.layers[layer].keys

    def _run(self, key: int) -> Pass:
        self.model.zero_grad(set_to_none=True)
        loss = 0.0
        for index, batch in enumerate(self.batches):
            set_step_key(self.model, StepKey(self.seed, key, index))
            logits = self.model(batch.tokens, document_ids=batch.document_ids)  # [B, T, V]
            its = next_token_loss_sum(logits, batch.labels) / self.targets
            (its * self.loss_scale).backward()
            loss += its.item()
        found = {
            name: p.grad.float() / self.loss_scale for name, p in self.model.named_parameters() if p.grad is not None
        }
        self.model.zero_grad(set_to_none=True)
        return Pass(loss, found)

    @contextmanager
    def _high(self) -> Iterator[None]:
        every = quantised_layers(self.model)
        for layer in every:
            layer.bypass = True
        try:
            yield
        finally:
            for layer in every:
                layer.bypass = False

    @contextmanager
    def _casting(self, recipe: PrecisionConfig, kept: frozenset[str]) -> Iterator[None]:
        before = {name: layer.plan for name, layer in self.layers.items()}
        set_recipe(self.model, recipe, self._num_layers)
        for name, layer in self.layers.items():
            layer.bypass = name in kept
        self.model.eval()  # delayed scales are those that were set
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                layer.plan, layer.bypass = before[name], False

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        handles = [layer.register_forward_hook(self._capture) for layer in self.layers.values()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _capture(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not isinstance(layer, QuantisedLinear):
            raise TypeError(f"only quantised layers are captured, not {type(layer).__name__}")
        kept, x = self.tensors[layer.name], inputs[0].detach().flatten(0, -2)  # [M, K]
        kept.x = x if kept.x is None else kept.x
        kept.x_amax = max(kept.x_amax, float(x.abs().amax()))

        def look(gradient: Tensor) -> None:
            dy = gradient.detach().flatten(0, -2)  # [M, N]
            kept.dy = dy if kept.dy is None else kept.dy
            kept.dy_amax = max(kept.dy_amax, float(dy.abs().amax()))

        output.register_hook(look)
