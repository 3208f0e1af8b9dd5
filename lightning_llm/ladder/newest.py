"""The newest ladder among the sweeps of the outputs folder, for `compare --ladder` without a folder's name."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.sweep import FEWEST_SIZES, FEWEST_TOKENS
from lightning_llm.config.workspace import default_outputs
from lightning_llm.ladder.ledger import FILE


def newest_ladder(*, graded: bool = False) -> Path:
    """Return the folder of the newest sweep whose runs are of several sizes and numbers of tokens.

    Args:
        graded: one with predictions to grade, where there is any.

    Raises:
        ConfigError: there is none.
    """
    root = Path(default_outputs())
    begun: dict[Path, float] = {}
    for file in root.glob("*/*/*/config.yaml"):
        folder = file.parent.parent
        begun[folder] = max(begun.get(folder, 0.0), file.stat().st_mtime)
    newest_first = sorted(begun, key=lambda folder: begun[folder], reverse=True)
    if graded:
        with_ledger = [folder for folder in newest_first if (folder / "compare" / FILE).is_file()]
        if with_ledger:
            return with_ledger[0]
    for folder in newest_first:
        if _is_ladder(folder):
            return folder
    text = (
        f"no run was named, and no sweep in {root} is a ladder, of {FEWEST_SIZES} model sizes and {FEWEST_TOKENS} "
        "token counts. Name its folder, or run one: lightning-llm train -m recipe=sweep/ladder"
    )
    raise ConfigError(Problem("RUN", text))


def _is_ladder(folder: Path) -> bool:
    sizes, tokens = set(), set()
    for file in folder.glob("*/config.yaml"):
        try:
            config: Any = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
            shape = {key: value for key, value in config["model"].items() if key not in ("name", "init_from")}
            counts = (
                config["trainer"]["max_steps"],
                *(config["data"][key] for key in ("global_batch_size", "sequence_length")),
            )
            sizes.add(json.dumps(shape, sort_keys=True, default=str))
            tokens.add(math.prod(map(int, counts)))
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError):
            continue  # no run of a ladder that can be read; another says whether this is one
        if len(sizes) >= FEWEST_SIZES and len(tokens) >= FEWEST_TOKENS:
            return True
    return False
