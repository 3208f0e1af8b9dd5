"""Golden files: a recipe's first steps, its keys and hashes, and the origin of the numbers. JSON, to be committed.

A list of numbers is one line, so that a diff shows which parameter moved.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.runs.differences import FREE, LAYOUT, ROUNDING
from lightning_llm.config.config_hash import below, flatten, is_data_path, is_observer, training_hash
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.schema import Config
from lightning_llm.golden.curve import Curve, Noise
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.describe import layout_facts
from lightning_llm.plan.resolve import Plan

FORMAT = 1
"""Version of the file format. A file with another version was written by another release."""
FOLDER = "golden"
"""Default folder of golden files below the working directory: with the user's recipes, in their git."""
BY_CONTENT = ("model.init_from", "distil.teachers")
"""Keys with paths of inputs; their content is identified by digests in `origin`."""
LAYOUT_KEYS = ("parallel.", *ROUNDING)
"""Keys that change the order of sums and the number of ranks, but not the recipe."""


@dataclass(frozen=True)
class Golden:
    """Content of a golden file.

    `hashes`: of the config, of its training keys, of the precision recipe. `config`: the dotted keys of the recipe,
    without paths, names and nulls; `layout`: those of ranks and the order of sums. `bitwise`: whether the layout trains
    to the bits of one rank. `origin`: versions, device, fingerprint, code and data
    (`tracking.provenance.origin_of`). `noise`: the scatter of repeats; None where there were none.
    """

    recipe: str | None
    hashes: dict[str, str]
    config: dict[str, Any]
    layout: dict[str, Any]
    bitwise: bool
    origin: dict[str, Any]
    curve: Curve
    noise: Noise | None = None

    @classmethod
    def of(cls, plan: Plan, origin: Mapping[str, Any], curve: Curve, noise: Noise | None = None) -> "Golden":
        """Return the content of a golden file from the run's plan, its `origin` and the `curve` of its first steps."""
        config, layout = recipe_keys(plan.config), layout_keys(plan)
        hashes = {
            "config": plan.identity,
            "training": training_hash(plan.config),
            "precision": plan.config.precision.recipe_hash,
        }
        bitwise = bool(layout_facts(plan)["bitwise"])
        return cls(plan.config.recipe, hashes, config, layout, bitwise, _plain(origin), curve, noise)

    def first(self, steps: int) -> "Golden":
        """Return the content as if only the first `steps` steps had been recorded."""
        return replace(self, curve=self.curve.first(steps), noise=self.noise.first(steps) if self.noise else None)

    def as_data(self) -> dict[str, Any]:
        """Return the content of the file as JSON data."""
        own = {"format": FORMAT, "recipe": self.recipe, "steps": self.curve.steps, "hashes": self.hashes}
        keys = {"config": self.config, "layout": self.layout, "bitwise": self.bitwise, "origin": self.origin}
        return {**own, **keys, "curve": self.curve.as_data(), "noise": None if not self.noise else self.noise.as_data()}


def default_file(config: Config) -> Path:
    """Return golden/NAME.json with the name of the preset, or of the model without a preset."""
    return Path(FOLDER, (config.recipe or config.model.name).replace("/", "-") + ".json")


def recipe_keys(config: Config) -> dict[str, Any]:
    """Return {dotted key: value} of the config keys that define the recipe: no paths, names or layout."""
    acting = tuple(f"callbacks.{name}." for name, node in config.callbacks.items() if node and not is_observer(node))
    free = (*FREE, *LAYOUT_KEYS, *BY_CONTENT)
    flat = flatten(config.model_dump())
    kept = {key: value for key, value in flat.items() if below(key, acting) or not below(key, free)}
    return _plain({key: value for key, value in kept.items() if value is not None and not is_data_path(key)})


def layout_keys(plan: Plan) -> dict[str, Any]:
    """Return {dotted key: value} of `LAYOUT_KEYS`, with the parallel degrees that the plan derived."""
    flat = flatten(plan.config.model_dump())
    kept = {key: value for key, value in flat.items() if below(key, LAYOUT_KEYS) and not below(key, FREE)}
    kept |= {f"parallel.{axis}": degree for axis, degree in plan.degrees.by_axis.items()}
    alone = (f"parallel.{axis}" for axis in AXES.folded if plan.degrees.ranks(axis) == 1)
    places = ("trainer.devices", "world", *alone)
    return _plain({key: value for key, value in kept.items() if value is not None and key not in places})


def is_bitwise_key(key: str) -> bool:
    """Return whether layouts that train to the bits of a single rank still do if they differ in `key`."""
    return below(key, LAYOUT)


def place_problems(file: Path, *, replace: bool) -> list[Problem]:
    """Return why a golden file cannot be written to `file`; [] if it can. Called before the steps are run.

    `replace`: an existing file may be overwritten.
    """
    if file.exists() and not replace:
        return [Problem("--file", f"{file} already exists. Check against it, choose another file, or add --force.")]
    folder = next(each for each in file.absolute().parents if each.exists())
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        return [Problem("--file", f"{file} cannot be written. Choose a file in a writable folder.")]
    return []


def write_golden(golden: Golden, file: Path) -> None:
    """Write `golden` to `file` atomically; create its folder if it is missing.

    Raises:
        ConfigError: it cannot be written.
    """
    partial = file.with_name(file.name + ".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(_text(golden.as_data()) + "\n", encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        raise ConfigError(Problem("--file", f"{file} cannot be written ({error.strerror}). Choose another.")) from error


def read_golden(file: Path) -> Golden:
    """Return the content of a golden file.

    Raises:
        ConfigError: there is none, it is damaged, or of another format.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(data, dict) and data.get("format") != FORMAT:
            text = f"has format {data.get('format')!r}, and this release reads {FORMAT}. Record it anew: --force."
            raise ConfigError(Problem(str(file), text))
        noise = Noise.from_data(data["noise"]) if data["noise"] else None
        keys = {key: data[key] for key in ("recipe", "hashes", "config", "layout", "bitwise", "origin")}
        golden = Golden(**keys, curve=Curve.from_data(data["curve"]), noise=noise)
        if noise and not all(each is None or each.is_like(golden.curve) for each in (noise.mean, noise.sd)):
            raise ValueError("its noise does not match its curve")
        return golden
    except FileNotFoundError as error:
        text = "is not there. Record it first: lightning-llm golden record, with the same words; or name it by --file."
        raise ConfigError(Problem(str(file), text)) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        text = (
            f"is no golden file, or a damaged one ({type(error).__name__}: {error}). Bring it back, or record it anew."
        )
        raise ConfigError(Problem(str(file), text)) from error


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` as JSON gives them back, without credentials in addresses."""
    return {key: _redacted(each) for key, each in json.loads(json.dumps(dict(values), default=str)).items()}


def _redacted(value: Any) -> Any:
    return redact_uri(value) if isinstance(value, str) else value


def _text(value: Any, indent: str = "") -> str:
    """Return `value` as JSON with a line for each key, and lists on one line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    inner = indent + " "
    lines = [f"{inner}{json.dumps(key)}: {_text(each, inner)}" for key, each in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + indent + "}"
