"""Weights at any path (run, checkpoint, imported or Hugging Face folder), and checks that a run can start from them.

Imports torch only for checkpoints.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.model import ModelConfig, RopeScaling
from lightning_llm.config.weight_folders import (
    EXPECTED,
    HUGGINGFACE,
    IMPORTED,
    INIT_FROM,
    NOT_OF_WEIGHTS,
    TOKENIZER,
    UNNAMED,
    weights_path,
)
from lightning_llm.data.tokens.tokenizer import Tokenizer, bytes_vocabulary, read_vocabulary, tokenizer_file
from lightning_llm.model.weights.folder import Weights, open_huggingface, open_imported
from lightning_llm.run.resume.start import checkpoint_at, sizes_alone
from lightning_llm.tracking.files import run_tokenizer
from lightning_llm.train.checkpoint.manifest import step_folders
from lightning_llm.train.checkpoint.verification import Verify, config_of_run, skipped_lines

FREE = ("max_sequence_length", "rope_theta", "rope_scaling")
"""Keys that may differ from the weights' to continue at another length; the run prints a note at its start."""
NOT_COMPARED = (*NOT_OF_WEIGHTS, "vocab_multiple", "blocks", "layers")
"""Keys that change neither shapes nor the forward pass; `blocks` and `layers` are compared block by block."""
SHOWN_TOKENS = 3
RETAKES = 3
"""Number of attempts to open the newest checkpoint of a run that deletes it in the meantime."""


