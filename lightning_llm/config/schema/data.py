"""`data`: sources of documents, tokenizer, mixture, batches; and the scorers of `prepare --score`.

Loaders, mixtures and scorers are registered kinds. A loader is a subclass of `SourceConfig`; built-in loaders derive
from `TextSourceConfig`, or from `TokenSourceConfig` if their documents are token ids already. A mixture is a subclass
of `MixtureConfig`, a scorer of `ScorerConfig`. `LOADERS`, `MIXTURES` and `SCORERS` name the modules of the built-in
kinds; an installed package may register others (docs/howto/extend.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator

from lightning_llm.base.errors import Problem
from lightning_llm.base.integrity import file_mark
from lightning_llm.base.registry import Registry
from lightning_llm.config.schema.base import (
    Fraction,
    Group,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TokenCount,
)


class SourceConfig(Group):
    """Base class of loaders; its config is one source of documents (`data.sources.NAME`).

    It has the keys that all loaders share, and the methods that the data pipeline calls.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the files that the loader reads, in lower case."""
    tokenised: ClassVar[bool] = False
    """True if the files contain token ids instead of text."""

    loader: str = Field(description="a registered loader, which reads the documents")
    weight: NonNegativeFloat = Field(
        1.0, description="share of the training tokens, relative to other sources; 0: used for validation only"
    )
    role: Literal["validation"] | None = Field(
        None, description="validation: never trained on; null: trained on, except for held-out documents"
    )

    @classmethod
    def is_local(cls, path: str) -> bool:
        """Return whether `path` is a path of the file system."""
        return True

    def problems(self, key: str) -> Iterable[Problem]:
        """Return problems that are cheap to find, without reading documents; `key`: data.sources.NAME."""
        raise NotImplementedError

    def files(self) -> list[Path]:
        """Return the local files that are read, absolute and sorted; none if documents are elsewhere."""
        raise NotImplementedError

    def skipped_files(self) -> dict[str, str]:
        """Return {path: reason} of files and folders that match its keys but are not read."""
        return {}

    def identity(self, files: Sequence[Path]) -> dict[str, Any]:
        """Return JSON data that identifies the documents without reading them: keys, and the files' sizes and times.

        The change time cannot be set by users, so it reveals a file replaced by one of the same size and modification
        time (`cp -p`, `rsync -t`). Inodes are not used, since they differ by mount on network file systems.
        """
        keys = self.model_dump(exclude={"weight", "role"})
        return keys | {"files": [[str(file), *file_mark(file)[:3]] for file in files]}

    def cached_bytes(self, files: Sequence[Path]) -> int:
        """Return an estimate of the bytes of text that are tokenized into the cache."""
        return sum(file.stat().st_size for file in files)

    def build(self, key: str, files: Sequence[Path]) -> Any:
        """Return the `data.sources.source.DocumentReader`; the `data.tokens.tokenised.TokenReader` if `tokenised`."""
        raise NotImplementedError


class TextSourceConfig(SourceConfig):
    """A built-in loader of text.

    All text loaders share these keys, so that a source stays valid if only its loader is replaced, and so that configs
    of earlier releases stay valid.
    """

    part: Literal["code", "prose"] | None = Field(None, description="loader=python: sources or documentation")
    include: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="loader=python: globs of modules' paths within the library (http/*); null: all of them"
    )
    path: str | None = Field(None, description="file, folder or glob; for loader=huggingface also a hub name")
    subset: str | None = Field(None, description="loader=huggingface: the configuration's name")
    split: str = Field("train", description="loader=huggingface: the split")
    revision: str | None = Field(None, description="loader=huggingface: hub commit or tag; null: the newest")
    text_key: str = Field("text", description="jsonl, parquet, huggingface: the column with the text")
    sample_by: Literal["document", "paragraph", "line"] = Field(
        "document", description="loader=text: the unit of a document; document: a whole file"
    )

    def identity(self, files: Sequence[Path]) -> dict[str, Any]:
        """Return JSON data that identifies the documents; without `include` as in releases before that key."""
        found = super().identity(files)
        return {key: value for key, value in found.items() if key != "include" or value is not None}


class TokenSourceConfig(SourceConfig):
    """A loader of token ids made with `data.tokenizer`; files are memory-mapped, never copied."""

    tokenised: ClassVar[bool] = True

    path: str | None = Field(None, description="file, folder or glob")

    def cached_bytes(self, files: Sequence[Path]) -> int:
        """Return 0: the cache only has the documents' offsets."""
        return 0


