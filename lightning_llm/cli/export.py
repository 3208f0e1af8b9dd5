"""The verb `export`: write the weights of a run or checkpoint as a transformers folder with a model card.

The card (README.md) has the recipe, the data and the loss curves of the run.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_llm.base import __version__
from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.base.integrity import digest_of_file, parse_object
from lightning_llm.cli.import_weights import (
    SIDE_FILES,
    AnotherModelError,
    Parity,
    check_accepted,
    copy_files,
    parity_of,
    parity_problems,
    tokenizer_problems,
)
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.data import SourceConfig
from lightning_llm.config.weight_folders import (
    EOS,
    GENERATION,
    HUGGINGFACE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_ids,
    run_of,
)
from lightning_llm.data.report import planned_phases
from lightning_llm.data.tokens.tokenizer import Tokenizer, read_vocabulary
from lightning_llm.model.flops import count_parameters
from lightning_llm.model.interop.families import architecture
from lightning_llm.model.weights.folder import Weights, open_huggingface
from lightning_llm.model.weights.write import as_huggingface, output_problems, undo_killed, whole_folder, write_tensors
from lightning_llm.plan.resolve import coverage_of
from lightning_llm.run.code_weights import CODES, CodeWeights, as_codes, quantization_entry
from lightning_llm.run.resume.weights import open_weights
from lightning_llm.tracking.files import read_records, summary_of
from lightning_llm.tracking.final_figures import draw_losses
from lightning_llm.tracking.sweep_file import title_of
from lightning_llm.train.checkpoint.manifest import step_of
from lightning_llm.train.checkpoint.verification import content_damage

CURVES = "loss.png"
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16"}


def export(arguments: argparse.Namespace) -> int:
    """Write the folder and compare transformers' logits with ours; return 0, or 1 if they differ.

    Raises:
        ConfigError: the weights cannot be read or exported, or the output cannot be written.
    """
    output = Path(arguments.output).expanduser().absolute()
    path = Path(arguments.path).expanduser().absolute()
    problems: list[Problem] = []
    weights, run, config, tensors, entries = None, None, None, [], {}
    with gathered(problems):
        weights = open_weights(path, content_damage)
        run = run_of(weights.path)
        weights.verify()
        problems += tokenizer_problems(weights)
        config = None if run is None else load_config(run / "config.yaml", [])
        entries = _entries(weights, config, arguments.dtype)
        check_accepted(entries)
        if arguments.codes:
            recipe = None if config is None else config.precision
            weights = CodeWeights(weights, CODES[arguments.codes], recipe)
            tensors, entries = as_codes(weights, arguments.dtype), entries | quantization_entry(weights)
        else:
            tensors = as_huggingface(weights, weights.config, arguments.dtype)
    with gathered(problems):
        for line in undo_killed(output):
            print(line, file=sys.stderr)
    problems += output_problems(output, path, arguments.force, sum(each.size_bytes for each in tensors))
    if problems or weights is None:
        raise ConfigError(problems)
    missing = parity_problems(weights.config, codes=bool(arguments.codes))
    skipped = "--no-parity" if arguments.no_parity else "; ".join(map(str, missing))
    total = count_parameters(weights.config).total
    print(f"read         {weights.path}\narchitecture {entries['architectures'][0]}, {total:,} parameters", flush=True)
    for note in weights.notes:
        print(note, flush=True)
    logits = f"not compared with transformers ({skipped})"
    try:
        with whole_folder(output, arguments.force) as partial:
            write_tensors(partial, tensors)
            _write_json(partial / HUGGINGFACE, entries)
            _write_tokenizer(partial, weights, config)
            if not skipped:
                parity = _parity(partial, weights)
                logits = parity.line
                if not parity.holds:
                    raise AnotherModelError(logits)
            step = step_of(weights.path) if run is not None else None
            write_card(partial, weights, run, config, step, entries["architectures"][0], arguments.dtype, logits)
    except AnotherModelError as error:
        return error.report()
    print(f"logits       {logits}\nwritten      {output}")
    return 0


def _parity(folder: Path, weights: Weights) -> Parity:
    """Compare the written folder with transformers; of codes, our numbers of them with its reading."""
    if isinstance(weights, CodeWeights):
        return parity_of(folder, weights, codes=True)
    return parity_of(folder, open_huggingface(folder))


def _entries(weights: Weights, config: Config | None, dtype: str) -> dict[str, Any]:
    """Return the content of config.json. Raises ConfigError if no architecture of transformers fits the model."""
    try:
        family = architecture(weights.config)
    except ConfigError as error:
        text = (
            f"The model cannot be exported to transformers. model.init_from={weights.path} can still load its weights. "
            "An installed package may add an Architecture for its kinds (docs/howto/import_export.md)."
        )
        raise ConfigError([replace(each, text=f"{each.text} {text}") for each in error.problems]) from error
    entries = {**family.entries(weights.config), "dtype": TORCH_NAMES[dtype], "torch_dtype": TORCH_NAMES[dtype]}
    if weights.tokenizer is not None:
        entries |= {EOS: _eos(_ends(weights, config)), "bos_token_id": None}
    return entries


def _ends(weights: Weights, config: Config | None) -> tuple[int, ...]:
    """Return the token ids that end a text: from the weights' files, else from the run's tokenizer, if any."""
    if weights.end_tokens or weights.tokenizer is None:
        return weights.end_tokens
    named = None if config is None else config.data.tokenizer.end_of_document
    try:
        return (Tokenizer(weights.tokenizer, named).end_of_document,)
    except (OSError, ValueError):
        return ()


def _eos(ids: Sequence[int]) -> int | list[int] | None:
    """Return `ids` in the form of transformers' files: None, one id or a list."""
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _write_tokenizer(folder: Path, weights: Weights, config: Config | None) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json.

    Tokenizer files of the weights that a run started from are copied if the run still uses their tokenizer.
    """
    if weights.tokenizer is None:
        return
    copy_files(weights.tokenizer.parent, folder, (TOKENIZER,))
    origin = _origin_of_tokenizer(weights)
    if origin is not None:
        copy_files(origin, folder, [name for name in SIDE_FILES if name != TOKENIZER])
    ends = _ends(weights, config)
    if not (folder / TOKENIZER_CONFIG).exists():
        eos = _first_token(folder / TOKENIZER, ends)
        values = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": weights.config.max_sequence_length}
        _write_json(folder / TOKENIZER_CONFIG, values | ({} if eos is None else {"eos_token": eos}))
    write_generation(folder / GENERATION, ends)


def _first_token(file: Path, ids: Sequence[int]) -> str | None:
    """Return the first token of `ids` that the tokenizer has; None if it has none or cannot be read."""
    try:
        tokens = {index: token for token, index in read_vocabulary(file).items()}
    except (OSError, ValueError):
        return None
    return next((tokens[each] for each in ids if each in tokens), None)


def write_generation(file: Path, ends: Sequence[int]) -> None:
    """Write generation_config.json. An existing `file` is kept; `ends` are added if it contains none of them."""
    try:
        known = parse_object(file.read_bytes()) if file.exists() else {}
        listed = read_ids(known.get(EOS))
    except ValueError as error:
        text = f"{error}, in the folder that the run started from. Fix it there, or move it away."
        raise ConfigError(Problem(file.name, text)) from error
    if not file.exists() or (ends and not set(ends) & set(listed)):
        _write_json(file, known | ({EOS: _eos([*ends, *listed])} if ends else {}))


def _origin_of_tokenizer(weights: Weights) -> Path | None:
    """Return the folder of the tokenizer's other files: that of the weights, or of those that the run started from."""
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


