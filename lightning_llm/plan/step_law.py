"""Step Law: peak learning rate and batch size of a model and a number of tokens. Imports no torch.

Li et al. 2025, "Predictable Scale: Part I", arXiv 2503.04715. Their released fit (`pred-opt-lr-bs` in
`code/fit_tool.py`) is the mean of 1,000 bootstraps, in logarithms:

    learning rate = 1.797 N^-0.7129 D^0.3075        batch in tokens = 0.5807 D^0.5709

N is the number of weights in the blocks' linears, D the tokens of the run. It was fitted on AdamW, sequences of 2,048
tokens and learning rates that decay to 1e-5.
"""

import math
from dataclasses import dataclass
from typing import Any

from lightning_llm.base.errors import Problem
from lightning_llm.config.resolve import StepLawRequest
from lightning_llm.config.schema import Config
from lightning_llm.model.flops import count_parameters
from lightning_llm.plan.resolve import DerivedConfig

RATE_INTERCEPT, RATE_PARAMETERS, RATE_TOKENS = 0.5863077907399267, -0.7129222911869902, 0.3074909504120696
BATCH_INTERCEPT, BATCH_TOKENS = -0.5435421736103339, 0.5709443646895044
"""Means over the rows of their `data/1004_fitted_lr_bs_scaling_model_parameters.csv`."""
FITTED_PARAMETERS = (214_663_680, 1_073_741_824)
FITTED_TOKENS = (4e9, 1e11)
"""Smallest and largest N and D of the dense runs in the fit."""
FITTED_SEQUENCE_LENGTH, FITTED_FINAL_RATE = 2048, 1e-5
DIGITS = 4
"""Significant digits of the learning rate, as in the authors' tool."""


def law_learning_rate(parameters: float, tokens: float) -> float:
    """Return the peak learning rate for N `parameters` and D `tokens`."""
    return math.exp(RATE_INTERCEPT + RATE_PARAMETERS * math.log(parameters) + RATE_TOKENS * math.log(tokens))


def law_batch_tokens(tokens: float) -> float:
    """Return the tokens per optimizer step for a total of D `tokens`."""
    return math.exp(BATCH_INTERCEPT + BATCH_TOKENS * math.log(tokens))


def batch_tokens_at_steps(steps: int, factor: float = 1.0) -> float:
    """Return the batch B in tokens that is `factor` times the law's batch at D = `steps` B, in closed form."""
    logarithm = (math.log(factor) + BATCH_INTERCEPT + BATCH_TOKENS * math.log(steps)) / (1 - BATCH_TOKENS)
    return math.exp(logarithm)


@dataclass(frozen=True)
class StepLaw:
    """Step Law's result for a run, and how the run compares with the runs of the fit.

    `parameters` is N. `tokens` is D, computed with the rounded batch. `learning_rate` and `batch_tokens` are the law's
    values, each None if the config gives a number instead. `batch_sequences` is the batch rounded to a multiple of
    `rounded_to`, data-parallel ranks x micro-batch. `rate_factor` and `batch_factor` multiply the law's values.
    """

    parameters: int
    tokens: int
    sequence_length: int
    rounded_to: int
    batch_sequences: int
    rate_factor: float | None = None
    batch_factor: float | None = None
    learning_rate: float | None = None
    batch_tokens: float | None = None
    optimizer: str = "adamw"
    final_rate: float | None = None

    @property
    def inside(self) -> bool:
        """Whether N and D are in the fitted range."""
        (fewest, most), (short, long) = FITTED_PARAMETERS, FITTED_TOKENS
        return fewest <= self.parameters <= most and short <= self.tokens <= long

    @property
    def unlike(self) -> list[str]:
        """Descriptions of settings in which this run differs from the runs of the fit, other than N and D."""
        found = []
        if self.sequence_length != FITTED_SEQUENCE_LENGTH:
            found.append(f"sequences of {FITTED_SEQUENCE_LENGTH:,} tokens (here {self.sequence_length:,})")
        if self.optimizer != "adamw":
            found.append(f"AdamW (here {self.optimizer})")
        if self.final_rate != FITTED_FINAL_RATE:
            found.append("a rate that decays to 1e-5 (schedule.final_learning_rate=1e-5)")
        return found

    def as_data(self) -> dict[str, Any]:
        """Return the `step_law` entry of `plan --json`."""
        return {
            "parameters": self.parameters,
            "tokens": self.tokens,
            "learning_rate": self.learning_rate,
            "learning_rate_factor": self.rate_factor,
            "batch_tokens": self.batch_tokens,
            "batch_factor": self.batch_factor,
            "batch_sequences": self.batch_sequences,
            "rounded_to_sequences": self.rounded_to,
            "inside_fitted_range": self.inside,
            "fitted_parameters": list(FITTED_PARAMETERS),
            "fitted_tokens": list(FITTED_TOKENS),
            "fitted_otherwise": self.unlike,
        }


