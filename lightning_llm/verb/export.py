"""The verb `export`: a run's or a checkpoint's weights as a folder that transformers loads, with a model card."""

import argparse
import json
from pathlib import Path
from typing import Any

from lightning_llm.config.compose import load_config
from lightning_llm.config.from_weights import HUGGINGFACE, run_of
from lightning_llm.config.schema import Config
from lightning_llm.data.tokenizer import Tokenizer
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.integrity import digest_of_file
from lightning_llm.model.flops import count_parameters
from lightning_llm.model.interop.families import architecture
from lightning_llm.model.weights.convert import as_huggingface
from lightning_llm.model.weights.folder import TOKENIZER, Weights, open_huggingface
from lightning_llm.model.weights.write import output_problems, whole_folder, write_tensors
from lightning_llm.record.files import summary_of
from lightning_llm.run.weights import open_weights
from lightning_llm.train.checkpoint.manifest import content_damage, step_of
from lightning_llm.verb.import_weights import SIDE_FILES, difference_line, hand_on
from lightning_llm.verb.model_card import write_card
from lightning_llm.verb.parity import AnotherModelError, parity_of, parity_problems

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16"}


def export(arguments: argparse.Namespace) -> int:
    """Write the folder, compare what transformers makes of it with our own logits, print both; return 0, or 1."""
    output = Path(arguments.output).expanduser().absolute()
    path = Path(arguments.path).expanduser().absolute()
    problems: list[Problem] = []
    weights, run, config, tensors, entries = None, None, None, [], {}
    try:
        weights = open_weights(path, content_damage)
        run = run_of(weights.path)
        if run is None:
            weights.digests()  # a checkpoint's were looked at as it was opened
        config = None if run is None else load_config(run / "config.yaml", [])
        entries = _entries(weights, config, arguments.dtype)
        tensors = as_huggingface(weights, weights.config, arguments.dtype)
    except ConfigError as error:
        problems += error.problems
    problems += output_problems(output, path, arguments.force, sum(each.size_bytes for each in tensors))
    if problems or weights is None:
        raise ConfigError(problems)
    skipped = "--no-parity" if arguments.no_parity else "; ".join(map(str, parity_problems(weights.config)))
    total = count_parameters(weights.config).total
    print(f"read         {weights.path}\narchitecture {entries['architectures'][0]}, {total:,} parameters", flush=True)
    logits = f"not compared with transformers ({skipped})"
    try:
        with whole_folder(output) as partial:
            write_tensors(partial, tensors)
            _write_json(partial / HUGGINGFACE, entries)
            _write_tokenizer(partial, weights, config)
            if not skipped:
                parity = parity_of(partial, open_huggingface(partial))
                logits = difference_line(parity)
                if not parity.holds:
                    raise AnotherModelError(logits)
            step = step_of(weights.path) if run is not None else None
            write_card(partial, weights, run, config, step, entries["architectures"][0], arguments.dtype, logits)
    except AnotherModelError as error:
        return error.report()
    print(f"logits       {logits}\nwritten      {output}")
    return 0


def _entries(weights: Weights, config: Config | None, dtype: str) -> dict[str, Any]:
    """Return the content of config.json. Raises ConfigError where no architecture of transformers is the model's."""
    try:
        family = architecture(weights.config)
    except ConfigError as error:
        text = (
            "There is no folder to make of it for transformers; its weights remain where they are, in "
            f"{weights.path}, and model.init_from takes them from there. An installed package "
            "may add an Architecture for its kinds (docs/weights.md)."
        )
        raise ConfigError([Problem(each.key, f"{each.text} {text}") for each in error.problems]) from error
    entries = {**family.entries(weights.config), "dtype": TORCH_NAMES[dtype], "torch_dtype": TORCH_NAMES[dtype]}
    if weights.tokenizer is not None:
        end = _end_of_document(weights, config)
        entries |= {"eos_token_id": end, "bos_token_id": None}
    return entries


def _end_of_document(weights: Weights, config: Config | None) -> int | None:
    named = None if config is None else config.data.tokenizer.end_of_document
    try:
        return None if weights.tokenizer is None else Tokenizer(weights.tokenizer, named).end_of_document
    except (OSError, ValueError):
        return None


def _write_tokenizer(folder: Path, weights: Weights, config: Config | None) -> None:
    """Write tokenizer.json, what transformers needs beside it, and how to generate.

    Files that came with the weights that a run started from are handed on where its tokenizer is still theirs.
    """
    if weights.tokenizer is None:
        return
    hand_on(weights.tokenizer.parent, folder, (TOKENIZER,))
    origin = _origin_of_tokenizer(weights)
    if origin is not None:
        hand_on(origin, folder, [name for name in SIDE_FILES if name != TOKENIZER])
    end = _end_of_document(weights, config)
    if not (folder / "tokenizer_config.json").exists():
        named = None if end is None else Tokenizer(folder / TOKENIZER).token(end)
        length = weights.config.max_sequence_length
        values = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
        _write_json(folder / "tokenizer_config.json", values | ({} if named is None else {"eos_token": named}))
    if not (folder / "generation_config.json").exists():
        _write_json(folder / "generation_config.json", {"eos_token_id": end} if end is not None else {})


def _origin_of_tokenizer(weights: Weights) -> Path | None:
    """Return the folder that has the tokenizer's other files: the weights' own, or that of those a run started from."""
    run = run_of(weights.path)
    if run is None:
        return weights.path
    named = (summary_of(run).get("init") or {}).get("path")
    origin = None if named is None else Path(named)
    if origin is None or weights.tokenizer is None or not (origin / TOKENIZER).is_file():
        return None
    return origin if digest_of_file(origin / TOKENIZER) == digest_of_file(weights.tokenizer) else None


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