class Pace(NamedTuple):
    """Order of an epoch along a source's stream: `blocks` consecutive parts, each shuffled.

    `falling`: from the end of the stream to its start.
    """

    blocks: int
    falling: bool = False


class MixtureConfig(Group):
    """Base class of mixtures: a pure function from a sample's index to its source, without state to resume."""

    shares_by_tokens: ClassVar[bool] = False
    """True if a source's share is its number of chosen tokens instead of its weight."""

    chooses_documents: ClassVar[bool] = False
    """True if `chooser` selects and orders the documents of the training streams."""

    kind: str = Field(description="a registered mixture")

    @property
    def pace(self) -> Pace | None:
        """Order of an epoch along a source's stream; None: windows are shuffled over the whole stream."""
        return None

    def paced_steps(self, max_steps: int | None) -> int | None:
        """Return the number of steps with samples ordered by `pace`; `max_steps` is the run's length."""
        return max_steps

    @property
    def follows_max_steps(self) -> bool:
        """True if the samples of a step depend on the length of the run (trainer.max_steps)."""
        return False

    def problems(self, key: str, weights: Mapping[str, float]) -> Iterable[Problem]:
        """Return the problems of the mixture at `key` (data.mixture) for training sources with these `weights`."""
        raise NotImplementedError

    def drawn(self, weights: Mapping[str, float]) -> tuple[str, ...]:
        """Return the names of the sources that are ever sampled, by default all of `weights`.

        A mixture that never samples some of them overrides this, so that they do not count as training data.
        """
        return tuple(weights)

    def identity(self) -> Any:
        """Return JSON data that identifies the samples it draws; None if the weights alone determine them."""
        return self.model_dump()

    def chooser(self) -> Any:
        """Return the `data.opening.Chooser` of training documents; None: each document is used once, in order."""
        return None

    def build(self, weights: Mapping[str, float], step_samples: int, max_steps: int | None) -> Any:
        """Return the `data.mixing.addressing.Mixture` for `weights`, or for numbers of windows if `shares_by_tokens`.

        `step_samples`: samples per step. `max_steps`: length of the run, None if unknown.
        """
        raise NotImplementedError


LOADERS: Registry[SourceConfig] = Registry(
    "loader",
    "lightning_llm.data.sources.text",
    "lightning_llm.data.sources.huggingface",
    "lightning_llm.data.sources.python",
    "lightning_llm.data.sources.tokens",
    key="loader",
)
MIXTURES: Registry[MixtureConfig] = Registry(
    "mixture", "lightning_llm.data.mixing.weights", "lightning_llm.data.mixing.scored"
)


def loader_of(name: str) -> str | None:
    """Return the name of the loader that reads a file called `name`, by its suffix; None if no loader does."""
    return next((loader for loader in LOADERS if name.lower().endswith(LOADERS[loader].suffixes)), None)


class TokenizerConfig(Group):
    """`data.tokenizer`: the tokenizer, trained on the corpus or given as a file."""

    kind: Literal["bpe", "file", "bytes"] = Field(
        "bpe",
        description="bpe: byte-level BPE trained on the corpus; file: a tokenizer.json; bytes: one token per byte",
    )
    vocab_size: PositiveInt | None = Field(None, description="kind=bpe: size to train; null: model.vocab_size")
    path: str | None = Field(None, description="kind=file: a tokenizer.json or a folder with one")
    end_of_document: str | None = Field(
        None, description="kind=file: the token that ends a document; null: found by common names"
    )


class ValidationConfig(Group):
    """`data.validation`: documents of each source that are held out of training, and how many are scored."""

    fraction: Fraction = Field(0.02, description="share of each source's documents that is held out")
    sequences: PositiveInt = Field(
        64, description="sequences scored per validation over all sources, and again for each validation-only source"
    )
    weights: dict[str, PositiveFloat] | None = Field(
        None, description="weight of each source in these; null: that of the source. Use equal weights to compare mixes"
    )


