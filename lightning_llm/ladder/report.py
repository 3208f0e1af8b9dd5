"""A ladder's results: as data, as sentences, and on a terminal."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_llm.base.errors import Problem
from lightning_llm.base.terminal import escaped
from lightning_llm.compare.format import nats, per_parameter, short
from lightning_llm.ladder.fit import Effect, Fit, Gap, effect_at
from lightning_llm.ladder.measured import Ladder
from lightning_llm.ladder.predictions import Prediction, prediction_line, tally
from lightning_llm.ladder.refusal import law_misfit, too_small


@dataclass
class Report:
    """Results of a ladder.

    `fit`: None without a fit (see `problems`); `refused`: {recipe: reasons for no prediction}; `predictions` made now;
    `ledger`: all recorded predictions, if requested; `graded`: number graded now.
    """

    ladder: Ladder
    confidence: float
    fit: Fit | None = None
    refused: dict[str, list[str]] = field(default_factory=dict)
    predictions: list[Prediction] = field(default_factory=list)
    ledger: list[Prediction] | None = None
    graded: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def misfit(self) -> list[str]:
        """Reasons why no cost is computed from the fit (`law_misfit`); [] if costs are computed, or without a fit."""
        return [] if self.fit is None else law_misfit(self.fit)

    def costs(self, effect: Effect) -> str:
        """Return the cost in tokens as text, "4.1 % more tokens [2.0, 6.5]"; "-" if the law does not hold."""
        return "-" if self.misfit else effect.text

    def effects(self, recipe: str) -> list[Effect]:
        """Return the fitted cost of the recipe at each rung on which it was run; [] without a fit."""
        if self.fit is None:
            return []
        rungs = [rung for rung in self.ladder.rungs if rung.differences.get(recipe)]
        return [effect_at(self.fit, recipe, rung.parameters, rung.tokens, self.confidence) for rung in rungs]

    def as_data(self) -> dict[str, Any]:
        """Return the report as JSON data, as `--json` prints it."""
        fit = self.fit
        data: dict[str, Any] = {
            "baseline": self.ladder.baseline,
            "metric": self.ladder.metric,
            "confidence": self.confidence,
            "law": None,
            "recipes": [],
            "predictions": [each.as_data() for each in self.predictions],
            "ledger": None if self.ledger is None else [each.as_data() for each in self.ledger],
            "tally": None if self.ledger is None else tally(self.ledger),
            "left_out": [{"parameters": n, "tokens": d, "reason": why} for (n, d), why in self.ladder.left_out.items()],
            "problems": [{"key": each.key, "text": each.text} for each in self.problems],
            "notes": self.notes,
            "runs": self.ladder.rows(),
        }
        if fit is not None:
            data["law"] = {**fit.law.constants(), "misfit": fit.misfit, "fall": fit.fall, "noise": fit.noise,
                           "lack_of_fit_p": fit.lack_of_fit, "residuals": [
                               {"parameters": rung.parameters, "tokens": rung.tokens, "residual": float(residual)}
                               for rung, residual in zip(fit.ladder.rungs, fit.residuals, strict=True)]}  # fmt: skip
        fitted = fit.gaps if fit is not None else {}
        data["recipes"] = [
            self._recipe(fit, name) if fit is not None and name in fitted else self._unfitted(name)
            for name in self.ladder.recipes
        ]
        return data

    def _unfitted(self, name: str) -> dict[str, Any]:
        """Return the data of a recipe without a fitted gap."""
        rungs = [
            {"parameters": rung.parameters, "tokens": rung.tokens, "measured_gap": float(np.mean(list(pairs.values())))}
            for rung in self.ladder.rungs
            if (pairs := rung.differences.get(name))
        ]
        return {"name": name, "terms": None, "refused": self.refused.get(name, []), "rungs": rungs}

    def _recipe(self, fit: Fit, name: str) -> dict[str, Any]:
        gap = fit.gaps[name]
        t, p = gap.growth
        errors = gap.drawn.std(0, ddof=1)
        return {
            "name": name,
            "terms": dict(zip(("c_D", "c_N", "c_O"), map(float, gap.terms), strict=True)),
            "standard_errors": dict(zip(("c_D", "c_N", "c_O"), map(float, errors), strict=True)),
            "pair_sd": gap.sd,
            "df": gap.df,
            "lack_of_fit_p": gap.lack_of_fit,
            "growth": {"t": t, "p": p},
            "refused": self.refused.get(name, []),
            "rungs": [
                {"parameters": each.parameters, "tokens": each.tokens, "gap": each.gap, "more_tokens": each.more_tokens,
                 "more_tokens_ci": [each.low, each.high], "measured_gap": measured_gap(self.ladder, each)}
                for each in self.effects(name)
            ],
        }  # fmt: skip


def measured_gap(ladder: Ladder, effect: Effect) -> float:
    """Return the mean gap of the effect's recipe on its rung, nats per token."""
    rung = next(rung for rung in ladder.rungs if rung.place == (effect.parameters, effect.tokens))
    return float(np.mean(list(rung.differences[effect.recipe].values())))


