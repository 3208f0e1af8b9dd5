"""G5: training runs of a 100M-class model by the command line, same seed and data: every native recipe against bf16."""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_check.rows import Clock, Row, guarded, judged, missing
from gpu_check.setting import model_config, native_recipes, recipes
from gpu_check.wheels import lacking

ROOT = Path(__file__).resolve().parents[1]
STEPS, LENGTH, SEQUENCES = 200, 1024, 8
LAST = 20
MARGIN = 0.01
"""Of bf16's loss at the end: a larger gap is off. One seed is an indication: `compare` says so too (inconclusive)."""
VOCABULARY = 512


def words(recipe: str, folder: Path, name: str) -> list[str]:
    """Return the overrides of one run."""
    return [
        "model=llama_160m", f"model.vocab_size={VOCABULARY}", "data=python", "data.tokenizer.kind=bytes",
        f"data.sequence_length={LENGTH}", f"data.micro_batch_size={SEQUENCES}", f"data.global_batch_size={SEQUENCES}",
        f"precision={recipe}", "precision.casts=eager", f"trainer.max_steps={STEPS}",
        f"trainer.validate_every_steps={STEPS}", "data.validation.sequences=32",
        "checkpoint.every_steps=null", "schedule.warmup_steps=20",
        "optim.learning_rate=6e-4", "logger=none", "callbacks.sample=null", f"run.root={folder}",
        f"run.dir={folder / name}", f"data.cache_dir={folder / 'cache'}",
    ]  # fmt: skip


def check(clock: Clock) -> Iterator[Row]:
    """Yield bf16's run with its price over a plain loop, then every native recipe's gap to it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if problem := finish(start("bf16", folder), clock.left):
            yield Row("bf16", None, "", "error", problem)
            return
        yield from guarded("trainer over a plain loop", overhead, folder)
        names = list(native_recipes())
        if not names:
            yield missing("native recipes", "this machine runs none natively")
        runs = {name: start(name, folder) for name in names}  # side by side: start-up is most of their time
        done = []
        for name, run in runs.items():
            if problem := finish(run, clock.left):
                yield missing(name, problem)
                continue
            done.append(name)
            yield from guarded(name, gap, name, folder)
        if done:
            yield from guarded("verdicts", verdicts, done, folder, clock)


def start(recipe: str, folder: Path) -> subprocess.Popen[str]:
    """Start one run."""
    command = [sys.executable, "-m", "lightning_llm", "train", *words(recipe, folder, recipe)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(run: subprocess.Popen[str], seconds: float) -> str | None:
    """Wait for a run; return what went wrong, or None."""
    try:
        said, _ = run.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        run.kill()
        run.communicate()
        return "out of time"
    return None if run.returncode == 0 else f"exit code {run.returncode}: {(said.strip().splitlines() or [''])[-1]}"


def losses(run: Path) -> list[float]:
    """Return the losses of a run's steps."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [float(record["loss"]) for record in records if "loss" in record]


def how_it_ran(run: Path) -> str:
    """Return what a run's summary says of its casts: native, or that they fell back."""
    return str(json.loads((run / "summary.json").read_text())["precision"]["runs"])


def gap(name: str, folder: Path) -> Iterator[Row]:
    """Yield the relative gap of a recipe's last losses to bf16's; one that ran emulated is off, whatever its gap."""
    ours, base = losses(folder / name), losses(folder / "bf16")
    end, wanted = statistics.fmean(ours[-LAST:]), statistics.fmean(base[-LAST:])
    relative, runs = (end - wanted) / wanted, how_it_ran(folder / name)
    what = f"{name} ({runs}): gap of the last {LAST} of {len(ours)} losses to bf16's"
    holds = math.isfinite(relative) and abs(relative) <= MARGIN and runs == "native"
    yield judged(what, 100 * relative, "%", holds, f"native, at most {100 * MARGIN:g} % of {wanted:.4f}; one seed")


def verdicts(names: list[str], folder: Path, clock: Clock) -> Iterator[Row]:
    """Yield `lightning-llm compare`'s verdict on each run against bf16's: lossless is ok, lossy is off."""
    if gone := lacking(("scipy", "matplotlib")):
        yield missing("verdicts", f"{', '.join(gone)} not installed")
        return
    command = [sys.executable, "-m", "lightning_llm", "compare", "--json", "--baseline", "precision=bf16"]
    command += ["--output", str(folder / "compare"), *(str(folder / name) for name in ("bf16", *names))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, clock.left), check=False)
    if not done.stdout.strip():
        yield Row("verdicts", None, "", "error", (done.stderr.strip().splitlines() or ["nothing was said"])[-1][:300])
        return
    found = {row["name"]: row for row in json.loads(done.stdout)["verdicts"]}
    for name in names:
        yield verdict_row(name, how_it_ran(folder / name), found.get(name))


def verdict_row(name: str, runs: str, verdict: dict[str, Any] | None) -> Row:
    """Return one of `compare`'s verdicts as a row; None: it has none on this run."""
    what = f"{name} ({runs}): compare's gap in nats per token"
    if verdict is None:
        return missing(what, "compare has no verdict on it")
    if runs != "native":
        return judged(what, verdict["gap"], "", False, f"{verdict['verdict']}, and it did not run natively")
    if verdict["verdict"] == "inconclusive":
        return Row(what, verdict["gap"], "", "measured", f"inconclusive: {verdict['reason']}"[:200])
    return judged(what, verdict["gap"], "", verdict["verdict"] == "lossless", verdict["verdict"])


def overhead(folder: Path) -> Iterator[Row]:
    """Yield the Trainer's median step over a hand-written loop's at the same shape, neither compiled."""
    from gpu_check.speed import plain_loop

    records = [json.loads(line) for line in (folder / "bf16" / "metrics.jsonl").read_text().splitlines()]
    step = statistics.median(record["step_seconds"] for record in records[STEPS // 4 :] if "step_seconds" in record)
    config = model_config("llama_160m", vocab_size=VOCABULARY)
    plain = plain_loop(config, recipes()["bf16"], SEQUENCES, LENGTH, compiled=False)
    text = f"<= 1.05; {1e3 * step:.1f} and {1e3 * plain:.1f} ms"
    yield judged("bf16: a step of train over a hand-written loop's", step / plain, "", step / plain <= 1.05, text)
