"""Losses and gradient norms like those of a real run without a spike, as many as asked.

`python tests/train/noise.py STEPS [metrics.jsonl]` prints how often the detector is wrong about them, fitted to the
quickstart or to a run of one's own.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import signal, stats

from lightning_llm.config.schema import SpikesConfig
from lightning_llm.tracking.files import read_records
from lightning_llm.train.spikes import SpikeState

CURVE = Path(__file__).with_name("quickstart_curve.txt")
WARMUP = 60
TREND_STEPS = 41


def read_curve(file: Path = CURVE) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses and the logarithms of the gradient norms of a run, each [steps]; the quickstart's are 600."""
    if file.suffix == ".jsonl":
        records = [record for record in read_records(file) if "grad_norm" in record]
        return np.array([each["loss"] for each in records]), np.log([each["grad_norm"] for each in records])
    losses, norms = np.loadtxt(file, unpack=True)
    return losses, np.log(norms)


def trend_of(values: np.ndarray) -> np.ndarray:
    """Return the running median, [n]."""
    half = TREND_STEPS // 2
    return np.array([np.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])


def fitted_noise(values: np.ndarray, tail: stats.rv_continuous, steps: int, generator: np.random.Generator):
    """Return `steps` of AR(1) noise: autocorrelation of the residuals after warm-up, innovations of `tail` fitted."""
    residuals = (values - trend_of(values))[WARMUP:]
    phi = np.corrcoef(residuals[:-1], residuals[1:])[0, 1]
    shape = tail.fit(residuals[1:] - phi * residuals[:-1])
    drawn = tail.rvs(*shape, size=steps, random_state=generator)
    return signal.lfilter([1.0], [1.0, -phi], drawn), phi, shape


def clean_steps(steps: int, seed: int, file: Path = CURVE) -> Iterator[tuple[float, float]]:
    """Yield (loss, gradient norm): the run's trend, then its last level held, with noise fitted to its own.

    Tails are heavier than in the run: Student's t for the loss, a normal with an exponential tail for the logarithm of
    the norm.
    """
    generator = np.random.default_rng(seed)
    losses, norms = read_curve(file)
    columns = []
    for values, tail in ((losses, stats.t), (norms, stats.exponnorm)):
        noise, _, _ = fitted_noise(values, tail, steps, generator)
        trend = trend_of(values)
        columns.append(noise + np.concatenate([trend[:steps], np.full(max(0, steps - len(trend)), trend[-1])]))
    yield from zip(columns[0].tolist(), np.exp(columns[1]).tolist(), strict=True)


def false_alarms(steps: int, seed: int, file: Path = CURVE) -> Counter[str]:
    """Return how many of `steps` clean steps the detector calls what."""
    state, config, found = SpikeState(), SpikesConfig(), Counter()
    for loss, norm in clean_steps(steps, seed, file):
        finding, state = state.after(loss, norm, config)
        if finding is not None:
            found[finding.kind] += 1
    return found


if __name__ == "__main__":
    source = Path(sys.argv[2]) if len(sys.argv) > 2 else CURVE
    for name, values, tail in zip(("loss", "log norm"), read_curve(source), (stats.t, stats.exponnorm), strict=True):
        noise, phi, shape = fitted_noise(values, tail, 10**5, np.random.default_rng(0))
        parameters = ", ".join(f"{value:.3g}" for value in shape)
        print(f"{name}: sigma {noise.std():.3f}, autocorrelation {phi:+.2f}, {tail.name}({parameters})")
    count = int(sys.argv[1])
    found = false_alarms(count, 0, source)
    print(f"{sum(found.values())} in {count:,} steps, {sum(found.values()) / count * 1e4:.2f} in 10,000: {dict(found)}")
