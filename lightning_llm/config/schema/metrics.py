"""The numbers that callbacks find in `trainer.callback_metrics`, and callbacks that wait for another one."""

from collections.abc import Iterator

from lightning_llm.base.errors import Problem, did_you_mean
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.class_source import find_class, lineage

STOPS = "lightning.pytorch.callbacks.early_stopping.EarlyStopping"
LOGS_RATES = "lightning.pytorch.callbacks.lr_monitor.LearningRateMonitor"
SHIPPED = ("lightning", "lightning_llm")
"""Packages whose callbacks put nothing there, but for `LOGS_RATES`."""


def metric_names(config: Config) -> list[str]:
    """Return the names of a run's own numbers: those of every step, then those of a validation."""
    precision = config.precision
    steps = ["loss", "lr", "grad_norm", *(["loss_scale"] if precision.loss_scaling else [])]
    if not config.data.validation.fraction and not config.data.watched:
        return steps
    views = ["val_loss", *(["val_loss_high_precision"] if precision.quantises else [])]
    return [*steps, *views, *(f"{view}/{source}" for view in views for source in config.data.sources)]


def monitor_problems(config: Config) -> Iterator[Problem]:
    """Yield each EarlyStopping that monitors what nobody logs; where a class of the user's might, none."""
    classes = {name: _lineage(node) for name, node in config.callbacks.items() if node}
    if any(paths and paths[0].partition(".")[0] not in SHIPPED for paths in classes.values()):
        return
    known = metric_names(config)
    for name, paths in classes.items():
        monitor = (config.callbacks[name] or {}).get("monitor")
        if STOPS not in paths or not isinstance(monitor, str) or monitor in known:
            continue
        if monitor.startswith("lr-") and any(LOGS_RATES in each for each in classes.values()):
            continue
        key = f"callbacks.{name}.monitor"
        if monitor.startswith("val_loss") and "val_loss" not in known:
            yield Problem(key, f"is '{monitor}', and data.validation.fraction=0 holds out nothing to validate on.")
        else:
            yield Problem(key, f"is '{monitor}', which this run does not log.{did_you_mean(monitor, known)}")


def _lineage(node: dict[str, object]) -> list[str]:
    """Return the paths of a callback's class and all it derives from, nearest first; [] where no source tells."""
    try:
        found = find_class(str(node.get("_target_")))
    except ModuleNotFoundError:  # which is reported by its own problem
        return []
    return [each.path for each in lineage(found)] if found else []
