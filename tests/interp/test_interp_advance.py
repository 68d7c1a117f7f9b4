"""The step between two decode steps against its twin, in the interpreter: every tensor it changes, row by row."""

import pytest
import torch
from torch import Tensor

from bucketgraph.kernels import ops, reference

triton_ops = ops("cuda")
PAGE = 16
NAMES = ("input_ids", "positions", "slot_mapping", "kv_lens", "temperature", "state", "ring")


def made(
    rows: int, seed: int = 0, columns: int = 3, halt: int = 0, floor: int = 0, steps: int = 2
) -> dict[str, Tensor]:
    """Rows of all kinds: padding, at a page's end, at their limit, stopped, stopped too early, dropped by the host."""
    draw = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape or (rows,), generator=draw).to(dtype)

    lens = ints(0, 4 * PAGE)
    lens[::5] = 0
    lens[1::7] = PAGE
    return {
        "tokens": ints(0, 9, dtype=torch.int64),
        "input_ids": ints(0, 9, dtype=torch.int64),
        "positions": (lens - 1).clamp_min(0),
        "slot_mapping": ints(0, 900, dtype=torch.int64),
        "kv_lens": lens,
        "temperature": torch.rand(rows, generator=draw),
        "block_tables": ints(1, 1 << 30, rows, 6),
        "limits": lens + ints(1, 4),
        "stops_after": lens + ints(-3, 3),
        "stops": ints(-1, 9, 8, rows),
        "state": torch.tensor([steps, 1, floor, columns], dtype=torch.int32),
        "flags": torch.cat([(ints(0, 6) == 0).int(), torch.tensor([halt], dtype=torch.int32)]),
        "ring": torch.full((5, rows), 77, dtype=torch.int32),
    }


def both(case: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    results = []
    for module in (triton_ops, reference):
        mine = {name: tensor.clone() for name, tensor in case.items()}
        module.advance(**mine, page_size=PAGE)
        results.append(mine)
    return results[0], results[1]


@pytest.mark.parametrize("rows", [1, 2, 64, 127, 128, 129, 300])
def test_every_kind_of_row_in_any_batch_agrees_with_the_twin(rows: int) -> None:
    for seed in range(3):
        case = made(rows, seed)
        got, want = both(case)
        for name, tensor in case.items():
            assert torch.equal(got[name], want[name]), f"{name}, seed {seed}"
            assert name in NAMES or torch.equal(got[name], tensor), f"{name} is read only"


@pytest.mark.parametrize("columns", [0, 1, 8])
def test_only_the_columns_in_use_stop_a_row(columns: int) -> None:
    got, want = both(made(64, columns=columns))
    assert all(torch.equal(got[name], want[name]) for name in NAMES)


@pytest.mark.parametrize(("change", "again"), [({}, 1), ({"halt": 1}, 0), ({"floor": 999}, 0), ({"steps": 4}, 0)])
def test_the_run_ends_by_the_host_by_the_floor_and_by_a_full_ring(change: dict[str, int], again: int) -> None:
    got, want = both(made(64, **change))
    assert got["state"][1].item() == want["state"][1].item() == again
    assert got["state"][0].item() == change.get("steps", 2) + 1
    assert torch.equal(got["ring"], want["ring"]), "the step's tokens count all the same"


def test_a_row_that_ends_is_padding_as_the_model_has_it_and_stays_so() -> None:
    case = made(16)
    case["limits"] = case["kv_lens"] + 1
    got, _ = both(case)
    padding = {"input_ids": 0, "positions": 0, "slot_mapping": -1, "kv_lens": 0, "temperature": 0}
    for name, value in padding.items():
        assert got[name].eq(value).all(), name
    assert got["state"].tolist()[:2] == [3, 0]
    again = {**got, "tokens": got["tokens"] + 1}
    once_more, _ = both(again)
    assert once_more["ring"][3].eq(-1).all() and all(once_more[name].eq(v).all() for name, v in padding.items())


def test_a_row_that_goes_on_writes_where_its_table_says() -> None:
    case = made(1)
    case |= {
        "kv_lens": torch.tensor([2 * PAGE], dtype=torch.int32),
        "limits": torch.tensor([99], dtype=torch.int32),
        "stops_after": torch.tensor([999], dtype=torch.int32),
        "flags": torch.zeros(2, dtype=torch.int32),
        "block_tables": torch.tensor([[5, 6, 1 << 30, 0]], dtype=torch.int32),
    }
    got, _ = both(case)
    assert got["slot_mapping"].item() == (1 << 30) * PAGE, "64-bit: the product exceeds an int32"
    assert (got["positions"].item(), got["kv_lens"].item()) == (2 * PAGE, 2 * PAGE + 1)
    assert got["input_ids"].item() == case["tokens"].item() == got["ring"][2].item()


def test_what_does_not_fit_is_refused() -> None:
    case = made(4)
    for name, wrong in (("flags", case["flags"][:-1]), ("ring", case["ring"].long()), ("stops", case["stops"].T)):
        with pytest.raises(ValueError, match=name):
            triton_ops.advance(**{**case, name: wrong}, page_size=PAGE)
