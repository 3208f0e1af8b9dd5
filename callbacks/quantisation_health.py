"""Quantization health: statistics of the casts of a precision recipe by tensor, and the origin of NaN."""

import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.precision.linear.module import QuantizedLinear, quantized_layers
from lightning_llm.precision.linear.plan import SLOT_NAMES, CastRecord, Shard
from lightning_llm.precision.linear.statistics import HIGHEST, LOWEST, SUMS, cast_sums, figures
from lightning_llm.precision.outliers import (
    TITLE,
    ChannelAmaxes,
    Outliers,
    draw_outliers,
    outlier_metrics,
    outlier_rows,
)
from lightning_llm.tracking.files import cut_back
from lightning_llm.train.nan_origin import find_origin
from lightning_llm.train.spikes import NonFiniteError

Figures = Mapping[str, float]
Tensors = Mapping[tuple[str, str], Figures]
"""Figures by (module, slot)."""
TABLE_COLUMNS = (
    ("SQNR dB", "sqnr_db", "{:.1f}"),
    ("underflow %", "underflow_percent", "{:.3g}"),
    ("saturation %", "saturation_percent", "{:.3g}"),
    ("bias", "bias", "{:+.2e}"),
    ("scale log2 from", "scale_log2_min", "{:.1f}"),
    ("to", "scale_log2_max", "{:.1f}"),
    ("changed %", "scales_changed_percent", "{:.3g}"),
    ("NaN/Inf", "non_finite", "{:.0f}"),
)
HEALTH_FILE, TABLE_FILE, PICTURE_FILE = "health.jsonl", "health.txt", "outliers.svg"
OUTLIER_COLUMNS = ("max_over_median", "p99_over_median", "channel", "channels")
COLUMNS = (
    "underflow_percent",
    "saturation_percent",
    "sqnr_db",
    "bias",
    LOWEST,
    HIGHEST,
    "scales_changed_percent",
    "non_finite",
)
log = logging.getLogger(__name__)


