"""Account of a source: the files and records that were read, and what was lost on the way to tokens."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

EXAMPLES = 20


@dataclass(frozen=True)
class SourceAccount:
    """Counts of one source.

    `endings`: files read, by ending. `skipped_files`: path -> reason. `blank_records`: text null or blank.
    `dropped_characters`: not blank, and without any token: those of `shortened_documents` in part, of
    `emptied_documents` all. `unknown_tokens`: stand for text that the tokenizer does not know.
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
        """Return it as JSON data; of skipped files the number by reason, and the first few."""
        kept = {name: value for name, value in vars(self).items() if name != "skipped_files"}
        examples = [f"{path}: {reason}" for path, reason in sorted(self.skipped_files.items())[:EXAMPLES]]
        return kept | {"skipped_files": dict(Counter(self.skipped_files.values())), "skipped_examples": examples}

    def lines(self, name: str) -> list[str]:
        """Return a line for each loss of the source `name`."""
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
            lines.append(f"{key}: {_count(self.blank_records, 'record')} left out, whose text is null or blank")
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
