"""Weights at a path, whatever lies there, and whether a run can start from them. Torch only for a checkpoint."""

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
from lightning_llm.run.resume.own_checkpoints import config_of_run
from lightning_llm.run.resume.start import checkpoint_at, sizes_alone
from lightning_llm.tracking.files import run_tokenizer
from lightning_llm.train.checkpoint.manifest import step_folders
from lightning_llm.train.checkpoint.verification import Verify, skipped_lines

FREE = ("max_sequence_length", "rope_theta", "rope_scaling")
"""Keys that may differ from the weights', which go on at another length; the run says so as it starts."""
NOT_COMPARED = (*NOT_OF_WEIGHTS, "vocab_multiple", "blocks", "layers")
"""Keys that neither shape nor forward pass depend on; of blocks, what each comes to is compared."""
SHOWN_TOKENS = 3
RETAKES = 3
"""How often the newest checkpoint of a run is taken that deletes it meanwhile."""


def open_weights(path: Path, verify: Verify = sizes_alone) -> Weights:
    """Return the weights at `path`: an imported or a Hugging Face folder, a run (its newest checkpoint), a checkpoint.

    Raises:
        ConfigError: there are none, or with all that is wrong with them; `verify` looks at a checkpoint's files.
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
                f"note   the run in {path} deleted a checkpoint while it was opened: its newest is taken",
                file=sys.stderr,
            )
    text = (
        f"deleted its checkpoint {RETAKES} times while it was opened: it saves faster than they are verified. Set its "
        "checkpoint.keep_last=2 or higher, or copy a checkpoint and name the copy."
    )
    raise ConfigError(Problem(str(path), text)) from deleted


def _of_checkpoint(path: Path, verify: Verify) -> Weights:
    """Return the weights of the checkpoint at `path`, or of the newest of the run there. Raises ConfigError."""
    checkpoint, passed_over = checkpoint_at(path, verify)
    if checkpoint is None:
        what = "holds no checkpoint, so no weights" if (path / "config.yaml").is_file() else "holds no weights"
        raise ConfigError(Problem(str(path), f"{what}. Give {EXPECTED}."))
    for line in skipped_lines(passed_over):
        print(line, file=sys.stderr)
    if not (checkpoint.run_folder / "config.yaml").is_file():
        text = f"belongs to no run: {checkpoint.run_folder / 'config.yaml'} is missing, which says its model."
        raise ConfigError(Problem(str(checkpoint.folder), text))
    run_tokenizer(checkpoint.run_folder)  # raises where it is not the run's own
    from lightning_llm.train.checkpoint.weights import CheckpointWeights  # imports torch

    return CheckpointWeights(checkpoint, config_of_run(checkpoint).model)


def begins_anew(config: Config) -> bool:
    """Return whether the run starts at step 0, as far as its folder's names tell: only then it reads `init_from`."""
    if config.resume == "auto":
        return not step_folders(Path(config.run.dir) / "checkpoints")
    return config.resume is None


def unnamed_problems(config: Config) -> list[Problem]:
    """Return that a recipe continues from weights which nobody has named: no run may begin, nor train a tokenizer."""
    if config.model.init_from != UNNAMED:
        return []
    text = (
        f"a value must be given, since this recipe continues from weights: {EXPECTED}. Or set model.init_from=null, "
        "which trains from random weights."
    )
    return [Problem(INIT_FROM, text)]


def init_problems(config: Config) -> list[Problem]:
    """Return why the run cannot start from `model.init_from`: all differences of shape, function and vocabulary."""
    if config.model.init_from in (None, UNNAMED) or config.branch_from is not None or not begins_anew(config):
        return []
    try:
        weights = open_weights(weights_path(config.model.init_from))
    except ConfigError as error:
        return list(error.problems)
    problems = list(shape_differences(weights.config, config.model))
    return [*problems, *vocabulary_problems(config, weights)]


SAME = "Set it to that, or leave model= out: model.init_from alone takes the shape of the weights."


