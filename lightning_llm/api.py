"""The Python API (docs/howto/python.md): the verbs as functions for notebooks and scripts.

Each function imports what it needs when it is called: composing needs no torch, a verdict no Hydra.
"""

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from lightning_llm.base.errors import ConfigError, Problem, RunFailedError, Terminated
from lightning_llm.base.signals import EXIT_GOES_ON, STOPPED_CODES

if TYPE_CHECKING:
    from lightning_llm.compare.comparison import Comparison
    from lightning_llm.config.schema import Config
    from lightning_llm.data.tokens.tokenizer import Tokenizer
    from lightning_llm.evaluate.evaluation import Evaluation
    from lightning_llm.evaluate.over_time import Trend
    from lightning_llm.model.decoder import Decoder
    from lightning_llm.probe.any_module import Loss, ModuleProbe

StrPath = str | os.PathLike[str]
EXIT_INPUT = 2


@dataclass(frozen=True)
class TrainResult:
    """A finished run, or one that `trainer.max_time` stopped.

    Attributes:
        folder: the run's folder.
        summary: contents of summary.json: status, parameters, versions, final figures.
        records: lines of metrics.jsonl in order: one mapping per training step ("step", "tokens", "loss" in nats per
            token, ...) and one per validation ("step", "val_loss", ...).
    """

    folder: Path
    summary: dict[str, Any] = field(repr=False)
    records: list[dict[str, Any]] = field(repr=False)


def compose(*overrides: str, config: StrPath | None = None, config_dir: StrPath | None = None) -> "Config":
    """Return the checked config of one run, as `lightning-llm plan` composes it. Nothing is started or written.

    Args:
        overrides: the words of the command line: "recipe=quickstart", "precision=mxfp8", "~callbacks.sample".
        config: a run's config.yaml to start from instead of the defaults.
        config_dir: folder of additional config groups and callbacks; `train` uses it too.

    Raises:
        ConfigError: lists every wrong key, or else every conflict between keys.
    """
    from lightning_llm.config.workspace import open_config_dir
    from lightning_llm.run.checked_plan import checked_resolution, read_config

    if wrong := [word for word in overrides if not isinstance(word, str)]:
        text = f"must be strings such as 'trainer.max_steps=4', got {wrong[0]!r}. Unpack a list with *list."
        raise ConfigError(Problem("overrides", text))
    folder = None if config_dir is None else Path(config_dir)
    if folder is not None:
        open_config_dir(folder)
    reading = read_config(overrides, None if config is None else Path(config), folder)
    return checked_resolution(reading, to_train=False).config


def train(config: "Config", *, quiet: bool = False) -> TrainResult:
    """Train one run as `lightning-llm train` does.

    With trainer.devices=1 it runs in this process; more ranks are separate processes on this machine. An interrupted
    run saves its state; continue it with `resume=auto`.

    Args:
        config: returned by `compose`, or a copy of it (`config.model_copy(update=...)`). It is checked again.
        quiet: suppress the verb's stdout. Errors still go to stderr.

    Returns:
        The run's results. The summary's status is "stopped" if `trainer.max_time` ended the run.

    Raises:
        ConfigError: the config or the machine does not allow the run, or a run cannot start in this process (a rank of
            torchrun or srun, a thread other than the main one, a process with its own process group).
        RunFailedError: the run started and failed.
        KeyboardInterrupt: a signal stopped the run after its state was saved (SIGTERM and SIGHUP raise the subclass
            `errors.Terminated`).
    """
    from lightning_llm.cli.train import train_config
    from lightning_llm.config.schema import Config
    from lightning_llm.tracking.files import read_records, summary_of

    if not isinstance(config, Config):
        text = f"must be a Config from lightning_llm.compose(...), got {type(config).__name__}."
        raise ConfigError(Problem("config", text))
    with _printing(quiet):
        code = train_config(config, quiet=quiet)
    folder = Path(config.run.dir)
    if code == EXIT_INPUT:
        text = "the ranks were started and rejected the run. See stderr for the reasons."
        raise ConfigError(Problem("trainer.devices", text, config.trainer.devices))
    if code in STOPPED_CODES and code != EXIT_GOES_ON:
        raise KeyboardInterrupt if code == 128 + signal.SIGINT else Terminated(code - 128)
    summary = summary_of(folder)
    if code not in (0, EXIT_GOES_ON):
        raise RunFailedError(folder, str(summary.get("detail") or "no reason was recorded; see stderr"))
    return TrainResult(folder, summary, list(read_records(folder / "metrics.jsonl")))


