"""The verb `probe`: measure how precision recipes change the gradients of trained weights.

The probed model has the weights of a run, checkpoint or Hugging Face folder, under one recipe at a time.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.base.folders import output_folder_problems
from lightning_llm.base.hardware import describe_device
from lightning_llm.base.terminal import show_progress
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config, ModelConfig, PrecisionConfig
from lightning_llm.config.workspace import default_outputs
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.opening import open_corpus
from lightning_llm.linalg import DTYPES
from lightning_llm.model.flops import count_parameters
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.model.weights.load import whole_decoder
from lightning_llm.plan.check import check_config
from lightning_llm.precision.linear.swap import sum_in_fp32, swap_linears
from lightning_llm.precision.outliers import draw_outliers
from lightning_llm.probe.figures import channel_outliers
from lightning_llm.probe.measure import measure
from lightning_llm.probe.passes import Pass, Passes
from lightning_llm.probe.report import as_json, draw, ranking, render, write_recipes
from lightning_llm.run.subject import Subject, delayed_state, device_of, find_subject, read_weights


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


ALL = "all"


def probe(arguments: argparse.Namespace) -> int:
    """Measure, print, and write the table, JSON, plots and recipes; return 0."""
    subject, configs, skipped, device = _checked(arguments)
    if subject.config.trainer.threads:
        torch.set_num_threads(subject.config.trainer.threads)
    facts, recipes = _measure(subject, configs, device, arguments)
    facts["skipped"] = skipped
    folder = Path(arguments.output or Path(default_outputs(), "probe", subject.name)).expanduser().absolute()
    _write(facts, recipes, subject.config.model.num_layers, folder)
    print(json.dumps(as_json(facts), indent=1, allow_nan=False) if arguments.json else render(facts))
    print(f"written    {folder}", file=sys.stderr)
    return 0


def _checked(arguments: argparse.Namespace) -> tuple[Subject, dict[str, Config], dict[str, str], torch.device]:
    """Return the weights, their config under each recipe, the skipped recipes with reasons, and the device."""
    names, own, others = _split(arguments.overrides)
    problems = [
        Problem(f"--{key}", "must be at least 1.", value)
        for key in ("batches", "keys")
        if (value := getattr(arguments, key)) < 1
    ]
    if arguments.output:
        problems += output_folder_problems(Path(arguments.output).expanduser())
    subject = device = None
    with gathered(problems):
        device = device_of(arguments.device)
    with gathered(problems):
        subject = find_subject(arguments.path, others if names else [*others, *own], arguments.text)
    wanted: list[str | None] = [*(_shipped() if ALL in names else names)]
    if not names:
        wanted = [None]  # the run's own
    configs: dict[str, Config] = {}
    skipped: dict[str, str] = {}
    for name in dict.fromkeys(wanted):
        try:
            recipe = None if name is None else compose_config([f"precision={name}", *own]).precision
            if subject is not None:
                config = with_recipe(subject, recipe)
                configs[config.precision.name] = config
        except ConfigError as error:
            if ALL in names:
                skipped[str(name)] = "; ".join(map(str, error.problems))
            else:
                problems += error.problems
    if problems or subject is None or device is None:
        raise ConfigError(dict.fromkeys(problems))
    if not configs:
        raise ConfigError([Problem("precision", reason, name) for name, reason in skipped.items()])
    return subject, configs, skipped, device


def _split(overrides: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Split overrides into names of recipes, overrides of their keys, and all others."""
    names: list[str] = []
    own: list[str] = []
    others: list[str] = []
    for word in overrides:
        if word.startswith("precision="):
            names += [name for name in word.removeprefix("precision=").split(",") if name]
        else:
            (own if word.startswith("precision.") else others).append(word)
    return names, own, others


def _shipped() -> list[str]:
    """Return the names of all shipped precision recipes that quantize."""
    import yaml

    found = []
    for entry in resources.files("lightning_llm.conf").joinpath("precision").iterdir():
        if entry.name.endswith(".yaml"):
            recipe = PrecisionConfig.model_validate(yaml.safe_load(entry.read_text(encoding="utf-8")))
            if recipe.quantizes:
                found.append(entry.name.removesuffix(".yaml"))
    return sorted(found)


def _measure(
    subject: Subject, configs: dict[str, Config], device: torch.device, arguments: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, PrecisionConfig]]:
    opening = _progress(subject.name)
    opening("reading weights")
    weights = read_weights(subject)
    opening("reading data")
    batches, source = read_batches(subject, arguments.batches)
    opening("")
    shape = subject.config.model
    everything = ALL not in _split(arguments.overrides)[0]
    facts: dict[str, Any] = {
        "path": str(subject.weights.path),
        "kind": subject.kind,
        "step": subject.step,
        "model": shape.name,
        "parameters": count_parameters(shape).total,
        "device": describe_device(device),
        "data": _data_facts(batches, source),
        "recipes": {},
    }
    reference: Pass | None = None
    count = f"{len(configs)} recipe{'' if len(configs) == 1 else 's'}"
    _log(f"{count} on {facts['device']}; casts that are not cached are compiled first, which can take minutes")
    for number, (name, config) in enumerate(configs.items(), start=1):
        title, began = f"{name} ({number} of {len(configs)})", time.monotonic()
        progress = _progress(title)
        model = ProbedModel(shape, weights, config.precision, batches, device, config.seed)
        if reference is None:
            progress("fp32 pass")
            reference = model.reference()
        same = config.precision.recipe_hash == subject.config.precision.recipe_hash
        delayed = delayed_state(subject) if same else None
        facts["recipes"][name] = measure(model, reference, delayed, arguments.keys, everything, progress)
        if arguments.outliers and "outliers" not in facts:
            facts["outliers"] = channel_outliers(model)
        progress("")
        _log(f"{title}: measured in {time.monotonic() - began:.0f} s")
    facts["ranking"] = ranking(facts["recipes"])
    return facts, {name: config.precision for name, config in configs.items()}


def _data_facts(batches: list[TokenBatch], source: str) -> dict[str, Any]:
    tokens = sum(int((batch.labels != -100).sum()) for batch in batches)
    return {"batches": len(batches), "tokens": tokens, "from": source}


def _progress(title: str) -> Callable[[str], None]:
    return lambda text: show_progress(f"{title}: {text}" if text else "")


def _log(text: str) -> None:
    print(f"probe  {text}", file=sys.stderr, flush=True)


def _write(facts: dict[str, Any], recipes: dict[str, PrecisionConfig], num_layers: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "probe.json").write_text(json.dumps(as_json(facts), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "probe.txt").write_text(render(facts) + "\n", encoding="utf-8")
    if "outliers" in facts:
        draw_outliers(facts["outliers"], folder / "outliers.svg")
    for name, its in facts["recipes"].items():
        draw(name, its, folder / f"{name}.png")
        if "keep_high" in its:
            write_recipes(recipes[name], its, num_layers, folder / "precision")
