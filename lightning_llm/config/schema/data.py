"""`data`: which documents, how they become tokens, and how tokens become batches."""

from typing import Literal

from pydantic import Field

from lightning_llm.config.schema.base import Fraction, Group, PositiveFloat, PositiveInt

SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz"),
    "text": (".txt", ".md", ".txt.gz", ".md.gz"),
    "parquet": (".parquet",),
}
"""Endings of the files that a loader reads."""


def loader_of(name: str) -> str | None:
    """Return the loader that a file of this name is meant for; None where it could be any."""
    return next((loader for loader, endings in SUFFIXES.items() if name.lower().endswith(endings)), None)


class SourceConfig(Group):
    """One source of documents within a mix."""

    loader: Literal["python", "jsonl", "text", "parquet", "huggingface"] = Field(description="what reads the documents")
    weight: PositiveFloat = Field(1.0, description="share of the training tokens, relative to the other sources")
    part: Literal["code", "prose"] | None = Field(None, description="loader=python: sources or documentation")
    path: str | None = Field(None, description="file, folder or glob; for loader=huggingface also a hub name")
    subset: str | None = Field(None, description="loader=huggingface: the configuration's name")
    split: str = Field("train", description="loader=huggingface: the split")
    revision: str | None = Field(None, description="loader=huggingface: hub commit or tag; null: the newest")
    text_key: str = Field("text", description="jsonl, parquet, huggingface: the column that holds a document's text")
    sample_by: Literal["document", "paragraph", "line"] = Field(
        "document", description="loader=text: what one document is; document: a whole file"
    )


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
    sequences: PositiveInt = Field(64, description="sequences scored per validation, over all sources")
    weights: dict[str, PositiveFloat] | None = Field(
        None, description="each source's weight in these; null: that of the mix. The same for mixes to be compared"
    )


class DataConfig(Group):
    """A mix of sources and the batches drawn from it. Gradient accumulation follows from the batch keys."""

    name: str = Field(description="the file it was composed from, or your own name")
    sources: dict[str, SourceConfig] = Field(description="the mix: each source under a name of your choice")
    tokenizer: TokenizerConfig
    validation: ValidationConfig = ValidationConfig()
    sequence_length: PositiveInt = Field(description="tokens per sequence")
    micro_batch_size: PositiveInt = Field(description="sequences per rank and forward")
    global_batch_size: PositiveInt = Field(description="sequences per optimizer step")
    shuffle: bool = Field(True, description="draw sequences in an order of the seed; false: as they lie")
    document_mask: bool = Field(False, description="attention stays within a document")
    cache_dir: str | None = Field(None, description="token caches; null: the user's cache folder")
    num_workers: int = Field(0, ge=0, le=1024, description="loader processes per rank")