def compare(
    runs: Iterable[StrPath | TrainResult] | StrPath | TrainResult = (),
    *,
    curves: Mapping[str, Any] | None = None,
    x: str | None = None,
    tokens_per_step: float | None = None,
    until: float | None = None,
    baseline: str | None = None,
    best_of: str | None = None,
    choose_by: str | None = None,
    margin: float | str | None = None,
    confidence: float | None = None,
    metric: str | None = None,
    tail: float | None = None,
    targets: Iterable[str] | str = (),
    all_pairs: bool = False,
    require: str | None = None,
    series: str | None = None,
    looks: int | None = None,
    output: StrPath | None = None,
    quiet: bool = False,
) -> "Comparison":
    """Judge runs against a baseline as `lightning-llm compare` does. Writes report and tables next to the runs.

    Args:
        runs: results of `train`, folders of runs or above runs, sweeps, or MLflow ids. Default: the last sweep.
        curves: {arm: {seed: frame}} of any trainer instead of runs, or {arm: [frame, ...]} without seeds. A frame is a
            DataFrame, a dict of arrays, or a list of (step, loss) pairs. A report is then only written to `output`.
        x: axis of the curves, "step", "tokens" or a column. None: step if all have it, else tokens.
        tokens_per_step: tokens of one step of all curves, where they count only steps.
        until: last x of the curves to compare. None: their end.
        baseline: setting of the baseline, such as "precision=bf16". None: chosen from the runs.
        best_of: compare each recipe at its best value of this key.
        choose_by: seeds that choose the best value: "0,1" or "all". None: the lowest seed.
        margin: largest gap in loss that is lossless, in nats per token, or in additional tokens ("2%"). None: the
            sweep's own, or 0.01.
        confidence: simultaneous confidence of the intervals. None: the sweep's own, or 0.95.
        metric: key of the validation metrics, "val_loss" or "val_loss/SOURCE". None: the sweep's own, or "val_loss".
        tail: share of the last steps to average over. None: the sweep's own, or 0.1.
        targets: losses for the time to target: "4.4", or for one setting "model=llama_tiny:4.4".
        all_pairs: also compare all recipes with each other.
        require: verdict required of every arm, "lossless" or "not-lossy"; see `Comparison.requirement`. Each look then
            spends error of its series.
        series: name or .json file of the series of looks. None: the looks at these runs.
        looks: number of looks planned. None: each spends half of the error that is left.
        output: folder for the report; nothing is written to MLflow then.
        quiet: do not print the table.

    Raises:
        IncompleteComparisonError: some runs could not be judged; its `comparison` has the verdicts on the others.
        ConfigError: no run could be judged; lists every reason. A flag in its text is the argument of that name.
    """
    from lightning_llm.compare.best_value import best_of_arguments
    from lightning_llm.compare.command import compare_named, print_table
    from lightning_llm.compare.requirement import read_gate
    from lightning_llm.compare.terms import RequestedTerms
    from lightning_llm.compare.time_to_target import read_targets

    goals = read_targets([targets] if isinstance(targets, str) else list(targets))
    terms = RequestedTerms(margin, confidence, metric, tail, goals, all_pairs)
    printed: dict[str, Any] = {"show": _nothing if quiet else print_table, "say": _nothing if quiet else print}
    folder, gate = None if output is None else Path(output), read_gate(require, series, looks)
    if curves is not None:
        from lightning_llm.compare.curves.command import compare_frames

        _refuse("together with curves", runs=runs, best_of=best_of, choose_by=choose_by, targets=targets)
        return compare_frames(curves, terms, baseline, x, tokens_per_step, until, folder, gate=gate, **printed)
    _refuse("without curves", x=x, tokens_per_step=tokens_per_step, until=until)
    given = _several(runs)
    return compare_named(
        [str(_path_of(each)) for each in given],
        terms,
        baseline,
        best_of_arguments(best_of, choose_by),
        folder,
        **printed,
        gate=gate,
    )


def _refuse(when: str, **given: Any) -> None:
    """Raise ConfigError for arguments that are given and have no effect `when`, such as "without curves"."""
    text = f"has no effect {when}. Remove it."
    if problems := [Problem(name, text) for name, value in given.items() if value not in (None, (), [])]:
        raise ConfigError(problems)


def load(
    path: StrPath | TrainResult,
    *,
    device: str = "cpu",
    compute_dtype: str | None = None,
    end_of_document: str | None = None,
) -> tuple["Decoder", "Tokenizer"]:
    """Return a complete model and its tokenizer, as `lightning-llm generate` loads them.

    The model is in evaluation mode, has no gradients and applies no casts. It takes tokens int64 `[B, T]` and returns
    logits fp32 `[B, T, padded_vocab_size]`; those from `model.config.vocab_size` on are padding.

    Args:
        path: result of `train`, a run's folder (its newest checkpoint), a checkpoint, a folder written by `import`, or
            a Hugging Face folder.
        device: "cpu", "cuda" or "auto" (a GPU if there is one).
        compute_dtype: dtype of activations: fp32, bf16 or fp16. None: the run's precision.compute_dtype, or bf16.
        end_of_document: token that ends a document. None: from the files of the weights, or one of a usual name.

    Raises:
        ConfigError: an argument or a file is wrong. No code from the folder is executed.
    """
    from lightning_llm.evaluate.weights import load_model

    return load_model(_path_of(path), compute_dtype, device, end_of_document)


