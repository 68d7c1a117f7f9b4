"""Batches that are padded already: rectangular token ids with an attention mask, left- or right-padded.

The rows become requests like any other, so they run through the same buckets; only arrival and departure differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from bucketgraph.errors import InputError
from bucketgraph.llm import kv_cache

if TYPE_CHECKING:
    from bucketgraph.llm.request import Request
    from bucketgraph.llm.runner import Runner


class PaddedBatch:
    """Rows whose KV is in the cache, as returned by `LLM.prefill` and `LLM.decode`. Close it to give the pages back.

    Attributes:
        logits: `[B, vocab]`, the caller's own memory, for the token after each row's last.
        tokens: `[B]` int64, the greedy choice from them.
    """

    def __init__(self, requests: list[Request], runner: Runner, tokens: Tensor, logits: Tensor) -> None:
        self._requests = requests
        self.tokens, self.logits = tokens, logits
        self._runner, self._ledger = runner, runner.cache.ledger

    @property
    def requests(self) -> list[Request]:
        """The rows; none when closed. Raises InputError while another KV cache is in place."""
        if self._requests and self._runner.cache.ledger is not self._ledger:
            raise InputError("the batch lies in another KV cache", hint="swap its cache in first")
        return self._requests

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row so far, without padding."""
        return [len(request.tokens) for request in self._requests]

    def close(self) -> None:
        for request in self._requests:
            kv_cache.give_back(self._ledger, request.pages)
        self._requests = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rows(input_ids: object, attention_mask: object, vocab_size: int) -> list[list[int]]:
    """Each row's real tokens.

    Raises:
        InputError: wrong type, rank or dtype; shapes that disagree; an empty batch or row; a mask with holes or with
            other values than 0 and 1; a token outside the vocabulary.
    """
    ids = _integers("input_ids", input_ids)
    if ids.numel() == 0:
        raise InputError("the batch is empty", given=f"input_ids {list(ids.shape)}", expected="[B, S], both at least 1")
    mask = torch.ones_like(ids) if attention_mask is None else _integers("attention_mask", attention_mask)
    if mask.shape != ids.shape:
        raise InputError("attention_mask has another shape", given=list(mask.shape), expected=list(ids.shape))
    mask = mask.to(ids.device)
    found = []
    for row, (line, keep) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
        real = [position for position, bit in enumerate(keep) if bit]
        if set(keep) - {0, 1}:
            raise InputError(f"attention_mask row {row} has values other than 0 and 1")
        if not real:
            raise InputError(f"row {row} is empty", hint="drop it, or unmask at least one token")
        if len(real) != real[-1] - real[0] + 1 or (real[0] != 0 and real[-1] != len(keep) - 1):
            raise InputError(f"attention_mask row {row} is neither left- nor right-padded", given=keep)
        found.append(check_tokens(line[real[0] : real[-1] + 1], vocab_size, f"input_ids row {row}"))
    return found


def next_tokens(tokens: object, batch: int, vocab_size: int) -> list[int]:
    """One token for each row. Raises InputError."""
    given = _integers("tokens", tokens, rank=1)
    if given.shape[0] != batch:
        raise InputError("tokens do not fit the batch", given=given.shape[0], expected=f"{batch} rows")
    return check_tokens(given.tolist(), vocab_size, "tokens")


def check_tokens(tokens: list[int], vocab_size: int, what: str) -> list[int]:
    # Looked at one by one only to say which is wrong.
    if tokens and {int}.issuperset(map(type, tokens)) and 0 <= min(tokens) <= max(tokens) < vocab_size:
        return tokens
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InputError(f"{what}: a token id is a whole number", given=repr(token))
        if not 0 <= token < vocab_size:
            raise InputError(f"{what}: token outside the vocabulary", given=token, expected=f"0 to {vocab_size - 1}")
    return tokens


def _integers(name: str, value: object, rank: int = 2) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is not a tensor", given=type(value).__name__)
    if value.dtype not in (torch.int64, torch.int32, torch.bool) or (value.dtype == torch.bool and rank == 1):
        raise InputError(f"{name} has the wrong dtype", given=value.dtype, expected="int64 or int32")
    if value.dim() != rank:
        raise InputError(
            f"{name} has the wrong rank", given=list(value.shape), expected="[B, S]" if rank == 2 else "[B]"
        )
    return value.long()
