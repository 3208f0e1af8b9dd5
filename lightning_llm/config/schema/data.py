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
    """One source of documents within a mix: what every loader has, and what it must say and do."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Endings of the files that it reads, in lower case."""
    tokenised: ClassVar[bool] = False
    """Whether its documents are tokens already."""

    loader: str = Field(description="what reads the documents: a registered loader")
    weight: NonNegativeFloat = Field(
        1.0, description="share of the training tokens, relative to the other sources; 0: what is held out is scored"
    )
    role: Literal["validation"] | None = Field(
        None, description="validation: only watched, never trained on; null: trained on, less what is held out"
    )

    @classmethod
    def is_local(cls, path: str) -> bool:
        """Return whether `path` is a place in the file system."""
        return True

    def problems(self, key: str) -> Iterable[Problem]:
        """Return what is wrong and cheap to see, no document read; `key` is the source's, data.sources.NAME."""
        raise NotImplementedError

    def files(self) -> list[Path]:
        """Return the local files that are read, absolute and sorted; none where documents are elsewhere."""
        raise NotImplementedError

    def skipped_files(self) -> dict[str, str]:
        """Return the files and folders that its keys name and that are not read: path -> reason."""
        return {}

    def identity(self, files: Sequence[Path]) -> dict[str, Any]:
        """Return what decides the documents, as JSON data, cheaply: its keys, and the files' size and times.

        Of the times, nobody can set the change time, so that a file replaced by one of the same size and modification
        time (`cp -p`, `rsync -t`) is another. Inodes are left out: on network file systems they differ by mount.
        """
        keys = self.model_dump(exclude={"weight", "role"})
        return keys | {"files": [[str(file), *file_mark(file)[:3]] for file in files]}

    def cached_bytes(self, files: Sequence[Path]) -> int:
        """Return about how many bytes of text go through the tokenizer into the cache."""
        return sum(file.stat().st_size for file in files)

    def build(self, key: str, files: Sequence[Path]) -> Any:
        """Return the `data.sources.source.DocumentReader`; the `data.tokens.tokenised.TokenReader` if `tokenised`."""
        raise NotImplementedError


class TextSourceConfig(SourceConfig):
    """A built-in loader of text.

    Each takes the keys of all of them, so that a source stays valid where its loader alone is replaced, and so do
    configs that were saved when these keys were every source's.
    """

    part: Literal["code", "prose"] | None = Field(None, description="loader=python: sources or documentation")
    include: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="loader=python: globs of modules' paths within the library (http/*); null: all of them"
    )
    path: str | None = Field(None, description="file, folder or glob; for loader=huggingface also a hub name")
    subset: str | None = Field(None, description="loader=huggingface: the configuration's name")
    split: str = Field("train", description="loader=huggingface: the split")
    revision: str | None = Field(None, description="loader=huggingface: hub commit or tag; null: the newest")
    text_key: str = Field("text", description="jsonl, parquet, huggingface: the column that holds a document's text")
    sample_by: Literal["document", "paragraph", "line"] = Field(
        "document", description="loader=text: what one document is; document: a whole file"
    )

    def identity(self, files: Sequence[Path]) -> dict[str, Any]:
        """Return what decides the documents; a source without `include` is what it was before there was such a key."""
        found = super().identity(files)
        return {key: value for key, value in found.items() if key != "include" or value is not None}


class TokenSourceConfig(SourceConfig):
    """A loader of token ids that `data.tokenizer` gave: they are mapped where they lie, never copied."""

    tokenised: ClassVar[bool] = True

    path: str | None = Field(None, description="file, folder or glob")

    def cached_bytes(self, files: Sequence[Path]) -> int:
        """Return 0: the cache has the documents' places alone."""
        return 0


class Pace(NamedTuple):
    """An epoch in the order of the stream: in `blocks` stretches, each shuffled; `falling`: from its end on."""

    blocks: int
    falling: bool = False