class DataConfig(Group):
    """`data`: a mix of sources, and its batches. Gradient accumulation follows from the batch sizes."""

    name: str = Field(description="name of its file, or your own")
    sources: dict[str, Annotated[SourceConfig, LOADERS]] = Field(
        description="sources, each under a name of your choice"
    )
    mixture: Annotated[MixtureConfig, MIXTURES] | None = Field(
        None, description="a registered mixture by `kind`, and its keys; null: static, by the sources' weights"
    )
    tokenizer: TokenizerConfig
    validation: ValidationConfig = ValidationConfig()
    sequence_length: PositiveInt = Field(description="tokens per sequence")
    micro_batch_size: PositiveInt = Field(description="sequences per rank and forward pass")
    global_batch_size: PositiveInt = Field(
        description="sequences per optimizer step; step_law or step_law*0.5: from Step Law"
    )
    max_tokens: TokenCount | None = Field(
        None,
        description="limit of distinct training tokens over all sources, by weight, equal for all seeds; null: "
        "no limit",
    )
    epochs: PositiveFloat | None = Field(
        None, description="passes over data.max_tokens; sets trainer.max_steps; null: trainer.max_steps decides"
    )
    shuffle: bool = Field(True, description="shuffle sequences by seed; false: in stored order")
    skip_samples: tuple[Annotated[tuple[NonNegativeInt, NonNegativeInt], Field(strict=False)], ...] | None = Field(
        None,
        strict=False,
        description="training samples to skip: [first, last] pairs of s * batch + r, for row r of step s",
    )
    document_mask: bool = Field(False, description="attention does not cross documents")
    cache_dir: str | None = Field(None, description="folder of token caches; null: the user's cache folder")
    num_workers: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        None, description="data loader processes per rank; null: 2 on CUDA, 0 on a CPU"
    )
    tokenize_processes: Annotated[int, Field(gt=0, le=1024)] | None = Field(
        None, description="processes that build a token cache; null: one per core, or one for short texts"
    )

    @field_validator("skip_samples")
    @classmethod
    def _in_order(cls, ranges: Any) -> Any:
        for first, last in ranges or ():
            if last < first:
                raise ValueError(f"[{first}, {last}] ends before it begins. Give [first, last], both inclusive")
        return ranges

    @property
    def trained_weights(self) -> dict[str, float]:
        """{name: weight} of all sources except validation-only ones."""
        return {name: source.weight for name, source in self.sources.items() if source.role is None}

    @property
    def chosen_mixture(self) -> MixtureConfig:
        """The mixture; `static` by default."""
        return self.mixture or MIXTURES.default("static")

    @property
    def drawn(self) -> tuple[str, ...]:
        """Names of the sources that are trained on."""
        return self.chosen_mixture.drawn(self.trained_weights)

    @property
    def watched(self) -> tuple[str, ...]:
        """Names of the validation-only sources."""
        return tuple(name for name, source in self.sources.items() if source.role == "validation")


Measure = Literal["quality", "diversity"]


class UnscorableError(Exception):
    """These documents cannot be scored; the message is the reason."""


class ScorerConfig(Group):
    """Base class of scorers, which compute a score of each document (`prepare --score`)."""

    measures: ClassVar[Measure]
    """The property that its scores measure."""

    kind: str = Field(description="a registered scorer")

    def problems(self, key: str) -> Iterable[Problem]:
        """Return the problems at `key` that prevent it from running here, such as a missing library."""
        return ()

    def score(self, texts: Sequence[str]) -> tuple[Any, Any]:
        """Return (scores float64 [documents] in [0, 1], cluster ids int32 [documents] or None).

        The result depends only on the texts.

        Raises:
            UnscorableError: these texts cannot be scored. Any other exception counts as a bug of the scorer.
        """
        raise NotImplementedError


SCORERS: Registry[ScorerConfig] = Registry("scorer", "lightning_llm.data.scoring")