@overload
def evaluate(path: Any = None, *, all_checkpoints: Literal[True], **options: Any) -> "Trend": ...


@overload
def evaluate(path: Any = None, *, all_checkpoints: Literal[False] = False, **options: Any) -> "Evaluation": ...


def evaluate(  # type: ignore[misc]  # overloads leave out arguments
    path: StrPath | TrainResult | None = None,
    *,
    all_checkpoints: bool = False,
    tasks: Iterable[str] | str = (),
    tasks_only: bool = False,
    data: Iterable[str] | str = (),
    limit: float | None = None,
    average: Iterable[StrPath | TrainResult] | StrPath | TrainResult = (),
    ensemble: Iterable[StrPath | TrainResult] | StrPath | TrainResult = (),
    batch_size: int = 8,
    compute_dtype: str | None = None,
    device: str = "auto",
    output: StrPath | None = None,
    layout: Iterable[str] | str = (),
    codes: Literal["nvfp4", "mxfp4", "fp8", "int4"] | None = None,
    quiet: bool = False,
) -> "Evaluation | Trend":
    """Measure validation losses and lm-eval tasks of weights, as `lightning-llm evaluate` does.

    Results are stored with the run.

    Args:
        path: see `load`.
        all_checkpoints: evaluate every checkpoint of the run `path` that this request has not evaluated, and return
            the `Trend`: `metrics` by step, and the `damaged` checkpoints.
        tasks: lm-eval tasks, by name or as .yaml files.
        tasks_only: skip validation losses.
        data: other data than the run's: "jsonl=FILE", or "KEY=VALUE" with a key below `data`.
        limit: samples per task; below 1, a share of them.
        average: evaluate the mean of these weights and those of `path`.
        ensemble: evaluate the mean prediction of these and `path`.
        batch_size: requests of a task per forward pass.
        compute_dtype: dtype of activations in tasks; see `load`.
        device: "auto", "cpu" or "cuda".
        output: file to write instead of one in the run's evaluation/.
        layout: start ranks that share the work: "parallel=zero3", "trainer.devices=2".
        codes: evaluate the model that `export --codes` of this format writes.
        quiet: do not print the table.

    Raises:
        ConfigError: lists everything that is wrong. A flag in its text is the argument of that name.
        RanksFailedError: a rank failed.
    """
    from lightning_llm.cli.evaluate import evaluated, evaluated_over_time, print_metrics, print_trend

    only, file = None if path is None else _path_of(path), None if output is None else Path(output)
    given: dict[str, Any] = {
        "tasks": [tasks] if isinstance(tasks, str) else list(tasks),
        "tasks_only": tasks_only,
        "data": [data] if isinstance(data, str) else list(data),
        "limit": limit,
        "average": [_path_of(each) for each in _several(average)],
        "ensemble": [_path_of(each) for each in _several(ensemble)],
        "batch_size": batch_size,
        "compute_dtype": compute_dtype,
        "device": device,
        "layout": [layout] if isinstance(layout, str) else list(layout),
        "codes": codes,
    }
    if all_checkpoints:
        trend = evaluated_over_time(only, output=file, **given)
        if not quiet:
            print_trend(trend)
        return trend
    done = evaluated(only, output=file, **given)
    if not quiet:
        print_metrics(done)
    return done


def probe(
    module: Any,
    batches: Iterable[Any],
    *,
    loss: "Loss | None" = None,
    keys: int = 4,
    attribute: bool = True,
) -> "ModuleProbe":
    """Measure how the recipe of a module that `quantize` changed affects its gradients, as `lightning-llm probe` does.

    Runs on a copy of the module in evaluation mode, with emulated casts: the module and its step stay as they are.

    Args:
        module: the quantized module, whole and in one process.
        batches: few batches, held in memory; a mapping is one batch. Tensors in them are moved to the module's device.
        loss: function of (module, batch) that returns the batch's mean loss. None: batches are mappings, and
            `module(**batch).loss` is the loss, as for models of transformers.
        keys: number of draws of random bits that are compared.
        attribute: also measure each slot and each layer alone, and which layers to keep unquantized: one pass per layer
            and two per slot.

    Raises:
        ConfigError: the module is not quantized or is sharded, or an argument is wrong.
    """
    from lightning_llm.probe.any_module import probe_module

    return probe_module(module, batches, loss, keys, attribute)


def _several(given: "Iterable[StrPath | TrainResult] | StrPath | TrainResult") -> "list[StrPath | TrainResult]":
    """Return the members of `given`: itself alone, if it is a path or a result."""
    return [given] if isinstance(given, str | os.PathLike | TrainResult) else list(given)


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
