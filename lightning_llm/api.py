"""The verbs as Python functions, for notebooks and scripts (docs/howto/python.md); the command line calls them.

Nothing here is imported before it is called: composing needs no torch, and a verdict no Hydra.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.base.errors import ConfigError, Problem, RunFailedError, Terminated
from lightning_llm.base.signals import EXIT_GOES_ON, STOPPED_CODES

if TYPE_CHECKING:
    from lightning_llm.compare.comparison import Comparison
    from lightning_llm.config.schema import Config
    from lightning_llm.data.tokens.tokenizer import Tokenizer
    from lightning_llm.evaluate.evaluation import Evaluation
    from lightning_llm.model.decoder import Decoder

StrPath = str | os.PathLike[str]
EXIT_INPUT = 2


@dataclass(frozen=True)
class TrainResult:
    """A run that came to its end.

    `summary` is what its summary.json says (status, parameters, versions, final figures), `records` are the lines of
    metrics.jsonl in order: a mapping per training step ("step", "tokens", "loss" in nats per token, ...), and one per
    validation ("step", "val_loss", ...).
    """

    folder: Path
    summary: dict[str, Any] = field(repr=False)
    records: list[dict[str, Any]] = field(repr=False)


def compose(*overrides: str, config: StrPath | None = None, config_dir: StrPath | None = None) -> "Config":
    """Return the checked config of one run, as `lightning-llm plan` reads it; nothing is started or written.

    Args:
        overrides: as they are typed behind `train`: "recipe=quickstart", "precision=mxfp8", "~callbacks.sample".
        config: a run's config.yaml to start from instead of the defaults.
        config_dir: a folder of further config groups and callbacks, which stays open for `train`.

    Raises:
        ConfigError: with all that is wrong with the keys, and between those that are right.
    """
    from lightning_llm.config.workspace import open_config_dir
    from lightning_llm.run.checked_plan import checked_resolution, read_words

    if wrong := [word for word in overrides if not isinstance(word, str)]:
        text = f"takes text, such as 'trainer.max_steps=4', and was given {wrong[0]!r}. Lists go as *list."
        raise ConfigError(Problem("overrides", text))
    folder = None if config_dir is None else Path(config_dir)
    if folder is not None:
        open_config_dir(folder)
    reading = read_words(overrides, None if config is None else Path(config), folder)
    return checked_resolution(reading, to_train=False).config


def train(config: "Config", *, quiet: bool = False) -> TrainResult:
    """Train one run, as `lightning-llm train` does, and return what it left; "stopped" if trainer.max_time was over.

    With trainer.devices=1 it runs in this process; more ranks are processes of their own on this machine. Interrupting
    it saves the run's state; `resume=auto` goes on.

    Args:
        config: of `compose`, or a copy of one (`config.model_copy(update=...)`): it is checked here, too.
        quiet: leave out what the verb prints; what goes wrong is still said on stderr.

    Raises:
        ConfigError: with all that is wrong with the config, the machine, or this process as a place to train from: a
            rank of torchrun or srun, a thread, one with a process group of its own.
        RunFailedError: the run began, and failed.
        KeyboardInterrupt: it was stopped by a signal, with its state saved; by SIGTERM or SIGHUP,
            `errors.Terminated`, a kind of it.
    """
    from lightning_llm.cli.train import train_config
    from lightning_llm.config.schema import Config
    from lightning_llm.tracking.files import read_records, summary_of

    if not isinstance(config, Config):
        text = f"is {type(config).__name__}, and must be what lightning_llm.compose(...) returns."
        raise ConfigError(Problem("config", text))
    with _printing(quiet):
        code = train_config(config, quiet=quiet)
    folder = Path(config.run.dir)
    if code == EXIT_INPUT:
        text = f"{config.trainer.devices} ranks were started and refuse the run; what is wrong stands on stderr."
        raise ConfigError(Problem("trainer.devices", text))
    if code in STOPPED_CODES and code != EXIT_GOES_ON:
        raise KeyboardInterrupt if code == 128 + signal.SIGINT else Terminated(code - 128)
    summary = summary_of(folder)
    if code not in (0, EXIT_GOES_ON):
        raise RunFailedError(folder, str(summary.get("detail") or "it left no word of why; see stderr"))
    return TrainResult(folder, summary, list(read_records(folder / "metrics.jsonl")))


def compare(
    runs: Iterable[StrPath | TrainResult] | StrPath | TrainResult = (),
    *,
    baseline: str | None = None,
    best_of: str | None = None,
    choose_by: str | None = None,
    margin: float | str | None = None,
    confidence: float | None = None,
    metric: str | None = None,
    tail: float | None = None,
    targets: Iterable[str] = (),
    all_pairs: bool = False,
    output: StrPath | None = None,
    quiet: bool = False,
) -> "Comparison":
    """Return the verdicts over runs, as `lightning-llm compare` does: report and tables are written beside the runs.

    Args:
        runs: results of `train`, folders of runs or above runs, sweeps, MLflow ids; none: the last sweep.
        baseline: what to hold the others against: "precision=bf16"; None: the usual one.
        best_of: each recipe at its best value of this key, chosen by seeds `choose_by` ("0,1", "all"; None: lowest).
        margin: the gap in loss, in nats per token, that is still lossless; "2%": tokens more that it may need; None: as
            declared for the sweep, or 0.01.
        confidence: of all intervals together; None: as declared, or 0.95.
        metric: of the validation records: "val_loss", "val_loss/SOURCE"; None: as declared, or "val_loss".
        tail: the last share of the steps, averaged over; None: as declared, or 0.1.
        targets: what time to target is measured to: "4.4", or that of one setting, "model=llama_tiny:4.4".
        all_pairs: every recipe against every other, too.
        output: a folder for the report, which then goes to no MLflow either.
        quiet: leave out the table.

    Raises:
        IncompleteComparisonError: not all could be judged; its `comparison` has the verdicts on the rest.
        ConfigError: nothing could be judged, with every reason. Flags in its text are the arguments' names here.
    """
    from lightning_llm.compare.best_value import best_of_words
    from lightning_llm.compare.command import compare_named, print_table
    from lightning_llm.compare.terms import RequestedTerms
    from lightning_llm.compare.time_to_target import read_targets

    given = [runs] if isinstance(runs, str | os.PathLike | TrainResult) else runs
    return compare_named(
        [str(_path_of(each)) for each in given],
        RequestedTerms(margin, confidence, metric, tail, read_targets(list(targets)), all_pairs),
        baseline,
        best_of_words(best_of, choose_by),
        None if output is None else Path(output),
        show=_nothing if quiet else print_table,
        say=_nothing if quiet else print,
    )


def load(
    path: StrPath | TrainResult,
    *,
    device: str = "cpu",
    compute_dtype: str | None = None,
    end_of_document: str | None = None,
) -> tuple["Decoder", "Tokenizer"]:
    """Return a model, whole, and its tokenizer, as `lightning-llm generate` reads them.

    The model is in evaluation mode, asks for no gradients and casts nothing; it takes tokens int64 `[B, T]` and returns
    logits fp32 `[B, T, padded_vocab_size]`, of which those from `model.config.vocab_size` on mean nothing.

    Args:
        path: a result of `train`, a run's folder (its newest checkpoint), a checkpoint, a folder that `import` made, or
            a Hugging Face folder.
        device: cpu, cuda, or auto: a GPU where there is one.
        compute_dtype: of activations, fp32, bf16 or fp16; None: the run's precision.compute_dtype, else bf16.
        end_of_document: the token that ends a document; None: what the weights' files say, or one of a usual name.

    Raises:
        ConfigError: with all that is wrong with the arguments, or with what lies there. Nothing of it is executed.
    """
    from lightning_llm.evaluate.weights import load_model

    return load_model(_path_of(path), compute_dtype, device, end_of_document)


def evaluate(
    path: StrPath | TrainResult | None = None,
    *,
    tasks: Iterable[str] | str = (),
    tasks_only: bool = False,
    data: Iterable[str] | str = (),
    limit: float | None = None,
    average: Iterable[StrPath | TrainResult] = (),
    ensemble: Iterable[StrPath | TrainResult] = (),
    batch_size: int = 8,
    compute_dtype: str | None = None,
    device: str = "auto",
    output: StrPath | None = None,
    layout: Iterable[str] | str = (),
    quiet: bool = False,
) -> "Evaluation":
    """Measure weights that are there, as `lightning-llm evaluate` does; results are kept with their run.

    Args:
        path: see `load`.
        tasks: of lm-eval, by name or as a .yaml file.
        tasks_only: no validation losses.
        data: other data than the run's: "jsonl=FILE", or "KEY=VALUE" with a key below `data`.
        limit: the first so many samples of each task; below 1, that share of them.
        average: the mean of these weights, and of `path`'s.
        ensemble: the mean of what these and `path` predict.
        batch_size: requests of a task at once.
        compute_dtype: in tasks; see `load`.
        device: auto, cpu or cuda.
        output: a file to write to instead of the run's evaluation/.
        layout: of ranks that are started to share it: "parallel=zero3", "trainer.devices=2".
        quiet: leave out the table.

    Raises:
        ConfigError: with all that is wrong. Flags in its text are the arguments' names here.
        RanksFailedError: a rank failed.
    """
    from lightning_llm.cli.evaluate import evaluated, print_metrics

    done = evaluated(
        None if path is None else _path_of(path),
        tasks=[tasks] if isinstance(tasks, str) else list(tasks),
        tasks_only=tasks_only,
        data=[data] if isinstance(data, str) else list(data),
        limit=limit,
        average=[_path_of(each) for each in average],
        ensemble=[_path_of(each) for each in ensemble],
        batch_size=batch_size,
        compute_dtype=compute_dtype,
        device=device,
        layout=[layout] if isinstance(layout, str) else list(layout),
        output=None if output is None else Path(output),
    )
    if not quiet:
        print_metrics(done)
    return done


def _path_of(given: "StrPath | TrainResult") -> Path:
    return given.folder if isinstance(given, TrainResult) else Path(given)


def _nothing(_: object) -> None:
    """Print nothing."""


@contextmanager
def _printing(quiet: bool) -> Iterator[None]:
    if not quiet:
        yield
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield
