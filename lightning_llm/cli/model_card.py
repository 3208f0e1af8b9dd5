"""Model card of an exported folder: recipe, data and loss curves of the run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_llm.base.version import __version__
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.data import SourceConfig
from lightning_llm.data.report import planned_phases
from lightning_llm.model.flops import count_parameters
from lightning_llm.model.weights.folder import Weights
from lightning_llm.plan.resolve import coverage_of
from lightning_llm.tracking.files import read_records, summary_of
from lightning_llm.tracking.final_figures import draw_losses
from lightning_llm.tracking.sweep_file import title_of

CURVES = "loss.png"


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
    """Write README.md into `folder`, and for a run with step metrics its loss curves up to `step`."""
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