def write_card(
    folder: Path,
    weights: Weights,
    run: Path | None,
    config: Config | None,
    step: int | None,
    architecture: str,
    dtype: str,
    logits: str,
) -> None:
    """Write the model card README.md into `folder`, and the loss curves up to `step` if the weights are of a run.

    Args:
        folder: the exported folder.
        weights: the exported weights.
        run: folder of their run; None if they are not of a run.
        config: config of the run.
        step: optimizer step of the weights.
        architecture: transformers' name of the architecture.
        dtype: dtype of the written tensors.
        logits: result of the comparison of logits, as text.
    """
    name = weights.config.name if run is None else run.name
    facts = {
        "architecture": architecture,
        "parameters": f"{count_parameters(weights.config).total:,}",
        "dtype": dtype,
        "vocabulary": f"{weights.config.vocab_size:,}",
        "longest sequence": f"{weights.config.max_sequence_length:,} tokens",
        "logits": logits,
    }
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "---", "", f"# {name}", ""]
    lines += [f"Exported by lightning-llm {__version__}.", "", *_table(facts)]
    if run is not None and config is not None and step is not None:
        lines += list(_run_lines(folder, run, config, step))
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run_lines(folder: Path, run: Path, config: Config, step: int) -> Iterator[str]:
    summary = _summary(run)
    records = [each for each in _records(run) if each["step"] <= step]
    yield from ["", "## Recipe", "", *_table(_recipe(config, summary, step))]
    yield from ["", "## Data", ""]
    yield from ["| source | weight | read by | from |", "|---|---|---|---|"]
    for name, source in config.data.sources.items():
        if source.role is None:
            yield f"| {name} | {source.weight:g} | {source.loader} | {_origin(source)} |"
    for phase in planned_phases(config.data, config.trainer.max_steps):
        drawn = ", ".join(f"{count:,} of {name}" for name, count in phase["drawn_tokens"].items())
        yield f"\nPhase {phase['name']}, steps {phase['first_step']:,} to {phase['last_step']:,}: {drawn}."
    if summary.get("data_hash"):
        yield f"\ndata_hash of the tokens: `{summary['data_hash']}`."
    if losses := _losses(records):
        yield from ["", "## Losses", "", *_table(losses)]
    if records:
        draw_losses(records, folder / CURVES, f"{title_of(run)}, up to step {step}")
        yield from ["", f"![losses by step]({CURVES})"]


