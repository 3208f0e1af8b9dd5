"""The verb `sync`: log run folders to MLflow that it missed."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.redact import redact_uri, redacted
from lightning_llm.config.workspace import default_outputs, folders_named
from lightning_llm.tracking.mlflow.sync import configs_of, sync_run
from lightning_llm.tracking.mlflow.tracker import tracking_uri


def sync(arguments: argparse.Namespace) -> int:
    """Upload each run below the given folders to MLflow; return 0, or 1 if one could not be uploaded.

    A run that was killed becomes KILLED in MLflow (and "stopped" in its summary). A run in progress is updated and
    stays RUNNING. No point is logged twice.
    """
    folders = list(_run_folders(arguments.folders or [default_outputs()]))
    if not folders:
        where = ", ".join(arguments.folders) or default_outputs()
        text = f"there is no run (config.yaml and metrics.jsonl) in {where}. Give a run's folder, or one above it."
        raise ConfigError(Problem("FOLDER", text))
    failed = 0
    unreachable: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):  # MLflow creates ./mlruns in the working directory
        for folder in folders:
            try:
                config, own = configs_of(folder, arguments.tracking_uri)
                server = redact_uri(tracking_uri(config))
                if server in unreachable:
                    failed += 1
                else:
                    print(f"{folder}: {sync_run(folder, config, own)}", flush=True)
            except Exception as error:  # MLflow raises many kinds; the other runs are still tried
                failed += 1
                if _is_no_answer(error):
                    unreachable.add(server)
                    print(f"{server} does not answer: its other runs are skipped", file=sys.stderr, flush=True)
                    continue
                damage = isinstance(error, ValueError | ConfigError)  # a damaged file, named in the message
                kind = "" if damage else f"{type(error).__name__}: "
                text = redacted(f"{folder}: not logged: {kind}{error}".splitlines()[0])
                print(text[:500], file=sys.stderr, flush=True)
    print(f"sync   {len(folders) - failed} of {len(folders)} runs are in MLflow")
    return 1 if failed else 0


def _run_folders(given: Sequence[str]) -> Iterator[Path]:
    seen, outputs = set(), Path(default_outputs())
    named = {word: folders_named(word, outputs) for word in given}
    text = "is neither a folder nor an experiment, SWEEP or SWEEP/N in {}."
    missing = [Problem(word, text.format(outputs)) for word, folders in named.items() if not folders]
    if missing:
        raise ConfigError(missing)
    for root in (folder for folders in named.values() for folder in folders):
        for file in sorted(root.absolute().rglob("metrics.jsonl")):
            if (file.parent / "config.yaml").is_file() and file.parent not in seen:
                seen.add(file.parent)
                yield file.parent


def _is_no_answer(error: BaseException | None) -> bool:
    """Return whether a server could not be reached or timed out, which would also happen for the next run."""
    from requests import exceptions  # MLflow's client uses requests

    while error is not None:
        if isinstance(error, exceptions.ConnectionError | exceptions.Timeout):
            return True
        error = error.__cause__ or error.__context__
    return False