def apply_step_law(
    values: dict[str, Any], request: StepLawRequest, config: Config
) -> tuple[dict[str, Any], StepLaw | None, list[Problem]]:
    """Return (`values` with numbers in place of `request`, the law's result, problems).

    Args:
        values: a resolved config as plain data, changed in place.
        request: the requested factors and tokens.
        config: the same config, parsed, with placeholders for `request`.
    """
    problems = [*_problems(request, config)]
    if problems:
        return values, None, problems
    length = config.data.sequence_length
    multiple = config.data.micro_batch_size * DerivedConfig(config).data_parallel_ranks
    batch_tokens, sequences, steps = None, config.data.global_batch_size, config.trainer.max_steps
    if request.batch is not None:
        given = request.tokens
        batch_tokens = request.batch * law_batch_tokens(given) if given else batch_tokens_at_steps(steps, request.batch)
        sequences = max(1, round(batch_tokens / length / multiple)) * multiple
        values["data"]["global_batch_size"] = sequences
    if request.tokens is not None:
        steps = max(1, round(request.tokens / (sequences * length)))
        values["trainer"]["max_steps"] = steps
    if request.batch is None and request.rate is None:
        return values, None, []
    parameters, tokens, rate = count_parameters(config.model).active_linear, steps * sequences * length, None
    if request.rate is not None:
        rate = float(f"{request.rate * law_learning_rate(parameters, tokens):.{DIGITS - 1}e}")
        values["optim"]["learning_rate"] = rate
    final = None if config.schedule.name == "constant" else config.schedule.final_learning_rate
    law = StepLaw(
        parameters, tokens, length, multiple, sequences, request.rate, request.batch, rate, batch_tokens,
        config.optim.name, final,
    )  # fmt: skip
    return values, law, []


def _problems(request: StepLawRequest, config: Config) -> list[Problem]:
    if (request.rate is None and request.batch is None) or config.optim.takes_adamw_rates:
        return []
    key = "optim.learning_rate" if request.rate is not None else "data.global_batch_size"
    text = f"is step_law, which is fitted on AdamW, and optim={config.optim.name} needs other rates. Give a number"
    muon = ", or optim.adjust_learning_rate=match_rms_adamw" if config.optim.name == "muon" else ""
    return [Problem(key, f"{text}{muon}.")]


def law_row(law: dict[str, Any]) -> tuple[str, str]:
    """Return `StepLaw.as_data` as a line of `plan`."""
    parts = [f"N = {law['parameters']:,} without embeddings, D = {law['tokens']:,} tokens"]
    if law["learning_rate"] is not None:
        parts.append(f"learning rate {law['learning_rate']:g}{_times(law['learning_rate_factor'])}")
    if law["batch_tokens"] is not None:
        parts.append(
            f"batch {law['batch_tokens']:,.0f} tokens{_times(law['batch_factor'])}, rounded to "
            f"{law['batch_sequences']:,} sequences (a multiple of {law['rounded_to_sequences']:,})"
        )
    where = "inside" if law["inside_fitted_range"] else "outside"
    but = ", other settings differ from the fit (see notes)" if law["fitted_otherwise"] else ""
    return "step law", f"{'; '.join(parts)}; N and D are {where} the fitted range{but}"


def _times(factor: float) -> str:
    return "" if factor == 1 else f" ({factor:g} x the law's)"


def law_notes(law: StepLaw | None) -> list[str]:
    """Return notes on how the run differs from the fit, one line each."""
    if law is None:
        return []
    found = []
    low, high = (f"{each / 1e6:,.0f}M" for each in FITTED_PARAMETERS)
    if not law.inside:
        found.append(
            f"note   Step Law was fitted on N from {low} to {high} and D from 4B to 100B tokens; N = "
            f"{law.parameters:,} and D = {law.tokens:,} are extrapolated: try neighboring rates, too "
            "(optim.learning_rate=step_law*0.5,step_law,step_law*2)"
        )
    if law.batch_tokens is not None:
        ratio = law.batch_sequences * law.sequence_length / law.batch_tokens
        if abs(math.log(ratio)) > math.log(1.1):
            found.append(
                f"note   rounding makes the batch {ratio:.2g} x Step Law's: a smaller data.micro_batch_size "
                "comes closer"
            )
    if law.unlike:
        found.append(f"note   Step Law was fitted on {', '.join(law.unlike)}")
    return found