def _origin(source: SourceConfig) -> str:
    """Return the origin of a source, without local folder names."""
    keys = source.model_dump()
    path = str(keys.get("path") or "")
    name = path.rstrip("/").rpartition("/")[2] if source.is_local(path) else path
    return name or str(keys.get("part") or "")


def _recipe(config: Config, summary: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the settings of the training by name."""
    init = summary.get("init") or {}
    started = "random weights"
    if init:
        started = f"{_weights_name(Path(init['path']))} ({init['kind']}, digest {init['digest']})"
    schedule, highest = config.schedule.relative_to(config.optim.learning_rate), config.optim.learning_rate
    tokens = step * config.data.global_batch_size * config.data.sequence_length
    versions = summary.get("versions") or {}
    return {
        "started from": started,
        "steps": f"{step:,} of {config.trainer.max_steps:,}",
        "tokens": f"{tokens:,}, {config.data.global_batch_size * config.data.sequence_length:,} per step",
        "precision": _precision(config),
        "optimizer": f"{config.optim.name}, learning rate {highest * schedule.peak:g}",
        "schedule": config.schedule.name,
        "algorithm": config.chosen_algorithm.name,
        "layout": config.parallel.name,
        "seed": config.seed,
        "recipe": config.recipe or "none",
        "device": summary.get("device", "unknown"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or "unknown",
        "code": summary.get("code_hash", "unknown"),
    }


def _precision(config: Config) -> str:
    """Return the precision recipe's name and its coverage of the model."""
    covered = coverage_of(config)
    return f"{config.precision.name}{f'{covered.suffix}: {covered.text}' if covered else ''}"


def _weights_name(path: Path) -> str:
    """Return the name of the weights at `path`; RUN/step=N for a checkpoint."""
    return f"{path.parent.parent.name}/{path.name}" if path.parent.name == "checkpoints" else path.name


def _losses(records: list[dict[str, Any]]) -> dict[str, str]:
    """Return the last losses in the step metrics, in nats per token, with their steps."""
    found: dict[str, str] = {}
    for record in records:
        for key, value in record.items():
            if (key == "loss" or key.startswith("val_loss")) and isinstance(value, float):
                found[key] = f"{value:.4f} (step {record['step']})"
    return found


def _summary(run: Path) -> dict[str, Any]:
    try:
        return summary_of(run)
    except ValueError:  # damaged: the card is shorter, the weights are not affected
        return {}


def _records(run: Path) -> list[dict[str, Any]]:
    try:
        return list(read_records(run / "metrics.jsonl"))
    except (OSError, ValueError):  # missing or damaged
        return []


def _table(facts: Mapping[str, Any]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