def print_report(report: Report, console: Console) -> None:
    """Print the fit, a line per recipe and rung, predictions or refusals, and the ledger."""
    if report.fit is not None:
        for reason in report.misfit:
            _line(console, f"No cost is computed from this fit: {reason}.", "yellow")
        _line(console, law_line(report.fit))
        for name, gap in report.fit.gaps.items():
            _line(console, gap_line(name, gap))
        console.print(_table(report, report.fit))
    for each in report.predictions:
        _line(console, prediction_line(each), "bold")
    for each in report.ledger or []:
        _line(console, prediction_line(each), "" if each.outcome is None or each.outcome["inside"] else "red")
    if report.ledger:
        _line(console, tally(report.ledger), "bold")
    reported = {problem.key for problem in report.problems}  # on stderr
    for name, reasons in report.refused.items():
        for reason in reasons if name not in reported else ():
            _line(console, f"{name} is not predicted: {reason}.", "yellow")
    listed = report.fit is None and bool(too_small(report.ladder))  # the problem lists every rung
    for (parameters, tokens), why in report.ladder.left_out.items() if not listed else ():
        _line(console, f"{short(parameters)} / {short(tokens)} is left out: {why}.", "dim")
    for note in report.notes:
        _line(console, note, "dim")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(escaped(text), style=style), soft_wrap=not console.is_terminal)


def _table(report: Report, fit: Fit) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for name in ("recipe", "parameters", "tokens", "tokens/parameter", "measured gap", "fitted", "costs"):
        table.add_column(name, justify="left" if name in ("recipe", "costs") else "right", no_wrap=True)
    for name in fit.gaps:
        for each in report.effects(name):
            table.add_row(
                name, short(each.parameters), short(each.tokens), per_parameter(each.tokens, each.parameters),
                nats(measured_gap(report.ladder, each), signed=True), nats(each.gap, signed=True), report.costs(each),
            )  # fmt: skip
    return table


def law_line(fit: Fit) -> str:
    """Return the baseline's law as a line of text, with its goodness of fit."""
    law = fit.law.constants()
    lack = "" if fit.lack_of_fit != fit.lack_of_fit else f", lack of fit p = {fit.lack_of_fit:.2g}"
    return (
        f"{fit.ladder.baseline}: L = {law['E']:.3f} + {law['A']:.3g} N^-{law['alpha']:.3f} + {law['B']:.3g} "
        f"D^-{law['beta']:.3f} over {len(fit.ladder.rungs)} rungs (residual {fit.misfit:.4f} of a fall of "
        f"{fit.fall:.3f} nats{lack})"
    )


def gap_line(name: str, gap: Gap) -> str:
    """Return a recipe's fitted gap as a line of text: its terms with their standard errors."""
    errors = gap.drawn.std(0, ddof=1)
    c_d, c_n, c_o = (f"{value:+.2g} ({error:.1g})" for value, error in zip(gap.terms, errors, strict=True))
    lack = "" if gap.lack_of_fit != gap.lack_of_fit else f", lack of fit p = {gap.lack_of_fit:.2g}"
    return (
        f"{name}: gap = {c_d} B D^-beta {c_n} A N^-alpha {c_o} D/N (standard errors in brackets), SD of a pair "
        f"{gap.sd:.4f}, {gap.df} degrees of freedom{lack}; {gap.growth_text}"
    )
