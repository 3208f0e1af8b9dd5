"""Text of generated tokens, piece by piece: only complete characters, and nothing of a stop string."""

from collections.abc import Sequence

from lightning_llm.data.tokens.token_text import REPLACEMENT
from lightning_llm.data.tokens.tokenizer import Tokenizer

CONTEXT_TOKENS = 8


class TextStream:
    """Decoder of tokens one by one; the returned pieces, joined, equal `Tokenizer.decode` of all tokens.

    A character of several tokens is returned with the last of them. Each piece is decoded together with the previous
    one, since a decoder may treat the beginning of a text differently. (`tokenizers.DecodeStream` does the same, but
    cannot return the rest at the end.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        """`prompt`: the tokens before the first one; their text is not returned."""
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
        self._shown = len(self._tokens)

    def add(self, token: int) -> str:
        """Add `token` and return the text that it completes; "" if a character is still incomplete."""
        self._tokens.append(token)
        return self._next(whole=False)

    def finish(self) -> str:
        """Return the remaining text after the last token, with U+FFFD for an incomplete character."""
        return self._next(whole=True)

    def _next(self, *, whole: bool) -> str:
        before = self._tokenizer.decode(self._tokens[: self._shown])
        text = self._tokenizer.decode(self._tokens)
        if len(text) <= len(before) or (text.endswith(REPLACEMENT) and not whole):
            return ""
        self._tokens = self._tokens[self._shown :]
        self._shown = len(self._tokens)
        return text[len(before) :]


class StopStrings:
    """Filter that returns added text up to the first occurrence of a stop string.

    If several stop strings end at the same place, the longest counts.
    """

    def __init__(self, stops: Sequence[str]):
        """`stops`: the stop strings, none of them empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that was found; None so far."""

    def add(self, text: str) -> str:
        """Add `text`; return the text that can be shown, because it is not even the beginning of a stop string.

        Returns "" after a stop string was found.
        """
        if self.found is not None:
            return ""
        self._held += text
        found = [(place + len(stop), place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            _, place, self.found = min(found)
            shown, self._held = self._held[:place], ""
            return shown
        keep = max((self._begun(stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """Return the text that was held back as the possible beginning of a stop string; call it at the end."""
        shown, self._held = self._held, ""
        return shown

    def _begun(self, stop: str) -> int:
        """Return the number of characters at the end of the held text that begin `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
