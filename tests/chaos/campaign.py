"""Random faults over layouts and recipes: after the last resume a run equals an undisturbed one and leaves nothing.

`make chaos` runs a hundred and prints a table; each fault is a function of seed and number, so that one can be run
again: `make chaos ARGS="--seed 1 --only 37"`.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_llm.base.errors import ConfigError
from lightning_llm.run.launch.lock import lock_run
from lightning_llm.tracking.files import summary_of
from tests.chaos.chaos_job import ChaosJob
from tests.chaos.faults_at_random import KINDS, STEPS, Fault
from tests.run_metrics import curve
from tests.small_runs import small_words, write_corpus

STARTS = 6
START_SECONDS = 240


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault: exit codes of all starts, and the problem, "" for none. `befell`: the fault came in time."""

    number: int
    fault: Fault
    befell: bool
    codes: tuple[int | None, ...]
    problem: str


class Campaign:
    """Runs faults in `folder`; `words_of(folder)` are the overrides of a small run there, `store` an empty MLflow's."""

    def __init__(self, folder: Path, words_of, store: Path | None, seed: int):
        self.folder, self.words_of, self.store, self.seed = folder, words_of, store, seed
        self._references: dict[tuple[str, ...], list[tuple]] = {}

    def outcomes(self, numbers: range | list[int]) -> Iterator[Outcome]:
        """Yield the outcome of each fault."""
        for number in numbers:
            fault = Fault.drawn(self.seed, number)
            try:
                befell, codes, problem = self._suffer(number, fault)
            except Exception as error:  # an outcome, too: the campaign continues
                befell, codes, problem = True, (), f"{type(error).__name__}: {error}"
            if not problem:
                shutil.rmtree(self.folder / str(number), ignore_errors=True)
            yield Outcome(number, fault, befell, codes, problem)

    def _suffer(self, number: int, fault: Fault) -> tuple[bool, tuple[int | None, ...], str]:
        place = self.folder / str(number)
        (place / "tmp").mkdir(parents=True)
        if fault.kind == "MLflow gone" and self.store:
            shutil.copy(self.store, place / "mlflow.db")
        words = [*self._words(place), *fault.words(), "resume=auto"]
        codes: list[int | None] = []
        befell, jobs = False, list[ChaosJob]()
        for start in range(STARTS):
            job = self._start(words, place, real=fault.kind == "kill launcher" and start == 0)
            jobs.append(job)
            befell = fault.befall(job) if start == 0 else befell
            codes.append(job.wait(START_SECONDS))
            if codes[-1] is None:
                break
            time.sleep(0.5 if fault.kind == "kill launcher" and start == 0 else 0)
            if start == 0:
                fault.after(job)
            if codes[-1] == 0:
                break
        return befell, tuple(codes), self._problem(fault, place, jobs, codes)

    def _problem(self, fault: Fault, place: Path, jobs: list[ChaosJob], codes: list[int | None]) -> str:
        run = place / "run"
        if left := [number for job in jobs for number in job.left()]:
            return f"processes {left} were left"
        if codes[-1] != 0:
            return f"it did not come to its end: exit codes {codes}"
        if curve(run) != self._reference(fault):
            return "metrics.jsonl is not the undisturbed run's"
        if summary_of(run)["status"] != "finished":
            return f"summary.json has status {summary_of(run)['status']}"
        try:
            lock_run(run).release()
        except ConfigError as error:
            return str(error)
        odd = [path for path in run.rglob("*") if path.name.endswith((".partial", ".deleted"))]
        odd += [run / "ranks"] if (run / "ranks").exists() else []
        odd += [] if "kill" in fault.kind else list((place / "tmp").iterdir())  # which nobody is left to remove
        return f"left: {', '.join(str(path.relative_to(place)) for path in odd)}" if odd else ""

    def _reference(self, fault: Fault) -> list[tuple]:
        key = fault.layout, fault.recipe
        if key not in self._references:
            place = self.folder / "-".join(key)
            (place / "tmp").mkdir(parents=True)
            words = [*self._words(place), *fault.words(), "logger=none", "trainer.max_restarts=0"]
            job = self._start(words, place, real=False)
            if (code := job.wait(START_SECONDS)) != 0:
                raise RuntimeError(f"the undisturbed run ended with {code}: {job.log}")
            self._references[key] = curve(place / "run")
        return self._references[key]

    def _words(self, place: Path) -> list[str]:
        return [
            "train", *self.words_of(place), f"trainer.max_steps={STEPS}", "trainer.validate_every_steps=5",
            "checkpoint.keep_last=3", "precision.casts=eager", "data.micro_batch_size=1", "parallel.timeout_seconds=20",
            "model.hidden_size=64", "model.num_kv_heads=2", "data.sequence_length=64",
        ]  # fmt: skip

    def _start(self, words: list[str], place: Path, real: bool) -> ChaosJob:
        environment = {"TMPDIR": str(place / "tmp"), "OMP_NUM_THREADS": "1"}
        return ChaosJob(words, place / "log", environment, real)


def table(outcomes: list[Outcome]) -> str:
    """Return the campaign as a Markdown table: the faults of each kind that came in time, and the problems."""
    lines = ["| fault | runs | came in time | starts, mean | ended as undisturbed |", "|---|---|---|---|---|"]
    counted = Counter(each.fault.kind for each in outcomes)
    for kind in filter(counted.__getitem__, KINDS):
        its = [each for each in outcomes if each.fault.kind == kind]
        starts = sum(len(each.codes) for each in its) / len(its)
        sound = sum(not each.problem for each in its)
        lines.append(f"| {kind} | {len(its)} | {sum(each.befell for each in its)} | {starts:.1f} | {sound} |")
    return "\n".join(lines)


def main() -> int:
    """Run a campaign; return 1 where a run did not come out as undisturbed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, action="append", help="the number of one fault")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lightning-llm-chaos-"))
    corpus = write_corpus(folder / "corpus")
    made = []
    campaign = Campaign(folder, lambda place: small_words(corpus, place), None, arguments.seed)
    for each in campaign.outcomes(arguments.only or range(arguments.faults)):
        made.append(each)
        line = {"number": each.number, **each.fault.as_data(), "befell": each.befell, "codes": each.codes}
        print(json.dumps({**line, "problem": each.problem}), file=sys.stderr, flush=True)
    print(f"seed {arguments.seed}, {len(made)} faults, in {folder}\n\n{table(made)}")
    return int(any(each.problem for each in made))


if __name__ == "__main__":
    sys.exit(main())