def shape_differences(
    theirs: ModelConfig, ours: ModelConfig, whose: str = "the weights of model.init_from", same: str = SAME
) -> Iterator[Problem]:
    """Yield the keys by which the model is another than `theirs`; `whose` that is, and `same`: what to do about it."""
    kept = [*NOT_COMPARED, "vocab_size", *(FREE if ours.position == "rope" else ())]
    before, now = (
        each.model_dump(exclude=set(kept)) | {"head_dim": each.attention_head_dim} for each in (theirs, ours)
    )
    for key, value in before.items():
        if now[key] != value:
            yield Problem(f"model.{key}", f"is {now[key]!r}, and {value!r} in {whose}. {same}")
    if ours.vocab_size < theirs.vocab_size:
        text = f"is {ours.vocab_size}, and the weights have {theirs.vocab_size} rows. {same}"
        yield Problem("model.vocab_size", text)
    if theirs.num_layers != ours.num_layers:
        return
    for index in range(ours.num_layers):
        block, other = (each.block_at(index).model_dump() for each in (ours, theirs))
        if block != other:
            differ = ", ".join(sorted(key for key in block if block[key] != other[key]))
            text = f"block {index} is another than in the weights ({differ}): {block}, and {other} there. {same}"
            yield Problem("model.layers", text)
            return


def vocabulary_problems(config: Config, weights: Weights) -> Iterator[Problem]:
    """Yield what the data's tokenizer says otherwise than the weights' own: ids that mean other tokens, or no rows."""
    own, tokenizer = weights.tokenizer, config.data.tokenizer
    if own is None and tokenizer.kind == "bpe":
        text = (
            f"is 'bpe', which trains a tokenizer on the data, and the weights in {weights.path} know another, which is "
            f"not there. Put its {TOKENIZER} beside them, or name it: data.tokenizer.kind=file "
            "data.tokenizer.path=FILE data.tokenizer.vocab_size=null."
        )
        yield Problem("data.tokenizer.kind", text)
    if own is None:
        return
    take = f"Take theirs: data.tokenizer.kind=file data.tokenizer.path={own} data.tokenizer.vocab_size=null."
    if tokenizer.kind == "bpe":
        text = (
            f"is 'bpe', which trains a tokenizer on the data, and the weights of model.init_from know another. {take}"
        )
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
        return  # said by the rules of data
    others = [token for token, index in known.items() if given.get(token) != index]
    if others:
        shown = ", ".join(
            f"{token!r} is {_id(given, token)}, and {known[token]} there" for token in others[:SHOWN_TOKENS]
        )
        text = f"of {len(others):,} tokens of the weights' own tokenizer the ids differ ({shown}). {take}"
        yield Problem("data.tokenizer", text)


def rows_problems(vocabulary: Mapping[str, int], weights: Weights) -> Iterator[Problem]:
    """Yield that the weights' own tokenizer has tokens for which they have no row."""
    rows = weights.config.vocab_size
    if without := sorted((index, token) for token, index in vocabulary.items() if index >= rows):
        shown = ", ".join(f"{token!r} is id {index}" for index, token in without[:SHOWN_TOKENS])
        text = f"has {len(without):,} tokens for which the weights have no row ({shown}; vocab_size is {rows:,}). "
        yield Problem(str(weights.tokenizer), f"{text}Take those tokens out, or bring the weights that belong to it.")


def _id(vocabulary: Mapping[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "missing"


def length_note(config: Config, weights: Weights) -> str | None:
    """Return what to say where the run goes on with other positions than the weights were trained with."""
    changed = [
        f"model.{key} is {_shown(now)}, and {_shown(before)} in the weights"
        for key in FREE
        if (now := getattr(config.model, key)) != (before := getattr(weights.config, key))
    ]
    return f"note   {'; '.join(changed)}" if changed else None


def _shown(value: Any) -> str:
    return str(value.model_dump(exclude_none=True)) if isinstance(value, RopeScaling) else str(value)


def pieces_of_new_tokens(config: Config, weights: Weights, tokenizer_path: Path) -> dict[int, list[int]]:
    """Return, for each token id that the weights have no row for, the ids its text has in their vocabulary, if any.

    Raises:
        ConfigError: there are such ids, and the weights bring no tokenizer.
    """
    missing = range(weights.config.vocab_size, config.model.vocab_size)
    if not missing:
        return {}
    if weights.tokenizer is None:
        text = (
            f"is {config.model.vocab_size}, and the weights have {weights.config.vocab_size} rows and no "
            "tokenizer.json: nothing says what pieces the new tokens are made of. Put theirs beside them."
        )
        raise ConfigError(Problem("model.vocab_size", text))
    end = config.data.tokenizer.end_of_document  # of both: ids that the weights know keep their tokens
    try:
        ours, theirs = Tokenizer(tokenizer_path, end), Tokenizer(weights.tokenizer, end)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("data.tokenizer", f"{error}.")) from error
    named = set(read_vocabulary(tokenizer_path).values())
    added = [token for token in missing if token in named]
    pieces = {token: ours.pieces_in(theirs, token) for token in added}
    unused = [theirs.end_of_document]  # of ids that name no token, which no text ever has
    return {token: pieces.get(token, unused) for token in missing}