class _OwnRun:
    """Module, ranks and folder of a run of `train`: one batch of the loop is one step."""

    def __init__(self, trainer: pl.Trainer, module: Any):
        self.module, self.layout = module, trainer.strategy.layout
        self.layers, self.folder = quantized_layers(module.model), Path(module.config.run.dir)
        self.recipe = f"precision={module.config.precision.name}"

    @property
    def completed_steps(self) -> int:
        """Number of steps that have ended."""
        return int(self.module.completed_steps)

    def log(self, record: dict[str, float]) -> None:
        """Add `record` to that of the step."""
        self.module.step_record.update(record)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks that hold other layers, in the order of pipeline stages."""
        return self.layout.gather_over_stages(value)

    def reduce(self, tensor: Tensor, op: Any) -> Tensor:
        """Reduce over the ranks that hold the same layers."""
        return self.layout.reduce(tensor, op, "dp", "sequence", "width")

    def origin(self, batch: Any) -> Any:
        """Return the module and slot in which a non-finite value of the step began."""
        return find_origin(self.module.train_step, batch)


class _AnyRun:
    """Module, ranks and folder of any LightningModule with layers that `quantize` changed; each rank has all layers."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule):
        self.trainer, self.module, self.layers = trainer, module, quantized_layers(module)
        self.folder, self.recipe = Path(trainer.log_dir or trainer.default_root_dir), "the module"

    @property
    def completed_steps(self) -> int:
        """Number of optimizer steps that have ended; a step may have several batches."""
        return self.trainer.global_step

    def log(self, record: dict[str, float]) -> None:
        """Log `record` with the module's loggers."""
        self.module.log_dict(record)

    def gather(self, value: Any) -> list[Any]:
        """Return `value`, since no rank holds other layers."""
        return [value]

    def reduce(self, tensor: Tensor, op: Any) -> Tensor:
        """Reduce over all ranks, in place."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(tensor, op)
        return tensor

    def origin(self, batch: Any) -> Any:
        """Return None: the step cannot be repeated here."""


class QuantisationHealth(pl.Callback):
    """Observes every cast of every quantized linear in step 1 and each `every_steps`-th, over all ranks.

    Works in runs of `train`, and in the Trainer of any LightningModule with layers that `quantize` changed.

    - `health/<slot>/<statistic>` in the step's record (and so in MLflow), or logged: all layers together, plus
      `sqnr_db_worst`, the lowest of one layer. `precision.linear.statistics` defines the statistics.
    - `health/<operand>/max_over_median`, and `../<block>`: the largest of all layers, and of those of a block: outlier
      channels of x, w and dy before the cast, over all tokens of the step (`precision.outliers`).
    - `health.jsonl`: a line per observed step with every module and slot; MLflow gets it as an artifact at the end.
    - `health.txt`, shown at the end, and `outliers.svg`: the `worst` tensors and outliers of the last observed step.
    - A warning names the first cast with NaN or Inf as input. If training ends because of a non-finite loss or
      gradient, the step is run again to find the module and slot in which it began.

    Scales are compared with the previous observed step if they belong to the same tensor: weights and delayed scaling.
    Observing does not change any bit of training. If linears run natively, the emulation makes the same casts of the
    same tensors in addition, in observed steps only.
    """

    def __init__(self, every_steps: int = 100, worst: int = 10):
        self.every_steps = every_steps
        self.worst = worst
        self._run: _OwnRun | _AnyRun | None = None
        self._sums = self._ranges = torch.zeros(0)
        self._amaxes = ChannelAmaxes([], torch.device("cpu"))
        self._scales: dict[tuple[int, str], Tensor] = {}
        self._compared: set[tuple[int, str]] = set()
        self._anywhere = self._warned = False
        self._observed_step = 0
        """The step in which casts are observed, 0 for none."""
        self._batch: Any = None
        self._tensors: Tensors = {}
        self._outliers: Outliers = {}
        self._step = 0

    @property
    def _layers(self) -> list[QuantizedLinear]:
        return [] if self._run is None else [layer for layer in self._run.layers if not layer.plan.fixed]

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Find the layers; drop records that a resumed run will measure again."""
        self._run = run = (_OwnRun if hasattr(trainer.strategy, "layout") else _AnyRun)(trainer, pl_module)
        # A pipeline stage may have no layers, but still participates in the sums over ranks.
        self._anywhere = any(run.gather(bool(self._layers)))
        if not trainer.is_global_zero:
            return
        if not self._anywhere:
            print(f"health {run.recipe} has no casts here: only NaN and Inf are detected", flush=True)
        file = run.folder / HEALTH_FILE
        if file.exists():
            cut_back(file, run.completed_steps)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start to observe if the step is due."""
        self._batch = batch
        step = 0 if self._run is None else self._run.completed_steps + 1
        if not self._anywhere or self._observed_step or (step != 1 and step % self.every_steps):
            return
        layers = self._layers
        shape, device = (len(layers), len(SLOT_NAMES)), trainer.strategy.root_device
        self._sums = torch.zeros(*shape, len(SUMS), dtype=torch.float64, device=device)
        self._ranges = torch.tensor([math.inf, -math.inf], dtype=torch.float64, device=device).repeat(*shape, 1)
        self._amaxes = ChannelAmaxes(layers, device)
        self._compared = set()
        self._observed_step = step
        for index, layer in enumerate(layers):
            layer.observe = partial(self._see, index)

    @torch.no_grad()
    def _see(self, layer: int, seen: CastRecord) -> None:
        self._amaxes.add(layer, seen)
        if not self._layers[layer].plan.shards.get(seen.slot.rpartition(".")[2], Shard()).counts:
            return
        slot = SLOT_NAMES.index(seen.slot)
        sums, span = self._sums[layer, slot], self._ranges[layer, slot]
        its_sums, its_range = cast_sums(seen)
        sums += its_sums
        span.copy_(torch.stack([torch.minimum(span[0], its_range[0]), torch.maximum(span[1], its_range[1])]))
        if (seen.slot.endswith(".w") or seen.cast.scale == "delayed") and (layer, seen.slot) not in self._compared:
            self._compared.add((layer, seen.slot))  # once per step: all micro-batches have the same scales
            scales, before = seen.scaled.multiplier.detach().clone(), self._scales.get((layer, seen.slot))
            if before is not None and before.shape == scales.shape:
                sums[SUMS.index("scales_compared")] += scales.numel()
                sums[SUMS.index("scales_changed")] += (scales != before).sum()
            self._scales[layer, seen.slot] = scales

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Sum over ranks and write the statistics of the observed step."""
        run = self._run
        if run is None or not self._observed_step or run.completed_steps < self._observed_step:
            return
        self._stop_observing()
        names, sums, lowest, highest = self._of_all_ranks(run)
        self._outliers = self._outliers_of_all_ranks(run)
        self._step = run.completed_steps
        self._tensors = {
            (name, slot): _figures(sums[i, s], lowest[i, s], highest[i, s])
            for i, name in enumerate(names)
            for s, slot in enumerate(SLOT_NAMES)
            if sums[i, s, 0] or sums[i, s, SUMS.index("non_finite")]
        }
        of_operands = {f"health/{name}": value for name, value in outlier_metrics(self._outliers).items()}
        run.log(self._by_slot(sums, lowest, highest) | of_operands)
        if trainer.is_global_zero:
            self._append(run.folder / HEALTH_FILE)
            self._warn()

    def _of_all_ranks(self, run: _OwnRun | _AnyRun) -> tuple[list[str], Tensor, Tensor, Tensor]:
        """Return the layers' names, in the model's order, and their sums, lowest and highest [layers, slots, ..]."""
        sums = run.reduce(self._sums, dist.ReduceOp.SUM).cpu()
        lowest = run.reduce(self._ranges[..., 0].contiguous(), dist.ReduceOp.MIN).cpu()
        highest = run.reduce(self._ranges[..., 1].contiguous(), dist.ReduceOp.MAX).cpu()
        parts = run.gather(([layer.name for layer in self._layers], sums, lowest, highest))
        names = [name for part in parts for name in part[0]]
        order = sorted(range(len(names)), key=lambda i: _block_of(names[i]))  # a rank's stages may not be adjacent
        sums, lowest, highest = (torch.cat([part[i] for part in parts])[order] for i in (1, 2, 3))
        return [names[i] for i in order], sums, lowest, highest

    def _outliers_of_all_ranks(self, run: _OwnRun | _AnyRun) -> Outliers:
        amaxes = run.reduce(self._amaxes.values, dist.ReduceOp.MAX).cpu()
        found = {name: its for part in run.gather(self._amaxes.figures(amaxes)) for name, its in part.items()}
        return dict(sorted(found.items(), key=lambda item: _block_of(item[0])))

    def _by_slot(self, sums: Tensor, lowest: Tensor, highest: Tensor) -> dict[str, float]:
        record: dict[str, float] = {}
        for s, slot in enumerate(SLOT_NAMES):
            of_layers = [made for (_, its), made in self._tensors.items() if its == slot]
            if not of_layers:
                continue
            together = _figures(sums[:, s].sum(0), lowest[:, s].amin(), highest[:, s].amax())
            ratios = [made["sqnr_db"] for made in of_layers if "sqnr_db" in made]
            record |= {f"health/{slot}/{name}": value for name, value in together.items()}
            if ratios:
                record[f"health/{slot}/sqnr_db_worst"] = min(ratios)
        return record

    def _append(self, file: Path) -> None:
        rows = [[*key, *(_short(made.get(name)) for name in COLUMNS)] for key, made in self._tensors.items()]
        line: dict[str, Any] = {"step": self._step, "columns": ["module", "slot", *COLUMNS], "rows": rows}
        found = [(name, operand, made) for name, its in self._outliers.items() for operand, made in its.items()]
        rows = [[name, operand, *(_short(made[column]) for column in OUTLIER_COLUMNS)] for name, operand, made in found]
        line["outliers"] = {"columns": ["module", "operand", *OUTLIER_COLUMNS], "rows": rows}
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")

    def _warn(self) -> None:
        first = next((key for key, made in self._tensors.items() if made["non_finite"]), None)
        if first is not None and not self._warned:
            self._warned = True
            count = self._tensors[first]["non_finite"]
            log.warning("step %d: %s, slot %s, was given %d NaN or Inf", self._step, *first, count)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Show the worst tensors."""
        if self._tensors and trainer.is_global_zero:
            print(self._write_table(), flush=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Report the origin of a non-finite value, and write the statistics so far."""
        self._stop_observing()
        if self._tensors and trainer.is_global_zero:
            self._write_table()
        if isinstance(exception, NonFiniteError) and self._batch is not None and self._run is not None:
            exception.origin = self._run.origin(self._batch)

    def _write_table(self) -> str:
        text = health_table(self._tensors, self._step, self.worst)
        if any(self._outliers.values()):
            text += "\n\n" + "\n".join([TITLE, *aligned(outlier_rows(self._outliers, self.worst))])
        if self._run is not None:
            (self._run.folder / TABLE_FILE).write_text(text + "\n", encoding="utf-8")
            self._draw(self._run.folder / PICTURE_FILE)
        return text

    def _draw(self, file: Path) -> None:
        # A picture that fails (no space, no fonts) must not hide how the run itself ended.
        try:
            draw_outliers(self._outliers, file)
        except Exception as error:
            log.warning("%s was not drawn: %s: %s", file.name, type(error).__name__, error)

    def _stop_observing(self) -> None:
        self._observed_step = 0
        for layer in self._layers:
            layer.observe = None


