"""Cheap checks of the config group `data`: they read no document and import neither torch nor datasets."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.folders import nearest_existing, user_cache_dir
from lightning_llm.config.schema.data import DataConfig, TokenizerConfig
from lightning_llm.config.schema.validation import Rule, gather
from lightning_llm.data.cache import (
    disk_problem,
    product_folder,
    read_manifest,
    token_bytes,
)
from lightning_llm.data.mixing.weights import bound_problems
from lightning_llm.data.sources.source import Source
from lightning_llm.data.tokens.tokenised import scan_identity
from lightning_llm.data.tokens.tokenizer import (
    BYTES_VOCAB_SIZE,
    END_OF_DOCUMENT_NAMES,
    SMALLEST_BPE_VOCAB_SIZE,
    find_end_of_document,
    format_problem,
    other_format_in,
    read_vocabulary,
    tokenizer_file,
)


def check_data(config: DataConfig, model_vocab_size: int, world: int) -> list[Problem]:
    """Return the problems of `data` that are found in well under a second.

    Args:
        config: the config group.
        model_vocab_size: `model.vocab_size`.
        world: number of data-parallel ranks.
    """
    return gather(data_rules(lambda: config, lambda: model_vocab_size, lambda: world))


def data_rules(
    data: Callable[[], DataConfig], model_vocab_size: Callable[[], int], world: Callable[[], int]
) -> list[Rule]:
    """Return the rules of `check_data` as functions, given functions that return its arguments.

    Rules run separately: a rule that reads an invalid key raises BrokenKeyError and is skipped.
    """
    return [
        lambda: batch_problems(data(), world()),
        lambda: _mixture_problems(data()),
        lambda: bound_problems(data()),
        lambda: _validation_problems(data()),
        lambda: [
            problem for name, source in data().sources.items() for problem in source.problems(f"data.sources.{name}")
        ],
        lambda: _tokenizer_problems(data().tokenizer, model_vocab_size()),
        lambda: _tokenised_problems(data()),
        lambda: _cache_problems(data(), model_vocab_size()),
    ]


def _validation_problems(config: DataConfig) -> Iterator[Problem]:
    fraction, weights = config.validation.fraction, config.validation.weights
    if fraction >= 1:
        text = f"{fraction} leaves nothing to train on. Use less than 1, such as 0.02."
        yield Problem("data.validation.fraction", text)
    trained = config.trained_weights
    if weights is not None and weights.keys() != trained.keys():
        names = f"has weights of {', '.join(weights) or 'no source'}. Give one for each source"
        text = f"{names}{' that is trained on' if config.watched else ''}: {', '.join(trained)}."
        yield Problem("data.validation.weights", text)


def batch_problems(config: DataConfig, world: int) -> list[Problem]:
    """Return the problem of a global batch that `world` data-parallel ranks cannot split into micro-batches, or []."""
    per_pass = config.micro_batch_size * world
    if config.global_batch_size % per_pass == 0:
        return []
    near = max(1, round(config.global_batch_size / per_pass)) * per_pass
    text = (
        f"{config.global_batch_size} sequences cannot be split into micro-batches of data.micro_batch_size="
        f"{config.micro_batch_size} on {world} data-parallel rank{'s' if world > 1 else ''}. "
    )
    per_rank, rest = divmod(config.global_batch_size, world)
    if not rest:  # which leaves the batches as they are
        fitting = max(size for size in range(1, config.micro_batch_size) if per_rank % size == 0)
        text += f"Set data.micro_batch_size={fitting}, or this to a multiple of {per_pass}; nearest: {near}."
    else:
        text += f"It must be a multiple of {per_pass}; nearest: {near}."
    return [Problem("data.global_batch_size", text)]


def _mixture_problems(config: DataConfig) -> list[Problem]:
    if not config.sources:
        return [Problem("data.sources", "is empty. Give at least one source.")]
    if not config.trained_weights:
        return [Problem("data.sources", "has only sources with role=validation. Add at least one source to train on.")]
    return list(config.chosen_mixture.problems("data.mixture", config.trained_weights))


def _tokenised_problems(config: DataConfig) -> Iterator[Problem]:
    names = [name for name, source in config.sources.items() if source.tokenised]
    for name in set(names) & {*config.trained_weights} if config.chosen_mixture.chooses_documents else ():
        text = f"contains tokens, but data.mixture.kind={config.chosen_mixture.kind} needs scores of text. Remove it."
        yield Problem(f"data.sources.{name}", text)
    if names and config.tokenizer.kind == "bpe":
        text = (
            f"is bpe, which is trained here, but {', '.join(f'data.sources.{name}' for name in names)} is already "
            "tokenized. Give the tokenizer it was made with: kind=file, and its path."
        )
        yield Problem("data.tokenizer.kind", text)


def _tokenizer_problems(config: TokenizerConfig, model_vocab_size: int) -> list[Problem]:
    problems = []
    if config.kind != "file":
        for name in ("path", "end_of_document"):
            if getattr(config, name) is not None:
                text = (
                    f"{getattr(config, name)!r} is only read with data.tokenizer.kind=file, and kind is {config.kind}. "
                    "Set data.tokenizer.kind=file, or remove this key."
                )
                problems.append(Problem(f"data.tokenizer.{name}", text))
    if config.kind == "file":
        return problems + _tokenizer_file_problems(config, model_vocab_size)
    if config.kind == "bytes":
        if model_vocab_size < BYTES_VOCAB_SIZE:
            text = f"bytes are {BYTES_VOCAB_SIZE} tokens, but model.vocab_size is {model_vocab_size}. Raise it."
            problems.append(Problem("data.tokenizer.kind", text))
        return problems
    size = config.vocab_size or model_vocab_size
    if size < SMALLEST_BPE_VOCAB_SIZE:
        text = (
            f"{size} is too few: must be at least {SMALLEST_BPE_VOCAB_SIZE}, for 256 bytes and the end of a document."
        )
        problems.append(Problem("data.tokenizer.vocab_size", text))
    if size > model_vocab_size:
        text = f"{size:,} tokens do not fit model.vocab_size={model_vocab_size:,}. Lower one, or raise the other."
        problems.append(Problem("data.tokenizer.vocab_size", text))
    return problems


def _tokenizer_file_problems(config: TokenizerConfig, model_vocab_size: int) -> list[Problem]:
    if not config.path:
        return [Problem("data.tokenizer.path", "kind=file needs the path of a tokenizer.json or of its folder.")]
    file = tokenizer_file(config.path)
    if not os.path.isfile(file):
        other = other_format_in(file.parent) if os.path.isdir(config.path) else None
        instead = "" if other is None else f" {other.name} is there, and {format_problem(other)}."
        return [Problem("data.tokenizer.path", f"there is no file {file}.{instead}")]
    try:
        vocabulary = read_vocabulary(file)
    except (OSError, ValueError) as error:
        return [Problem("data.tokenizer.path", f"{error}.")]
    problems = []
    size = max(vocabulary.values(), default=-1) + 1
    if size > model_vocab_size:
        text = f"{file} has {size:,} tokens, but model.vocab_size is {model_vocab_size:,}. Set model.vocab_size={size}."
        problems.append(Problem("data.tokenizer.path", text))
    if find_end_of_document(vocabulary, config.end_of_document, file) is None:
        wanted = config.end_of_document or " or ".join(END_OF_DOCUMENT_NAMES)
        special = sorted(token for token in vocabulary if token[:1] in "<[" and token[-1:] in ">]" and len(token) > 2)
        text = f"{file} has no token {wanted}. Name the one that ends a document; it has {', '.join(special[:10])}."
        problems.append(Problem("data.tokenizer.end_of_document", text))
    return problems


def _cache_problems(config: DataConfig, model_vocab_size: int) -> list[Problem]:
    """Check that the cache folder is writable and large enough, unless all sources are already cached."""
    cache_dir = cache_dir_of(config)
    text_bytes = 0
    all_read = True
    for name, source_config in config.sources.items():
        source = Source(name, source_config)
        try:
            identity = scan_identity(source, config.tokenizer) if source_config.tokenised else source.identity()
            if read_manifest(product_folder(cache_dir, "scan", identity)) is None:
                all_read = False
                text_bytes += source_config.cached_bytes(source.files)
        except (ConfigError, OSError):  # no such files, which is reported by its own problem
            continue
    if all_read:
        return []
    existing = nearest_existing(cache_dir)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "is not a folder" if not existing.is_dir() else "cannot be written"
        return [Problem("data.cache_dir", f"{cache_dir}: {existing} {what}. Choose a folder that can be written.")]
    problem = disk_problem(cache_dir, token_bytes(text_bytes, config.tokenizer.kind == "bytes", model_vocab_size))
    return [problem] if problem else []


def cache_dir_of(config: DataConfig) -> Path:
    """Return the folder of the token caches, absolute: `data.cache_dir` or the user's. It need not exist."""
    return Path(config.cache_dir).expanduser().absolute() if config.cache_dir else user_cache_dir()
