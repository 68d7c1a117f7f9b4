"""Tokens to text, one request at a time, with an eye on its stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from bucketgraph.llm.request import Request
from bucketgraph.llm.tokenizer import Tokenizer


class TextStream:
    """One request's text as it grows, held back while it might still turn into a stop string."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._stream = tokenizer.stream(request.params.skip_special_tokens)
        self._request = request
        self._held = ""

    def push(self, token: int, stops_count: bool) -> str:
        """The text that is certain now. Sets the request's finish reason when a stop string is complete."""
        request, stops = self._request, self._request.params.stop_strings
        # A token that ends the request by itself is part of the text only where stop strings are, as in vLLM.
        if request.finish_reason != "stop" or request.params.include_stop_str_in_output:
            self._held += self._stream.feed(token)
        if request.finish_reason is not None:
            self._held += self._stream.finish()
        if stops_count:
            found = [(at, stop) for stop in stops if (at := self._held.find(stop)) >= 0]
            if found:
                at, stop = min(found)
                request.finish_reason, request.stop_reason = "stop", stop
                return self._held[: at + len(stop) if request.params.include_stop_str_in_output else at]
        keep = 0 if request.finish_reason is not None else _possible_start(self._held, stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out


def _possible_start(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
