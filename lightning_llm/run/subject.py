"""Subject of a verb that measures a model (`evaluate`, `probe`, `generate`): trained weights at PATH and their
config."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.config.compose import compose_config
from lightning_llm.config.from_file import load_config
from lightning_llm.config.overrides import override
from lightning_llm.config.schema import Config
from lightning_llm.config.weight_folders import TOKENIZER, end_of_document_of, is_folder_of_files
from lightning_llm.model.weights.folder import Weights
from lightning_llm.model.weights.load import state_dict_of
from lightning_llm.run.code_weights import CODES, CodeWeights
from lightning_llm.run.launch.environment import is_first_rank, rank_environment
from lightning_llm.run.resume.weights import open_weights
from lightning_llm.train.checkpoint.manifest import PRECISION, Checkpoint, Damage
from lightning_llm.train.checkpoint.verification import content_damage
from lightning_llm.train.checkpoint.weights import CheckpointWeights

HUGGINGFACE_TOKENS = 256  # per sequence, the default of data.sequence_length


@dataclass(frozen=True)
class Subject:
    """Trained weights that a verb measures, and the config to measure them with."""

    folder: Path
    """Folder of the run, or of the weights."""
    kind: str
    """"run", or "huggingface" for a Hugging Face folder or an imported one (weights and a tokenizer, but no text)."""
    config: Config
    """Config of the run; for "huggingface" one composed for the given text."""
    weights: Weights

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that contains the weights; None for a Hugging Face folder."""
        weights = self.weights.weights if isinstance(self.weights, CodeWeights) else self.weights
        return weights.checkpoint if isinstance(weights, CheckpointWeights) else None

    @property
    def codes(self) -> str | None:
        """Name of the code format to which the weights are rounded (`--as`), None if they are not rounded."""
        return self.weights.format.name if isinstance(self.weights, CodeWeights) else None

    def as_codes(self, name: str) -> "Subject":
        """Return this subject with its weights rounded to the code format `name`, such as "nvfp4".

        Raises ConfigError if the weights do not fit the format.
        """
        recipe = self.config.precision if self.kind == "run" else None
        return replace(self, weights=CodeWeights(self.weights, CODES[name], recipe, key="--as"))

    @property
    def step(self) -> int | None:
        """Number of optimizer steps that the weights were trained for; None if unknown."""
        return None if self.checkpoint is None else self.checkpoint.step

    @property
    def name(self) -> str:
        """Name of the folder that results are written to: that of `folder`, with "-step=N" for a checkpoint."""
        return self.folder.name if self.step is None else f"{self.folder.name}-step={self.step}"


def find_subject(path: Path, arguments: Sequence[str], text: Path | None, needs_data: bool = True) -> Subject:
    """Return the subject at `path`: a run, a checkpoint, an imported folder or a Hugging Face folder.

    Args:
        path: the folder.
        arguments: overrides of its config.
        text: file of documents to measure on, only for folders without a run.
        needs_data: reject a folder without a run if neither `text` nor overrides of `data` are given.

    Raises:
        ConfigError: there are no weights, or the arguments or the file do not fit them.
    """
    path = path.expanduser().absolute()
    if is_folder_of_files(path):
        return _huggingface(path, arguments, text, needs_data)
    # All ranks must choose the same checkpoint of a run. Given one checkpoint, each verifies its share of the files.
    weights = open_weights(path, content_damage if (path / "config.yaml").is_file() else _damage)
    if not isinstance(weights, CheckpointWeights):
        raise TypeError(f"{path} contains {weights.kind} weights, but no file of that format")
    if text is not None:
        text_problem = "needs a Hugging Face folder; a run is measured on its own validation data. Remove it."
        raise ConfigError(Problem("--text", text_problem))
    run, file = weights.checkpoint.run_folder, weights.tokenizer
    own = [] if file is None else _tokenizer_words(file)
    config = load_config(run / "config.yaml", ["trainer.devices=1", "world=null", *own, *arguments])
    alone = compose_config([]).parallel  # the layout of the training run does not matter here
    if config.model != weights.config:
        weights = CheckpointWeights(weights.checkpoint, config.model)  # raises if the model does not fit these weights
    return Subject(run, "run", config.model_copy(update={"parallel": alone}), weights)