def open_weights(path: Path, verify: Verify = sizes_alone) -> Weights:
    """Return the weights at `path`: an imported or a Hugging Face folder, a run (its newest checkpoint), a checkpoint.

    `verify` checks the files of a checkpoint.

    Raises:
        ConfigError: there are no weights, or with all their problems.
    """
    if (path / IMPORTED).is_file():
        return open_imported(path)
    if (path / HUGGINGFACE).is_file():
        return open_huggingface(path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ConfigError(Problem(str(path), f"{what}. Give {EXPECTED}."))
    for attempt in range(1, RETAKES + 1):
        there = step_folders(path / "checkpoints")
        try:
            return _of_checkpoint(path, verify)
        except ConfigError as error:
            if all(each.is_dir() for each in there):
                raise
            deleted = error
        if attempt < RETAKES:
            print(
                f"note   the run in {path} deleted its checkpoint while it was being opened: trying the newest",
                file=sys.stderr,
            )
    text = (
        f"deleted its checkpoint {RETAKES} times while it was being opened: it saves faster than checkpoints are "
        "verified. Set its checkpoint.keep_last to at least 2, or use a copy of a checkpoint."
    )
    raise ConfigError(Problem(str(path), text)) from deleted


def _of_checkpoint(path: Path, verify: Verify) -> Weights:
    """Return the weights of the checkpoint at `path`, or of the newest of the run there. Raises ConfigError."""
    checkpoint, skipped = checkpoint_at(path, verify)
    if checkpoint is None:
        what = "contains no checkpoint" if (path / "config.yaml").is_file() else "contains no weights"
        raise ConfigError(Problem(str(path), f"{what}. Give {EXPECTED}."))
    for line in skipped_lines(skipped):
        print(line, file=sys.stderr)
    if not (checkpoint.run_folder / "config.yaml").is_file():
        text = (
            f"not in a run's folder: {checkpoint.run_folder / 'config.yaml'}, which defines the model, is missing. "
            "Give the checkpoint in its run's folder."
        )
        raise ConfigError(Problem(str(checkpoint.folder), text))
    run_tokenizer(checkpoint.run_folder)  # raises if the file was changed
    from lightning_llm.train.checkpoint.weights import CheckpointWeights  # imports torch

    return CheckpointWeights(checkpoint, config_of_run(checkpoint).model)


def begins_anew(config: Config) -> bool:
    """Return whether the run starts at step 0, judging by its folder's names; only then it reads `init_from`."""
    if config.resume == "auto":
        return not step_folders(Path(config.run.dir) / "checkpoints")
    return config.resume is None


def unnamed_problems(config: Config) -> list[Problem]:
    """Return a problem if a preset continues from weights that are not given; nothing may start without them."""
    if config.model.init_from != UNNAMED:
        return []
    text = (
        f"a value must be given, since this preset continues from weights: {EXPECTED}. Or set model.init_from=null to "
        "train from random weights."
    )
    return [Problem(INIT_FROM, text)]


def init_problems(config: Config) -> list[Problem]:
    """Return the reasons why the run cannot start from `model.init_from`; [] if it can, or does not start from weights.

    They are all differences between the model's config and the weights in shape, function and vocabulary.
    """
    if config.model.init_from in (None, UNNAMED) or config.branch_from is not None or not begins_anew(config):
        return []
    try:
        weights = open_weights(weights_path(config.model.init_from))
    except ConfigError as error:
        return list(error.problems)
    problems = list(shape_differences(weights.config, config.model))
    return [*problems, *vocabulary_problems(config, weights)]


SAME = "Set it to that, or remove model=: model.init_from alone uses the shape of the weights."


def shape_differences(
    theirs: ModelConfig, ours: ModelConfig, whose: str = "the weights of model.init_from", same: str = SAME
) -> Iterator[Problem]:
    """Yield a problem for each key of the model `ours` that differs from `theirs`, except for lengths and RoPE.

    `whose`: description of the owner of `theirs`; `same`: the remedy; both for messages.
    """
    kept = [*NOT_COMPARED, "vocab_size", *(FREE if ours.position == "rope" else ())]
    before, now = (
        each.model_dump(exclude=set(kept)) | {"head_dim": each.attention_head_dim} for each in (theirs, ours)
    )
    for key, value in before.items():
        if now[key] != value:
            yield Problem(f"model.{key}", f"is {now[key]!r}, but {value!r} in {whose}. {same}")
    if ours.vocab_size < theirs.vocab_size:
        text = f"must be at least {theirs.vocab_size}, the rows of the weights. {same}"
        yield Problem("model.vocab_size", text, ours.vocab_size)
    if theirs.num_layers != ours.num_layers:
        return
    for index in range(ours.num_layers):
        block, other = (each.block_at(index).model_dump() for each in (ours, theirs))
        if block != other:
            differ = ", ".join(_differing(other, block))
            text = f"block {index} differs from the weights ({differ}). {same}"
            yield Problem("model.layers", text)
            return


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield "KEY is VALUE, but VALUE there" for each differing key, at any depth; of two kinds `kind` alone."""
    keys = ["kind"] if before.get("kind") != now.get("kind") else sorted(before.keys() | now.keys())
    for key in keys:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differing(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} is {new!r}, but {old!r} there"


def vocabulary_problems(config: Config, weights: Weights) -> Iterator[Problem]:
    """Yield conflicts of the data's tokenizer with that of the weights: ids of other tokens, or ids without rows."""
    own, tokenizer = weights.tokenizer, config.data.tokenizer
    if own is None and tokenizer.kind == "bpe":
        text = (
            f"is 'bpe', which would train a new tokenizer, but the weights in {weights.path} need their own, which is "
            f"missing. Add its {TOKENIZER} to their folder, or set data.tokenizer.kind=file data.tokenizer.path=FILE "
            "data.tokenizer.vocab_size=null."
        )
        yield Problem("data.tokenizer.kind", text)
    if own is None:
        return
    take = f"Use theirs: data.tokenizer.kind=file data.tokenizer.path={own} data.tokenizer.vocab_size=null."
    if tokenizer.kind == "bpe":
        text = f"is 'bpe', which would train a new tokenizer, but the weights of model.init_from have one. {take}"
        yield Problem("data.tokenizer.kind", text)
        return
    try:
        known = read_vocabulary(own)
    except (OSError, ValueError) as error:
        yield Problem(str(own), f"{error}.")
        return
    yield from rows_problems(known, weights)
    try:
        given = (
            bytes_vocabulary() if tokenizer.kind == "bytes" else read_vocabulary(tokenizer_file(tokenizer.path or ""))
        )
    except (OSError, ValueError):
        return  # reported by the checks of data
    others = [token for token, index in known.items() if given.get(token) != index]
    if others:
        shown = ", ".join(
            f"{token!r} is {_id(given, token)}, but {known[token]} there" for token in others[:SHOWN_TOKENS]
        )
        text = f"{len(others):,} tokens have other ids in the weights' tokenizer ({shown}). {take}"
        yield Problem("data.tokenizer", text)


def rows_problems(vocabulary: Mapping[str, int], weights: Weights) -> Iterator[Problem]:
    """Yield a problem if the weights' own tokenizer has tokens without a row in the weights."""
    rows = weights.config.vocab_size
    if without := sorted((index, token) for token, index in vocabulary.items() if index >= rows):
        shown = ", ".join(f"{token!r} is id {index}" for index, token in without[:SHOWN_TOKENS])
        text = f"has {len(without):,} tokens without a row in the weights ({shown}; vocab_size is {rows:,}). "
        yield Problem(str(weights.tokenizer), f"{text}Remove these tokens, or use the matching weights.")


def _id(vocabulary: Mapping[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "missing"


def length_note(config: Config, weights: Weights) -> str | None:
    """Return a note about positional settings (length, RoPE) that differ from the weights'; None if none does."""
    changed = [
        f"model.{key} is {_shown(now)}, but {_shown(before)} in the weights"
        for key in FREE
        if (now := getattr(config.model, key)) != (before := getattr(weights.config, key))
    ]
    return f"note   {'; '.join(changed)}" if changed else None


def _shown(value: Any) -> str:
    return str(value.model_dump(exclude_none=True)) if isinstance(value, RopeScaling) else str(value)


def pieces_of_new_tokens(config: Config, weights: Weights, tokenizer_path: Path) -> dict[int, list[int]]:
    """Return for each token id without a row in the weights the ids of its text in their vocabulary, if any.

    Raises:
        ConfigError: there are such ids, but the weights have no tokenizer.
    """
    missing = range(weights.config.vocab_size, config.model.vocab_size)
    if not missing:
        return {}
    if weights.tokenizer is None:
        text = (
            f"is {config.model.vocab_size}, but the weights have {weights.config.vocab_size} rows and no "
            "tokenizer.json, which is needed to initialize the new rows. Add theirs to their folder."
        )
        raise ConfigError(Problem("model.vocab_size", text))
    end = config.data.tokenizer.end_of_document  # the same in both, since existing ids keep their tokens
    try:
        ours, theirs = Tokenizer(tokenizer_path, end), Tokenizer(weights.tokenizer, end)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("data.tokenizer", f"{error}.")) from error
    named = set(read_vocabulary(tokenizer_path).values())
    added = [token for token in missing if token in named]
    pieces = {token: ours.pieces_in(theirs, token) for token in added}
    unused = [theirs.end_of_document]  # for ids without a token, which never occur in text
    return {token: pieces.get(token, unused) for token in missing}