class MixtureConfig(Group):
    """Which source each training sample comes from: a function of the sample's number, so that nothing is resumed."""

    shares_by_tokens: ClassVar[bool] = False
    """Whether a source's share is what its training stream holds, once documents are chosen, and no weight."""

    chooses_documents: ClassVar[bool] = False
    """Whether `chooser` returns one: which documents lie in the training streams, and in which order."""

    kind: str = Field(description="a registered mixture")

    @property
    def pace(self) -> Pace | None:
        """How an epoch goes through a source's stream as it lies; None: in no order."""
        return None

    def paced_steps(self, max_steps: int | None) -> int | None:
        """Return the steps of the run whose windows `pace` puts in order; `max_steps` is the run's length."""
        return max_steps

    @property
    def follows_max_steps(self) -> bool:
        """Whether a run of another length takes other samples at the same step."""
        return False

    def problems(self, key: str, weights: Mapping[str, float]) -> Iterable[Problem]:
        """Return what is wrong with it at `key` for sources of these `weights`, none of them only watched."""
        raise NotImplementedError

    def drawn(self, weights: Mapping[str, float]) -> tuple[str, ...]:
        """Return the names of the sources that some sample may come from, of those of these `weights`: all of them.

        A mixture that leaves some out in every run says so here: they are no part of what a run learns from.
        """
        return tuple(weights)

    def identity(self) -> Any:
        """Return what tells its samples from those of the weights alone, as JSON data; None: nothing does."""
        return self.model_dump()

    def chooser(self) -> Any:
        """Return the `data.mixing.chosen.Chooser` of the documents in training streams; None: each once, as read."""
        return None

    def build(self, weights: Mapping[str, float], step_samples: int, max_steps: int | None) -> Any:
        """Return the `data.mixing.addressing.Mixture` of sources of these `weights`; of windows if `shares_by_tokens`.

        A step takes `step_samples` samples; `max_steps` is the run's length, None where nobody knows.
        """
        raise NotImplementedError


LOADERS: Registry[SourceConfig] = Registry(
    "loader",
    "lightning_llm.data.sources.huggingface",
    "lightning_llm.data.sources.jsonl",
    "lightning_llm.data.sources.megatron",
    "lightning_llm.data.sources.olmo",
    "lightning_llm.data.sources.parquet",
    "lightning_llm.data.sources.python",
    "lightning_llm.data.sources.text",
    key="loader",
)
MIXTURES: Registry[MixtureConfig] = Registry(
    "mixture",
    "lightning_llm.data.mixing.static",
    "lightning_llm.data.mixing.curriculum",
    "lightning_llm.data.mixing.phases",
    "lightning_llm.data.mixing.samplemix",
)


def loader_of(name: str) -> str | None:
    """Return the loader that a file of this name is meant for; None where it could be any."""
    return next((loader for loader in LOADERS if name.lower().endswith(LOADERS[loader].suffixes)), None)


class TokenizerConfig(Group):
    """How text becomes tokens."""

    kind: Literal["bpe", "file", "bytes"] = Field(
        "bpe", description="byte-level BPE trained on the corpus; a tokenizer.json; bytes"
    )
    vocab_size: PositiveInt | None = Field(None, description="kind=bpe: size to train; null: model.vocab_size")
    path: str | None = Field(None, description="kind=file: a tokenizer.json or a folder with one")
    end_of_document: str | None = Field(
        None, description="kind=file: the token that ends a document; null: the one of the usual names it has"
    )


class ValidationConfig(Group):
    """The documents held out of training, per source."""

    fraction: Fraction = Field(0.02, description="share of each source's documents that is held out")
    sequences: PositiveInt = Field(
        64, description="sequences scored per validation, over all sources; of each that is only watched, as many more"
    )
    weights: dict[str, PositiveFloat] | None = Field(
        None, description="each source's weight in these; null: that of the source. The same for mixes to be compared"
    )