def _huggingface(path: Path, arguments: Sequence[str], text: Path | None, needs_data: bool) -> Subject:
    problems: list[Problem] = []
    weights = None
    with gathered(problems):
        weights = open_weights(path)
    if not (path / TOKENIZER).is_file():
        problems.append(Problem(str(path / TOKENIZER), "is missing. Save the tokenizer as a fast tokenizer."))
    has_data = any(word.startswith("data=") for word in arguments)
    if text is None and not has_data and needs_data:
        given = "is missing: a Hugging Face folder has no text. Give --text FILE (.txt, .md, .jsonl) or data=..."
        problems.append(Problem("data", given))
    elif text is not None and has_data:
        problems.append(Problem("--text", "cannot be used with data=... overrides. Remove one of them."))
    elif text is not None and not text.expanduser().is_file():
        problems.append(Problem("--text", "is not a file. Give a .txt, .md or .jsonl file.", text))
    if problems or weights is None:
        raise ConfigError(problems)
    for note in weights.notes if is_first_rank() else ():
        print(note, file=sys.stderr)
    length = min(HUGGINGFACE_TOKENS, weights.config.max_sequence_length)
    tokenizer = [
        *_tokenizer_words(path / TOKENIZER),
        override("data.tokenizer.end_of_document", end_of_document_of(path)),
    ]
    shape = f"data.sequence_length={length}", "data.micro_batch_size=2"
    config = compose_config([*_text_words(text), *tokenizer, *shape, *arguments])
    return Subject(path, "huggingface", config.model_copy(update={"model": weights.config}), weights)


def _tokenizer_words(file: Path) -> list[str]:
    return ["data.tokenizer.kind=file", override("data.tokenizer.path", str(file)), "data.tokenizer.vocab_size=null"]


def _text_words(text: Path | None) -> list[str]:
    if text is None:
        return []
    kind = "jsonl" if ".jsonl" in text.suffixes or ".json" in text.suffixes else "text"
    path = override(f"data.sources.{kind}.path", str(text.expanduser().absolute()))
    return [f"data={kind}", path, "data.validation.fraction=0"]


def read_weights(subject: Subject) -> dict[str, Tensor]:
    """Return the subject's parameters by their names in a `Decoder`, fp32 on the CPU. Raises as `verified_weights`."""
    return dict(state_dict_of(verified_weights(subject), subject.config.model))


def verified_weights(subject: Subject) -> Weights:
    """Verify this rank's share of the files; return the weights, to be read by rows.

    Raises ConfigError if a file cannot be read or is damaged.
    """
    subject.weights.verify(*_share())
    return subject.weights


def _share() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    ranks = rank_environment()
    return (0, 1) if ranks is None else (ranks.rank, ranks.world)


def _damage(checkpoint: Checkpoint) -> list[Damage]:
    """Return the damaged files in this rank's share of the checkpoint's files."""
    return content_damage(checkpoint, *_share())


def delayed_state(subject: Subject) -> dict[str, dict[str, Tensor]]:
    """Return the delayed scales in the checkpoint by layer; {} if there are none."""
    if subject.checkpoint is None:
        return {}
    nested: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(subject.checkpoint.folder / PRECISION).items():
        layer, _, key = name.rpartition(".")
        nested.setdefault(layer, {})[key] = tensor
    return nested


def device_of(wanted: str) -> torch.device:
    """Return the device for --device (auto, cpu or cuda). Raises ConfigError if it is not available."""
    if wanted == "cuda" and not torch.cuda.is_available():
        text = f"torch {torch.__version__} finds no CUDA device. Use auto or cpu."
        raise ConfigError(Problem("--device", text, "cuda"))
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(Problem("--device", "must be auto, cpu or cuda.", wanted))
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)
