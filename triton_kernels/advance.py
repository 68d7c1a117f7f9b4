"""Between two decode steps that no CPU sees: what a step sampled becomes the next step's input, in place.

One program: a batch is small. A row that goes on gets its token, position, length and slot; one that ends becomes
padding: length 0, slot -1, temperature 0. Tokens go to a ring that the host may read at any time; it is as long as a
run, so nothing is overwritten. The host's flags are read past all caches, once a step. `reference.advance` says what
each tensor holds. Whoever is told that the ring has a new line is told by a later kernel, behind a fence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks

ROWS = 128  # looked at at once


@triton.jit(
    do_not_specialize=["rows", "table_width", "ring_steps"],
    do_not_specialize_on_alignment=[
        "tokens",
        "input_ids",
        "positions",
        "slot_mapping",
        "kv_lens",
        "temperature",
        "block_tables",
        "limits",
        "stops_after",
        "stops",
        "state",
        "flags",
        "ring",
    ],
)
def _advance(
    tokens,  # [B] int64
    input_ids,  # [B] int64
    positions,  # [B] int32
    slot_mapping,  # [B] int64
    kv_lens,  # [B] int32
    temperature,  # [B] float32
    block_tables,  # [B, table_width] int32
    limits,  # [B] int32
    stops_after,  # [B] int32
    stops,  # [any, B] int32
    state,  # [4] int32
    flags,  # [B + 1] int32, the host's
    ring,  # [ring_steps, B] int32, the host's
    rows,
    table_width,
    ring_steps,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    halt = tl.load(flags + rows, volatile=True)  # first, since it comes over the bus
    steps, floor, columns = tl.load(state), tl.load(state + 2), tl.load(state + 3)
    line = ring + steps.to(tl.int64) * rows
    going = steps * 0
    for start in tl.range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        dropped = tl.load(flags + row, mask=inside, other=0, volatile=True)
        length = tl.load(kv_lens + row, mask=inside, other=0)
        live = length > 0
        token = tl.load(tokens + row, mask=live, other=-1).to(tl.int32)
        tl.store(line + row, token, mask=inside)
        tokens_now = length + 1
        may_stop = tokens_now > tl.load(stops_after + row, mask=inside, other=0)
        ended = tokens_now >= tl.load(limits + row, mask=inside, other=0)
        for column in tl.range(0, columns):
            stop = tl.load(stops + column * rows + row, mask=inside, other=-1)
            ended = ended | (may_stop & (token == stop))
        goes = live & (dropped == 0) & (ended == 0)
        entry = length // PAGE
        page = tl.load(
            block_tables + row.to(tl.int64) * table_width + entry, mask=goes & (entry < table_width), other=0
        ).to(tl.int64)
        tl.store(input_ids + row, tl.where(goes, token, 0).to(tl.int64), mask=inside)
        tl.store(positions + row, tl.where(goes, length, 0), mask=inside)
        tl.store(slot_mapping + row, tl.where(goes, page * PAGE + length % PAGE, -1), mask=inside)
        tl.store(kv_lens + row, tl.where(goes, tokens_now, 0), mask=inside)
        tl.store(temperature + row, tl.zeros([BLOCK], tl.float32), mask=inside & (goes == 0))
        going += tl.sum(goes.to(tl.int32), 0)
    again = (going > floor) & (halt == 0) & (steps + 1 < ring_steps)
    tl.store(state, steps + 1)
    tl.store(state + 1, again.to(tl.int32))


def advance(
    tokens: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_lens: Tensor,
    temperature: Tensor,
    block_tables: Tensor,
    limits: Tensor,
    stops_after: Tensor,
    stops: Tensor,
    state: Tensor,
    flags: Tensor,
    ring: Tensor,
    page_size: int,
) -> None:
    """As `reference.advance`; `flags` and `ring` may be pinned host memory. Raises ValueError for what does not fit."""
    rows = len(kv_lens)
    for name, tensor in (("tokens", tokens), ("input_ids", input_ids), ("slot_mapping", slot_mapping)):
        checks.vector(name, tensor, rows, torch.int64)
    vectors = {"positions": positions, "kv_lens": kv_lens, "limits": limits, "stops_after": stops_after}
    for name, tensor in vectors.items():
        checks.vector(name, tensor, rows, torch.int32)
    checks.vector("temperature", temperature, rows, torch.float32)
    checks.table("block_tables", block_tables, rows)
    checks.vector("state", state, 4, torch.int32)
    checks.vector("flags", flags, rows + 1, torch.int32)
    for name, tensor in (("stops", stops), ("ring", ring)):
        checks.require(
            tensor.dim() == 2 and tensor.shape[1] == rows and tensor.dtype == torch.int32 and tensor.is_contiguous(),
            f"{name}: given {tuple(tensor.shape)} {tensor.dtype}, expected a contiguous (any, {rows}) int32",
        )
    _advance[(1,)](
        tokens,
        input_ids,
        positions,
        slot_mapping,
        kv_lens,
        temperature,
        block_tables,
        limits,
        stops_after,
        stops,
        state,
        flags,
        ring,
        rows,
        block_tables.shape[1],
        ring.shape[0],
        PAGE=page_size,
        BLOCK=ROWS,
        num_warps=1,  # loads of the state come before its stores without a barrier
    )
