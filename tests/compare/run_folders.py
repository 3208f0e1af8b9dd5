"""Folders as runs leave them, made of curves that a test chooses."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.__main__ import main
from lightning_llm.base.integrity import ChainHead
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_digest, flatten
from lightning_llm.tracking.files import encode, sealed_records, write_json

NOISE = [0.0004, -0.0003, 0.0001, 0.0006, -0.0005]
VERSIONS = {"python": "3.11.7", "lightning_llm": "0.1.0", "torch": "2.13.0", "lightning": "2.6.6", "mlflow": "3.17.2"}
STEPS, EVERY, STEP_TOKENS = 100, 5, 2048
_composed: dict[tuple[str, ...], dict[str, Any]] = {}


def config_of(*words: str) -> dict[str, Any]:
    """Return a resolved config as `config.yaml` holds it, a fresh copy; composed once for all seeds."""
    rest = tuple(word for word in words if not word.startswith(("seed=", "branch_from=")))
    if rest not in _composed:
        base = ("model=llama_tiny", "data=python", f"trainer.max_steps={STEPS}", "logger=none", "run.name=made")
        _composed[rest] = compose_config([*base, *rest]).model_dump(mode="json")
    seeds = [int(word.removeprefix("seed=")) for word in words if word.startswith("seed=")]
    trunk = next((word.removeprefix("branch_from=") for word in words if word.startswith("branch_from=")), None)
    return {**copy.deepcopy(_composed[rest]), "seed": seeds[0] if seeds else 0, "branch_from": trunk}


def make_run(
    folder: Path,
    *words: str,
    gap: float = 0.0,
    noise: float = 0.0,
    losses: dict[int, Any] | None = None,
    speed: float = 1000.0,
    summary: dict[str, Any] | None = None,
    records: list[dict[str, Any]] | None = None,
    steps: int = STEPS,
    verified: bool = True,
) -> Path:
    """Write a run with a validation loss that falls from 6 to 3 + `noise`, and by `gap` more slowly; return its folder.

    `records`: what is else in the record of a step. `verified`: with seed, digests and hash chain, as RunFolder writes
    them, and not as earlier releases did.
    """
    config = config_of(*words)
    losses = losses or {step: curve(step) + gap * step / STEPS + noise for step in range(EVERY, steps + 1, EVERY)}
    if (summary or {}).get("status", "finished") == "finished":
        config["trainer"]["max_steps"] = max(losses)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.dump(config, Dumper=yaml.CSafeDumper))
    given = {record["step"]: record for record in records or ()}
    lines = []
    seed_loss = 5.0 + config["seed"] / 1000
    for step in range(1, max(losses) + 1):
        common = {"step": step, "tokens": step * STEP_TOKENS, "time": 1000.0 + step}
        line = {**common, "loss": seed_loss, "step_seconds": STEP_TOKENS / speed, "tokens_per_second": speed}
        lines.append({**line, **given.get(step, {})})
        if step in losses:
            lines.append({**common, "val_loss": losses[step], "val_loss/code": losses[step]})
    content = [encode(line) for line in lines]
    (folder / "metrics.jsonl").write_bytes(b"".join(content))
    written = {
        "status": "finished",
        "started_at": "2026-11-21T10:00:00+00:00",
        "host": "here",
        "device": "AMD EPYC, 2 threads",
        "versions": VERSIONS,
        "git": {"sha": "0" * 40, "dirty": False},
        "data_hash": "d" * 32,
        "validation_hash": "v" * 32,
        "threads": 2,
        "tokens_per_second_median": speed,
        "host_memory_peak_bytes": 2**30,
        **(summary or {}),
    }
    written = {key: value for key, value in written.items() if value is not None}
    if verified:
        written |= {"seed": config["seed"], "config_digest": config_digest(flatten(config))}
        if written["status"] != "running":
            written["records"] = sealed_records(ChainHead.over(content), written)
    write_json(folder / "summary.json", written)
    return folder


def rewritten(folder: Path, **summary: Any) -> Path:
    """Write the digests of the changed files of a folder, as its run would have; return the folder.

    `summary`: keys of the summary that change, too; None takes a key out.
    """
    known = {**json.loads((folder / "summary.json").read_text()), **summary}
    config = yaml.load((folder / "config.yaml").read_text(), yaml.CSafeLoader)
    known |= {"seed": config["seed"], "config_digest": config_digest(flatten(config))}
    known = {key: value for key, value in known.items() if value is not None}
    head = ChainHead.over((folder / "metrics.jsonl").read_bytes().splitlines(keepends=True))
    write_json(folder / "summary.json", {**known, "records": sealed_records(head, known)})
    return folder


def curve(step: int) -> float:
    """Return the loss of a run without noise."""
    return 3.0 + 3.0 * math.exp(-step / 20)


NO_MEANING = (
    "run.", "logger.", "launcher.", "resume", "resume_strict", "trainer.max_restarts", "trainer.max_time",
    "trainer.health", "hardware", "cluster", "recipe",
    "checkpoint.", "callbacks.",
    "model.name", "model.parameters_published",
    "data.name", "data.cache_dir", "data.num_workers", "data.tokenize_processes",
    "parallel.name", "parallel.timeout_seconds", "trainer.name",
    "trainer.accelerator", "trainer.compile", "trainer.validate_every_steps",
    "data.sources.code.path", "data.sources.prose.path", "data.tokenizer.path",
)  # fmt: skip
"""Config keys that do not affect learning, listed in docs/reference/compare.md; `data_hash` identifies the data."""


def make_sweep(folder: Path, gaps: dict[str, float], seeds: int = 3, **more) -> Path:
    number = 0
    for place, (words, gap) in enumerate(gaps.items()):
        for seed in range(seeds):
            noise = 0.1 * seed + NOISE[(seed + 2 * place) % len(NOISE)]
            make_run(folder / str(number), *words.split(), f"seed={seed}", gap=gap, noise=noise, **more)
            number += 1
    return folder


def verdicts(capsys, *words, expect=0) -> dict:
    """Run `compare --json`; return its output, with stderr, by key."""
    assert main(["compare", "--json", *map(str, words)]) == expect
    out, err = capsys.readouterr()
    found = json.loads(out)
    return {**found, "by_name": {row["name"]: row for row in found["verdicts"]}, "stderr": err}


def refusal(capsys, *words, verb: str = "compare") -> str:
    """Return the problems that `compare WORDS`, or another verb, reports."""
    assert main([verb, *map(str, words)]) == 2
    return capsys.readouterr().err
