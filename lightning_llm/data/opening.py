"""Opening a corpus: each source scanned, tokenised where no cache holds it, and mapped."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.config.schema.data import DataConfig
from lightning_llm.data.check import cache_dir_of
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.mixing.chosen import choose_documents
from lightning_llm.data.mixing.max_tokens import limit_problem, window_limits
from lightning_llm.data.prepare import ALL_HELD_OUT, Scan, hold_out, prepare_streams, prepare_tokenizer, scan
from lightning_llm.data.report import SourceAccount
from lightning_llm.data.sources.source import Source
from lightning_llm.data.tokens.token_files import TokenStream
from lightning_llm.data.tokens.tokenised import id_problem, scan_tokens, token_streams


def open_corpus(
    config: DataConfig, seed: int, vocab_size: int, max_steps: int | None = None, progress: bool = False
) -> Corpus:
    """Prepare (where not cached) and map the corpus of `config`; `vocab_size` is the model's.

    `max_steps` is the run's length, which a mixture may go by.

    `progress` shows bars on stderr while something is built. Processes that ask at once wait for the one that builds.
    `config` has passed `check_data`. Raises ConfigError with every problem that the same stage finds.
    """
    cache_dir = cache_dir_of(config)
    sources = {name: Source(name, source) for name, source in config.sources.items()}
    trained = {name: source for name, source in sources.items() if source.config.role is None}
    scans, token_files = _scan_all(sources, config, cache_dir, progress)
    held_out = hold_out({name: scans[name] for name in trained}, config.validation.fraction)
    texts = {name: source for name, source in trained.items() if name not in token_files}
    tokenizer = prepare_tokenizer(config.tokenizer, vocab_size, texts, scans, held_out, cache_dir, progress)
    found = (id_problem(sources[name], scans[name], tokenizer, vocab_size) for name in token_files)
    if problems := [problem for problem in found if problem is not None]:
        raise ConfigError(problems)
    streams, losses = {}, {}
    for name, source in sources.items():
        rule = held_out if name in trained else ALL_HELD_OUT
        if name in token_files:
            streams[name] = token_streams(
                source, token_files[name], rule, tokenizer, config.tokenizer, cache_dir, progress
            )
        else:
            processes = config.tokenize_processes
            made = prepare_streams(source, scans[name], rule, tokenizer, cache_dir, progress, processes)
            streams[name], losses[name] = made
    chosen = choose_documents(config, sources, streams, held_out, cache_dir)
    if problems := [each for name in config.drawn for each in _length_problems(name, streams[name], config)]:
        raise ConfigError(problems)
    accounts = {
        name: SourceAccount(
            files=len(source.files) - len(scans[name].skipped_files),
            endings=_endings(source),
            skipped_files=source.skipped_files | scans[name].skipped_files,
            blank_records=scans[name].left_out,
            documents=scans[name].documents,
            **losses.get(name, {}),
        )
        for name, source in sources.items()
    }
    return Corpus(config, seed, tokenizer, streams, accounts, max_steps, chosen)


def _scan_all(
    sources: Mapping[str, Source], config: DataConfig, cache_dir: Path, progress: bool
) -> tuple[dict[str, Scan], dict[str, Path]]:
    """Return the scan of each source, and the index folder of each pretokenized source.

    Raises ConfigError with the problems of all.
    """
    scans: dict[str, Scan] = {}
    token_files: dict[str, Path] = {}
    problems: list[Problem] = []
    for name, source in sources.items():
        with gathered(problems):
            if source.config.tokenised:
                token_files[name], scans[name] = scan_tokens(source, config.tokenizer, cache_dir, progress)
            else:
                scans[name] = scan(source, cache_dir, progress)
    if problems:
        raise ConfigError(problems)
    return scans, token_files


def _endings(source: Source) -> dict[str, int]:
    """Return {ending: number of files} of a text source, for the endings that its loader reads."""
    config = source.config
    if config.tokenised or not config.suffixes:
        return {}
    names = [file.name.lower() for file in source.files]
    return dict(Counter(next((e for e in config.suffixes if name.endswith(e)), "others") for name in names))


def _length_problems(name: str, streams: dict[str, TokenStream], config: DataConfig) -> Iterator[Problem]:
    needed, available = config.sequence_length + 1, len(streams["train"].tokens)
    if available < needed:
        yield Problem(
            "data.sequence_length",
            f"{config.sequence_length:,} needs {needed:,} training tokens, and source {name!r} has {available:,}. "
            f"Shorten it to {max(1, available - 1):,} or less, or give the source more text.",
        )
    elif (limits := window_limits(config)) and (problem := limit_problem(name, limits[name], available, config)):
        yield problem
