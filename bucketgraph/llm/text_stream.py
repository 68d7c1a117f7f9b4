"""Tokens to text, one request at a time, with an eye on its stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from bucketgraph.llm.request import Request
from bucketgraph.llm.tokenizer import Tokenizer


class TextStream:
    """One request's text as it grows, held back while it might still turn into a stop string."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._stream = tokenizer.stream(request.params.skip_special_tokens)
        self._stops, self._keeps_stop = request.params.stop_strings, request.params.include_stop_str_in_output
        self._held = ""

    def push(self, ids: Sequence[int], early: int, reason: str | None) -> tuple[str, int, str | None]:
        """The text that is certain now, how many of the new tokens are taken, and the stop string that the last of
        these completes, if any.

        Args:
            ids: new tokens.
            early: so many of them come too soon for a stop string.
            reason: why the request ends with the last one, or None if it does not.
        """
        if not self._stops:
            return self._decode(ids, reason), len(ids), None
        out = ""
        for taken, token in enumerate(ids, start=1):
            ends = reason if taken == len(ids) else None
            self._held += self._decode([token], ends)
            if taken > early:
                found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
                if found:
                    at, stop = min(found)
                    return out + self._held[: at + len(stop) if self._keeps_stop else at], taken, stop
            certain = len(self._held) - (0 if ends is not None else _possible_start(self._held, self._stops))
            out, self._held = out + self._held[:certain], self._held[certain:]
        return out, len(ids), None

    def _decode(self, ids: Sequence[int], reason: str | None) -> str:
        # A token that ends the request by itself is part of the text only where stop strings are, as in vLLM.
        text = self._stream.feed(ids[:-1] if reason == "stop" and not self._keeps_stop else ids)
        return text + self._stream.finish() if reason is not None else text


def _possible_start(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
