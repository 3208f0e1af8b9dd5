"""Lines that a run prints as it starts: which data it takes."""

from lightning_llm.config.schema import Config
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.report import phase_reports, source_reports


def data_line(config: Config, corpus: Corpus) -> str:
    """Return what the run takes from each source, in tokens and epochs, and how much is held out."""
    parts = [
        f"{each.name} only watched ({each.validation_tokens:,} tokens)"
        if each.name in config.data.watched
        else f"{each.name} {each.achieved_share:.1%} = {each.drawn_tokens:,} tokens"
        f" ({each.epochs:.2f} epochs of {each.available_tokens:,}; {each.validation_tokens:,} held out)"
        for each in source_reports(corpus, config.trainer.max_steps * config.data.global_batch_size)
    ]
    return "data   " + " | ".join(parts)


def phase_lines(config: Config, corpus: Corpus) -> list[str]:
    """Return what each phase of the mixture takes from each source, in tokens and epochs, where there are several."""
    phases = phase_reports(corpus, config.trainer.max_steps * config.data.global_batch_size)
    if len(phases) == 1:
        return []
    lines = []
    for phase in phases:
        drawn = phase.drawn_tokens
        parts = [f"{name} {drawn[name]:,} tokens ({phase.epochs[name]:.2f} epochs)" for name in drawn]
        lines.append(f"phase  {phase.name}, steps {phase.first_step + 1} to {phase.last_step}: {' | '.join(parts)}")
    return lines


def chosen_lines(corpus: Corpus) -> list[str]:
    """Return how often documents of each source stand in its training stream, where a mixture chooses them."""
    return [
        f"copies {name}: {each['copies']:,} of {each['documents']:,} documents ({each['expected']:,.1f} expected), "
        f"{each['most']} of one at most, {each['dropped']:,} left out"
        for name, each in corpus.chosen.items()
        if "copies" in each
    ]


def account_lines(corpus: Corpus) -> list[str]:
    """Return a note for each loss between the files of a source and its tokens."""
    lines = [line for name, account in corpus.accounts.items() for line in account.lines(name)]
    if sampling := corpus.tokenizer.sampling:
        text = f"data.tokenizer: sampling of tokens ({sampling} in its file) is switched off"
        lines.append(f"{text}, so that a text always has the same tokens")
    return [f"note   {line}" for line in lines]
