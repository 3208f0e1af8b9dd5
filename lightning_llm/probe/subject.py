"""The subject of a probe: the weights at PATH, the model they belong to, and a few batches of text."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from lightning_llm.config.compose import compose_config, load_config
from lightning_llm.config.from_weights import HUGGINGFACE, IMPORTED
from lightning_llm.config.schema import Config, PrecisionConfig
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.opening import open_corpus
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.model.weights.convert import state_dict_of
from lightning_llm.model.weights.folder import Weights, open_huggingface, open_imported
from lightning_llm.plan.check import check_config
from lightning_llm.probe.model import TokenBatch
from lightning_llm.record.run_tokenizer import run_tokenizer
from lightning_llm.run.start import checkpoint_at
from lightning_llm.train.checkpoint.manifest import PRECISION, Checkpoint, content_damage, passed_over_lines
from lightning_llm.train.checkpoint.weights import CheckpointWeights

EXPECTED = (
    "a run's folder (config.yaml and checkpoints/), one of its checkpoints/step=N folders, a folder that `import` "
    "made, or a Hugging Face folder (config.json, *.safetensors, tokenizer.json)"
)
HUGGINGFACE_TOKENS = 256  # per sequence, unless data.sequence_length says otherwise


@dataclass(frozen=True)
class Subject:
    """What lies at PATH: `checkpoint` for one of ours, None for a Hugging Face folder; `config` with its data.

    A folder that `import` made is a Hugging Face folder here: weights and a tokenizer, without text.
    """

    folder: Path
    kind: str
    config: Config
    checkpoint: Checkpoint | None

    @property
    def name(self) -> str:
        """A name for the output's folder."""
        return self.folder.name if self.checkpoint is None else f"{self.folder.name}-step={self.checkpoint.step}"


def find_subject(path: Path, arguments: Sequence[str], text: Path | None, needs_data: bool = True) -> Subject:
    """Return what lies at `path`; `arguments` are overrides of its config, `text` a file of documents.

    Raises ConfigError where it holds no weights, or the arguments or the file do not go with it; where `needs_data`, a
    Hugging Face folder needs one of them.
    """
    path = path.expanduser().absolute()
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ConfigError(Problem(str(path), f"{what}. Give {EXPECTED}."))
    if (path / IMPORTED).is_file() or (path / HUGGINGFACE).is_file():
        return _huggingface(path, arguments, text, needs_data)
    checkpoint, passed_over = checkpoint_at(path, content_damage)
    run = checkpoint.run_folder if checkpoint else path
    if not checkpoint and not (run / "config.yaml").is_file():
        raise ConfigError(Problem(str(path), f"holds no weights. Give {EXPECTED}."))
    if not (run / "config.yaml").is_file():
        text_ = f"belongs to no run: {run / 'config.yaml'} is missing, which says its model and data."
        raise ConfigError(Problem(str(path), text_))
    if checkpoint is None:
        raise ConfigError(Problem(str(path), "holds no checkpoint, so no weights. Give a run that saved one."))
    for line in passed_over_lines(passed_over):
        print(line, file=sys.stderr)
    if text is not None:
        raise ConfigError(Problem("--text", "goes with a Hugging Face folder; a run's own validation data is taken."))
    file = run_tokenizer(run)
    own = [] if file is None else ["data.tokenizer.kind=file", "data.tokenizer.vocab_size=null"]
    own += [] if file is None else [f"data.tokenizer.path={file}"]
    config = load_config(run / "config.yaml", ["trainer.devices=1", "world=null", *own, *arguments])
    alone = compose_config([]).parallel  # how the run was spread is no matter here
    return Subject(run, "run", config.model_copy(update={"parallel": alone}), checkpoint)


def _huggingface(path: Path, arguments: Sequence[str], text: Path | None, needs_data: bool) -> Subject:
    problems: list[Problem] = []
    model = None
    try:
        model = _open_folder(path).config
    except ConfigError as error:
        problems += error.problems
    if not (path / "tokenizer.json").is_file():
        problems.append(Problem(str(path / "tokenizer.json"), "is missing: save the tokenizer as a fast one."))
    has_data = any(word.startswith("data=") for word in arguments)
    if text is None and not has_data and needs_data:
        given = "give --text FILE (.txt, .md, .jsonl), or data=... overrides: a Hugging Face folder brings no text."
        problems.append(Problem("data", given))
    elif text is not None and has_data:
        problems.append(Problem("--text", "goes without data=... overrides. Give one of them."))
    elif text is not None and not text.expanduser().is_file():
        problems.append(Problem("--text", f"{text} is no file."))
    if problems or model is None:
        raise ConfigError(problems)
    length = min(HUGGINGFACE_TOKENS, model.max_sequence_length)
    tokenizer = ("data.tokenizer.kind=file", f"data.tokenizer.path={path / 'tokenizer.json'}")
    config = compose_config(
        [*_text_words(text), *tokenizer, "data.tokenizer.vocab_size=null", f"data.sequence_length={length}",
         "data.micro_batch_size=2", *arguments]
    )  # fmt: skip
    return Subject(path, "huggingface", config.model_copy(update={"model": model}), None)


def _text_words(text: Path | None) -> list[str]:
    if text is None:
        return []
    kind = "jsonl" if ".jsonl" in text.suffixes or ".json" in text.suffixes else "text"
    return [f"data={kind}", f"data.sources.{kind}.path={text.expanduser().absolute()}", "data.validation.fraction=0"]


def read_weights(subject: Subject) -> dict[str, Tensor]:
    """Return the model's parameters by our names, fp32, on the CPU.

    Raises ConfigError where one is missing, unknown or of another shape.
    """
    if subject.checkpoint is not None:
        return dict(state_dict_of(CheckpointWeights(subject.checkpoint, subject.config.model), subject.config.model))
    weights = _open_folder(subject.folder)
    if (subject.folder / IMPORTED).is_file():
        weights.digests()  # raises where a file is not as it was written
    return dict(state_dict_of(weights, subject.config.model))


def _open_folder(path: Path) -> Weights:
    return open_imported(path) if (path / IMPORTED).is_file() else open_huggingface(path)


def delayed_state(subject: Subject) -> dict[str, dict[str, Tensor]]:
    """Return the delayed scales that the checkpoint holds, by layer; empty where it holds none."""
    if subject.checkpoint is None:
        return {}
    nested: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(subject.checkpoint.folder / PRECISION).items():
        layer, _, key = name.rpartition(".")
        nested.setdefault(layer, {})[key] = tensor
    return nested


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

    Raises ConfigError with all that keeps the recipe from being probed here.
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
