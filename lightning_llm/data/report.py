"""Reports on a corpus: text lost per source, tokens that a run draws per source and phase, and their printed lines.

Imports no torch, because `plan` uses `planned_phases`.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_llm.config.schema import Config
from lightning_llm.config.schema.data import DataConfig
from lightning_llm.data.mixing.addressing import Mixture

if TYPE_CHECKING:
    from lightning_llm.data.corpus import Corpus

EXAMPLES = 20


@dataclass(frozen=True)
class SourceAccount:
    """Counts of the files and documents of one source, and of text that did not become tokens.

    `endings`: {ending: number of files read}. `skipped_files`: {path: reason}. `blank_records`: records with null or
    blank text. `dropped_characters`: non-blank characters without a token; `shortened_documents` lost some of theirs,
    `emptied_documents` all. `unknown_tokens`: number of tokens for unknown text.
    """

    files: int = 0
    endings: dict[str, int] = field(default_factory=dict)
    skipped_files: dict[str, str] = field(default_factory=dict)
    blank_records: int = 0
    documents: int = 0
    shortened_documents: int = 0
    emptied_documents: int = 0
    dropped_characters: int = 0
    unknown_tokens: int = 0

    def facts(self) -> dict[str, Any]:
        """Return the counts as JSON data for summary.json: skipped files by reason, with some examples."""
        kept = {name: value for name, value in vars(self).items() if name != "skipped_files"}
        examples = [f"{path}: {reason}" for path, reason in sorted(self.skipped_files.items())[:EXAMPLES]]
        return kept | {"skipped_files": dict(Counter(self.skipped_files.values())), "skipped_examples": examples}

    def lines(self, name: str) -> list[str]:
        """Return lines for a terminal about skipped files and dropped text of the source `name`; [] if none."""
        key, lines = f"data.sources.{name}", []
        read = f"{key}: {_count(self.files, 'file')} read"
        if len(self.endings) > 1:
            read += f" ({', '.join(f'{count:,} {ending}' for ending, count in sorted(self.endings.items()))})"
        if self.skipped_files:
            counts = Counter(self.skipped_files.values()).most_common()
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts[:4]) + (", ..." if counts[4:] else "")
            lines.append(f"{read}; {len(self.skipped_files):,} not: {reasons} (such as {min(self.skipped_files)!r})")
        elif len(self.endings) > 1:
            lines.append(read)
        if self.blank_records:
            lines.append(f"{key}: {_count(self.blank_records, 'record')} with null or blank text skipped")
        if lost := self.shortened_documents + self.emptied_documents:
            dropped = f"the tokenizer has no token for {_count(self.dropped_characters, 'character')} and dropped them"
            of_all = f"{lost:,} of {self.documents:,} documents"
            lines.append(f"{key}: {dropped}: {of_all} are shorter, {self.emptied_documents:,} of these empty")
        if self.unknown_tokens:
            unknown = _count(self.unknown_tokens, "token")
            lines.append(f"{key}: {unknown} stand for text that the tokenizer does not know")
        return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class SourceReport:
    """A run's use of one source: its share by weight and as drawn, tokens, and (fractional) epochs."""

    name: str
    share: float
    achieved_share: float
    available_tokens: int
    drawn_tokens: int
    epochs: float
    documents: int
    validation_tokens: int


@dataclass(frozen=True)
class PhaseReport:
    """Tokens and epochs that a run draws from each source in one phase of its mixture.

    The phase begins after `first_step` steps and ends with step `last_step`.
    """

    name: str
    first_step: int
    last_step: int
    drawn_tokens: dict[str, int]
    epochs: dict[str, float]


def source_reports(corpus: "Corpus", total_samples: int) -> list[SourceReport]:
    """Return the use of each source by a run of `total_samples` sequences (steps x global batch size)."""
    length, drawn = corpus.config.sequence_length, corpus.order.drawn(total_samples)
    of_source = {name: s for s, name in enumerate(corpus.trained)}
    reports = []
    for name, held_out in zip(corpus.names, corpus.held_out, strict=True):
        s = of_source.get(name)
        count, windows = (drawn[s], corpus.order.windows[s]) if s is not None else (0, 0)
        reports.append(
            SourceReport(
                name=name,
                share=corpus.mix_shares[s] if s is not None else 0.0,
                achieved_share=count / total_samples if total_samples else 0.0,
                available_tokens=windows * length,
                drawn_tokens=count * length,
                epochs=count / windows if windows else 0.0,
                documents=len(corpus.train[s].starts) if s is not None else 0,
                validation_tokens=len(held_out.tokens),
            )
        )
    return reports


