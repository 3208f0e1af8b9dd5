"""What a run takes from each source of its corpus, in all and phase by phase, by its length alone."""

from dataclasses import dataclass

from lightning_llm.data.corpus import Corpus


@dataclass(frozen=True)
class SourceReport:
    """What a run takes from one source: `share` by its weight, `achieved_share` as drawn; epochs are fractional."""

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
    """What a run takes from each source, by name, after `first_step` steps and up to `last_step`."""

    name: str
    first_step: int
    last_step: int
    drawn_tokens: dict[str, int]
    epochs: dict[str, float]


def source_reports(corpus: Corpus, total_samples: int) -> list[SourceReport]:
    """Return for each source what a run of `total_samples` sequences (steps x global_batch_size) takes of it."""
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


def phase_reports(corpus: Corpus, total_samples: int) -> list[PhaseReport]:
    """Return for each phase of the mixture what a run of `total_samples` sequences takes in it of each source."""
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