class DataConfig(Group):
    """A mix of sources and the batches drawn from it. Gradient accumulation follows from the batch keys."""

    name: str = Field(description="the file it was composed from, or your own name")
    sources: dict[str, Annotated[SourceConfig, LOADERS]] = Field(
        description="the mix: each source under a name of your choice"
    )
    mixture: Annotated[MixtureConfig, MIXTURES] | None = Field(
        None, description="kind: a registered mixture, and its own keys; null: static, by the sources' weights"
    )
    tokenizer: TokenizerConfig
    validation: ValidationConfig = ValidationConfig()
    sequence_length: PositiveInt = Field(description="tokens per sequence")
    micro_batch_size: PositiveInt = Field(description="sequences per rank and forward")
    global_batch_size: PositiveInt = Field(
        description="sequences per optimizer step; step_law, or step_law*0.5: of Step Law"
    )
    max_tokens: TokenCount | None = Field(
        None,
        description="training tokens that there are, of all sources by their weights, the same under every seed; null: "
        "all of them",
    )
    epochs: PositiveFloat | None = Field(
        None, description="passes over data.max_tokens, which set trainer.max_steps; null: as many as that makes"
    )
    shuffle: bool = Field(True, description="draw sequences in an order of the seed; false: as they lie")
    skip_samples: tuple[Annotated[tuple[NonNegativeInt, NonNegativeInt], Field(strict=False)], ...] | None = Field(
        None,
        strict=False,
        description="training samples left out: [first, last] pairs of s * batch + r, for row r of step s",
    )
    document_mask: bool = Field(False, description="attention stays within a document")
    cache_dir: str | None = Field(None, description="token caches; null: the user's cache folder")
    num_workers: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        None, description="loader processes per rank; null: 2 on CUDA, none on a CPU"
    )
    tokenize_processes: Annotated[int, Field(gt=0, le=1024)] | None = Field(
        None, description="processes that build a token cache; null: the cores, and one for a short text"
    )

    @field_validator("skip_samples")
    @classmethod
    def _in_order(cls, ranges: Any) -> Any:
        for first, last in ranges or ():
            if last < first:
                raise ValueError(f"[{first}, {last}] ends before it begins: give [first, last], both left out")
        return ranges

    @property
    def trained_weights(self) -> dict[str, float]:
        """The weights of all sources but those that are only watched, by name; 0 for what is held out to be scored."""
        return {name: source.weight for name, source in self.sources.items() if source.role is None}

    @property
    def chosen_mixture(self) -> MixtureConfig:
        """The mixture, `static` where none is given."""
        return self.mixture or MIXTURES.default("static")

    @property
    def drawn(self) -> tuple[str, ...]:
        """The names of the sources that are learned from: neither only watched, nor of weight 0 from first to last."""
        return self.chosen_mixture.drawn(self.trained_weights)

    @property
    def watched(self) -> tuple[str, ...]:
        """The names of the sources that are only watched."""
        return tuple(name for name, source in self.sources.items() if source.role == "validation")


Measure = Literal["quality", "diversity"]


class UnscorableError(Exception):
    """The documents at hand have no such score; why, in a few words."""


class ScorerConfig(Group):
    """What every scorer has, and what it must do."""

    measures: ClassVar[Measure]
    """What its numbers are taken for."""

    kind: str = Field(description="a registered scorer")

    def problems(self, key: str) -> Iterable[Problem]:
        """Return what keeps it from being run here, such as a library that is missing."""
        return ()

    def score(self, texts: Sequence[str]) -> tuple[Any, Any]:
        """Return float64 [documents] in [0, 1], and of a measure by clusters int32 [documents], each one's; else None.

        A function of the texts alone.

        Raises:
            UnscorableError: these texts cannot be scored; whatever else it raises is taken for its own fault.
        """
        raise NotImplementedError


SCORERS: Registry[ScorerConfig] = Registry("scorer", "lightning_llm.data.scoring.scorers")
