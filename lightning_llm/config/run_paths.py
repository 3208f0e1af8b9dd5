"""Checks of a run's folder, of its tracking URI, and that its config has no secrets. Imports no MLflow."""

import os
import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import Problem, did_you_mean
from lightning_llm.config.config_hash import flatten
from lightning_llm.config.recipes import group_names, option_files
from lightning_llm.config.redact import redact_uri, secret_in
from lightning_llm.config.schema import ALGORITHMS, OPTIMIZERS, SCHEDULES, Config

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
"""Databases of MLflow's tracking store (mlflow.store.db.db_types), each also as `DATABASE+DRIVER`."""
SERVERS = ("http", "https", "databricks", "databricks-uc", "uc")
FREE_KEYS = ("callbacks.", "logger.tags.")
"""Prefixes of keys that are named by users."""
PLUGINS = "mlflow.tracking_store"
"""Entry point of packages that add URI schemes to MLflow."""


def run_path_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of the names in a run's folder."""
    run = config.run
    for key in ("root", "experiment", "name", "dir"):
        value = getattr(run, key)
        if not value.strip():
            yield Problem(f"run.{key}", "is empty. Give a name.")
        elif odd := [each for each in value if unicodedata.category(each) in ("Cc", "Cs")]:
            yield Problem(f"run.{key}", f"is {value!r}: the character {odd[0]!r} is not allowed. Remove it.")
    if os.path.normpath(run.dir) != os.path.normpath(f"{run.root}/{run.experiment}/{run.name}"):
        return  # run.dir was given, or is a sweep's
    for key in ("experiment", "name"):
        value = getattr(run, key).strip()
        path = Path(value)
        if value and (".." in path.parts or path.is_absolute() or path == Path()):
            text = f"is '{path}', which leads out of run.root. Give a name, or set run.root or run.dir."
            yield Problem(f"run.{key}", text)


def tracking_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of the tracking URI, which MLflow would report only after the start."""
    named = config.logger.tracking_uri
    uri = named or os.environ.get("MLFLOW_TRACKING_URI")
    if config.logger.name != "mlflow" or uri is None:
        return
    key = "logger.tracking_uri" if named is not None else "MLFLOW_TRACKING_URI"
    scheme, separator, rest = uri.partition("://")
    known = [*DATABASES, *SERVERS, *_plugin_schemes()]
    if not separator and uri not in ("databricks", "databricks-uc"):
        text = f"is '{redact_uri(uri)}', not a URI. Write sqlite:////FOLDER/mlflow.db, or http://HOST:PORT."
        yield Problem(key, text)
    elif separator and scheme.lower().partition("+")[0] not in known:
        text = f"is '{redact_uri(uri)}': MLflow has no {scheme}://.{did_you_mean(scheme, known)}"
        yield Problem(key, text)
    elif separator and not rest.strip("/"):
        yield Problem(
            key, f"is '{uri}', which names no database or server. Write sqlite:////FOLDER/mlflow.db, or null."
        )


def secret_problems(config: Config) -> Iterator[Problem]:
    """Yield keys with a secret, which would be copied to config.yaml, summaries, MLflow and checkpoints."""
    for key, value in flatten(config.model_dump(warnings=False)).items():
        texts = [*texts_in(value), *(key.split(".") if key.startswith(FREE_KEYS) else ())]
        found = [name for each in texts if (name := secret_in(each, _shipped_words())) is not None]
        if found and found[0]:
            text = f"has the value of ${found[0]}, and a config is written to the run's folder and to MLflow. Remove "
            yield Problem(key, f"{text}it: the code that needs it reads the variable itself.")
        elif found:
            text = "has a URI with a password or a token, and a config is written to the run's folder and to "
            yield Problem(key, f"{text}MLflow. Remove them, and give them in the environment.")


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a config value: strings, keys of mappings, numbers as text, since a secret may be digits."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from (*texts_in(key), *texts_in(each))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from texts_in(each)


@cache
def _shipped_words() -> frozenset[str]:
    """Return the names of options and kinds: published names are not secret."""
    files = {part for group in group_names() for name in option_files(group) for part in name.split("/")}
    return frozenset({*files, *OPTIMIZERS, *SCHEDULES, *ALGORITHMS})


@cache
def _plugin_schemes() -> tuple[str, ...]:
    return tuple(each.name for each in entry_points(group=PLUGINS))
