"""Subject of an evaluation, a probe or a generation: the trained weights at PATH, with their model's config."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
from lightning_llm.run.launch.environment import is_first_rank, rank_environment
from lightning_llm.run.resume.weights import open_weights
from lightning_llm.train.checkpoint.manifest import PRECISION, Checkpoint, Damage
from lightning_llm.train.checkpoint.verification import content_damage
from lightning_llm.train.checkpoint.weights import CheckpointWeights

HUGGINGFACE_TOKENS = 256  # per sequence, the default of data.sequence_length


@dataclass(frozen=True)
class Subject:
    """Opened `weights` and their `config`: their run's, or one with the text that was given.

    `kind` is "run" or "huggingface". A folder that `import` made is a Hugging Face folder here: weights and a
    tokenizer, without text. `folder` is the run's, or that of the weights.
    """

    folder: Path
    kind: str
    config: Config
    weights: Weights

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint of a run that the weights are in, None for a Hugging Face folder."""
        return self.weights.checkpoint if isinstance(self.weights, CheckpointWeights) else None

    @property
    def step(self) -> int | None:
        """Optimizer steps of the weights' training, None if unknown."""
        return None if self.checkpoint is None else self.checkpoint.step

    @property
    def name(self) -> str:
        """A name for the output's folder."""
        return self.folder.name if self.step is None else f"{self.folder.name}-step={self.step}"


def find_subject(path: Path, arguments: Sequence[str], text: Path | None, needs_data: bool = True) -> Subject:
    """Return the subject at `path`; `arguments` are overrides of its config, `text` a file of documents.

    Raises ConfigError where it holds no weights, or the arguments or the file do not go with it; where `needs_data`, a
    Hugging Face folder needs one of them.
    """
    path = path.expanduser().absolute()
    if is_folder_of_files(path):
        return _huggingface(path, arguments, text, needs_data)
    # All ranks must choose the same checkpoint of a run; of one that is named each looks at a share.
    weights = open_weights(path, content_damage if (path / "config.yaml").is_file() else _damage)
    if not isinstance(weights, CheckpointWeights):
        raise TypeError(f"{path} holds {weights.kind}, and no file that names one")
    if text is not None:
        raise ConfigError(Problem("--text", "goes with a Hugging Face folder; a run's own validation data is taken."))
    run, file = weights.checkpoint.run_folder, weights.tokenizer
    own = [] if file is None else _tokenizer_words(file)
    config = load_config(run / "config.yaml", ["trainer.devices=1", "world=null", *own, *arguments])
    alone = compose_config([]).parallel  # how the run was spread is no matter here
    if config.model != weights.config:
        weights = CheckpointWeights(weights.checkpoint, config.model)  # raises if the model does not fit these weights
    return Subject(run, "run", config.model_copy(update={"parallel": alone}), weights)


def _huggingface(path: Path, arguments: Sequence[str], text: Path | None, needs_data: bool) -> Subject:
    problems: list[Problem] = []
    weights = None
    with gathered(problems):
        weights = open_weights(path)
    if not (path / TOKENIZER).is_file():
        problems.append(Problem(str(path / TOKENIZER), "is missing: save the tokenizer as a fast one."))
    has_data = any(word.startswith("data=") for word in arguments)
    if text is None and not has_data and needs_data:
        given = "give --text FILE (.txt, .md, .jsonl), or data=... overrides: a Hugging Face folder brings no text."
        problems.append(Problem("data", given))
    elif text is not None and has_data:
        problems.append(Problem("--text", "goes without data=... overrides. Give one of them."))
    elif text is not None and not text.expanduser().is_file():
        problems.append(Problem("--text", f"{text} is no file."))
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
    """Return the model's parameters by our names, fp32, on the CPU. Raises ConfigError as `verified_weights` does."""
    return dict(state_dict_of(verified_weights(subject), subject.config.model))


def verified_weights(subject: Subject) -> Weights:
    """Return the weights, to be read by rows; each of several ranks has verified its share of the files.

    Raises ConfigError if a file cannot be read or is damaged.
    """
    subject.weights.verify(*_share())
    return subject.weights


def _share() -> tuple[int, int]:
    """Return this process's number among the ranks that were started, and theirs."""
    ranks = rank_environment()
    return (0, 1) if ranks is None else (ranks.rank, ranks.world)


def _damage(checkpoint: Checkpoint) -> list[Damage]:
    """Return the damaged files in this rank's share of the checkpoint's files."""
    return content_damage(checkpoint, *_share())


def delayed_state(subject: Subject) -> dict[str, dict[str, Tensor]]:
    """Return the delayed scales that the checkpoint holds, by layer; empty where it holds none."""
    if subject.checkpoint is None:
        return {}
    nested: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(subject.checkpoint.folder / PRECISION).items():
        layer, _, key = name.rpartition(".")
        nested.setdefault(layer, {})[key] = tensor
    return nested


def device_of(wanted: str) -> torch.device:
    """Return the device that --device names: auto, cpu or cuda. Raises ConfigError where it is not here."""
    if wanted == "cuda" and not torch.cuda.is_available():
        text = f"is 'cuda', and torch {torch.__version__} finds no CUDA device."
        raise ConfigError(Problem("--device", text))
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(Problem("--device", f"is '{wanted}', must be auto, cpu or cuda."))
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)