def phase_reports(corpus: "Corpus", total_samples: int) -> list[PhaseReport]:
    """Return the use of the sources in each phase of a run of `total_samples` sequences (steps x global batch size)."""
    length, width = corpus.config.sequence_length, corpus.config.global_batch_size
    return [
        PhaseReport(
            name=phase.name,
            first_step=phase.first // width,
            last_step=-(-phase.last // width),
            drawn_tokens={name: n * length for name, n in zip(corpus.trained, phase.drawn, strict=True)},
            epochs={
                name: n / windows if windows else 0.0
                for name, n, windows in zip(corpus.trained, phase.drawn, corpus.order.windows, strict=True)
            },
        )
        for phase in corpus.order.mixture.phases(total_samples)
    ]


def planned_phases(config: DataConfig, max_steps: int) -> list[dict[str, Any]]:
    """Return the phases of `data.mixture` as JSON data, from the config alone: `name`, steps, and tokens by source.

    A phase begins after `first_step` steps and ends with step `last_step`. Returns [] without a mixture, or if its
    shares depend on the documents, which are not read here.
    """
    if config.mixture is None or config.mixture.shares_by_tokens:
        return []
    mixture: Mixture = config.mixture.build(config.trained_weights, config.global_batch_size, max_steps)
    width, length = config.global_batch_size, config.sequence_length
    return [
        {
            "name": phase.name,
            "first_step": phase.first // width,
            "last_step": phase.last // width,
            "drawn_tokens": {name: n * length for name, n in zip(mixture.names, phase.drawn, strict=True)},
        }
        for phase in mixture.phases(max_steps * width)
    ]


def data_line(config: Config, corpus: "Corpus") -> str:
    """Return the line "data ..." of a run's start: tokens and epochs from each source, and its held-out tokens."""
    parts = [
        f"{each.name} validation only ({each.validation_tokens:,} tokens)"
        if each.name in config.data.watched
        else f"{each.name} {each.achieved_share:.1%} = {each.drawn_tokens:,} tokens"
        f" ({each.epochs:.2f} epochs of {each.available_tokens:,}; {each.validation_tokens:,} held out)"
        for each in source_reports(corpus, config.trainer.max_steps * config.data.global_batch_size)
    ]
    return "data   " + " | ".join(parts)


def phase_lines(config: Config, corpus: "Corpus") -> list[str]:
    """Return a line per phase with the tokens and epochs from each source; [] if there is only one phase."""
    phases = phase_reports(corpus, config.trainer.max_steps * config.data.global_batch_size)
    if len(phases) == 1:
        return []
    lines = []
    for phase in phases:
        drawn = phase.drawn_tokens
        parts = [f"{name} {drawn[name]:,} tokens ({phase.epochs[name]:.2f} epochs)" for name in drawn]
        lines.append(f"phase  {phase.name}, steps {phase.first_step + 1} to {phase.last_step}: {' | '.join(parts)}")
    return lines


def chosen_lines(corpus: "Corpus") -> list[str]:
    """Return a line per source with the copies of its documents; [] unless the mixture sets their number."""
    return [
        f"copies {name}: {each['copies']:,} of {each['documents']:,} documents ({each['expected']:,.1f} expected), "
        f"{each['most']} of one at most, {each['dropped']:,} left out"
        for name, each in corpus.chosen.items()
        if "copies" in each
    ]


def account_lines(corpus: "Corpus") -> list[str]:
    """Return notes on skipped files, dropped text and sampling that was switched off; [] if nothing was lost."""
    lines = [line for name, account in corpus.accounts.items() for line in account.lines(name)]
    if sampling := corpus.tokenizer.sampling:
        text = f"data.tokenizer: sampling of tokens ({sampling} in its file) is switched off"
        lines.append(f"{text}, so that a text always has the same tokens")
    return [f"note   {line}" for line in lines]
