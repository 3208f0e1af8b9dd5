"""Required parts of a message: key, value and remedy. The words between them may change."""


def missing(text: str, *parts: str) -> list[str]:
    """Return those of `parts` that `text` lacks, in this order; `assert missing(...) == []` shows both."""
    lacking, rest = [], text
    for part in parts:
        found = rest.find(part)
        if found < 0:
            lacking.append(f"{part!r} in {rest!r}")
        else:
            rest = rest[found + len(part) :]
    return lacking