def _block_of(name: str) -> int:
    """Return 12 for "layers.12.attention.q_proj"; modules outside of blocks come last."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" and parts[1].isdecimal() else sys.maxsize


def _figures(sums: Tensor, lowest: Tensor, highest: Tensor) -> dict[str, float]:
    return figures(dict(zip(SUMS, sums.tolist(), strict=True)), lowest.item(), highest.item())


def _short(value: float | None) -> float | None:
    if isinstance(value, int):
        return value
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def health_table(tensors: Tensors, step: int, count: int) -> str:
    """Return a table of the `count` worst tensors at `step`, with each one's SQNR relative to its slot's median."""
    chosen = worst_tensors(tensors, count)
    if not chosen:
        return f"quantization health at step {step}: every cast was exact"
    medians = slot_medians(tensors)
    head = ["module", "slot", *(title for title, _, _ in TABLE_COLUMNS), "vs slot dB"]
    rows = [_row(key, tensors[key], medians) for key in chosen]
    title = f"quantization health at step {step}: the {len(rows)} worst of {len(tensors)} tensors, by SQNR"
    return "\n".join([title, *aligned([head, *rows])])


def worst_tensors(tensors: Tensors, count: int) -> list[tuple[str, str]]:
    """Return (module, slot) of the `count` worst tensors: those with NaN or Inf first, then by ascending SQNR."""
    measured = {key: figures for key, figures in tensors.items() if "sqnr_db" in figures or figures.get("non_finite")}
    return sorted(measured, key=lambda key: (-measured[key]["non_finite"], measured[key].get("sqnr_db", 0.0)))[:count]


def _row(key: tuple[str, str], figures: Figures, medians: Mapping[str, float]) -> list[str]:
    cells = [form.format(figures[name]) if name in figures else "-" for _, name, form in TABLE_COLUMNS]
    relative = f"{figures['sqnr_db'] - medians[key[1]]:+.1f}" if "sqnr_db" in figures else "-"
    return [*key, *cells, relative]


def slot_medians(tensors: Tensors) -> dict[str, float]:
    """Return each slot's median SQNR over its modules, in dB."""
    by_slot: dict[str, list[float]] = {}
    for (_, slot), measured in tensors.items():
        if "sqnr_db" in measured:
            by_slot.setdefault(slot, []).append(measured["sqnr_db"])
    return {slot: median(values) for slot, values in by_slot.items()}


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as aligned lines; the first two columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
