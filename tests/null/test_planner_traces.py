"""Reading traces: every format to the same lengths, and every bad file to one error that says where."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from bucketgraph.errors import ConfigError
from bucketgraph.planner import demand as demands
from bucketgraph.planner.packing import pack
from bucketgraph.planner.readers import MAX_LENGTH
from bucketgraph.planner.traces import Trace, made, read

LENGTHS = [374, 396, 12, 374, 4096]
CSV = "input_tokens,output_tokens,arrival_s\n" + "".join(f"{n},7,0.5\n" for n in LENGTHS)
PACKED = gzip.compress(CSV.encode(), mtime=0)  # the same bytes, and so the same test names, in every process
JSONL = "".join(json.dumps({"timestamp": 3, "input_length": n, "hash_ids": [1]}) + "\n" for n in LENGTHS)


def file(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# -- formats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "column"),
    [
        (CSV, "input_tokens"),
        (CSV.replace("\n", "\r\n"), "input_tokens"),
        ("\ufeff" + CSV, "input_tokens"),
        (CSV.replace(",", ";"), "input_tokens"),
        (CSV.replace(",", "\t"), "input_tokens"),
        (CSV.replace("input_tokens", '"ContextTokens"'), "ContextTokens"),
        (CSV.replace("374", " 374.0 ").replace("4096", "4.096e3"), "input_tokens"),
        (CSV + "\n\n", "input_tokens"),
        (JSONL, "input_length"),
        (JSONL + "\n  \n", "input_length"),
        (JSONL.replace("4096", "4096.0"), "input_length"),
        (JSONL.replace("4096", '"4096"'), "input_length"),
        ("".join(f"{n}\n" for n in LENGTHS), "1"),
        ("n\n" + "".join(f"{n}\n" for n in LENGTHS), "n"),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_every_format_gives_the_same_lengths_in_order(tmp_path: Path, text: str, column: str, packed: bool) -> None:
    data = gzip.compress(text.encode()) if packed else text.encode()
    trace = read([file(tmp_path, data)])
    assert trace.columns == (column,) and trace.sizes[:, 0].tolist() == LENGTHS
    assert trace.counts is None and trace.dropped == 0 and trace.requests == 5 and trace.sources == ("trace",)


def test_columns_without_a_header_are_numbered(tmp_path: Path) -> None:
    assert read([file(tmp_path, "1,30\n2,40\n")], ["2"]).sizes.tolist() == [[30], [40]]
    assert read([file(tmp_path, "1,30\n2,40\n")], ["1", "2"]).sizes.tolist() == [[1, 30], [2, 40]]


def test_two_columns_are_two_axes(tmp_path: Path) -> None:
    trace = read([file(tmp_path, "id,batch,len\n9,4,30\n9,0,40\n9,2,50\n")], ["batch", "len"])
    assert trace.sizes.tolist() == [[4, 30], [2, 50]] and trace.dropped == 1


def test_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    trace = read([file(tmp_path, CSV, "a.csv"), file(tmp_path, CSV.replace("374", "0"), "b.csv")])
    assert trace.sources == ("a.csv", "b.csv") and trace.requests == 8 and trace.dropped == 2


def test_saved_sizes_are_a_histogram(tmp_path: Path) -> None:
    one = read([file(tmp_path, '{"name": "x", "sizes": {"tokens": {"384": 17, "0": 2, "5": 0, "512": 3}}}')])
    assert one.sizes.tolist() == [[384], [512]] and one.counts is not None and one.counts.tolist() == [17, 3]
    assert one.requests == 20 and one.dropped == 2
    joint = file(tmp_path, '{"sizes": {"batch,tokens": {"4,128": 17, "1,16": 1}}}')
    assert read([joint], ["batch", "tokens"]).sizes.tolist() == [[4, 128], [1, 16]]
    phases = {"prefill": {"sizes": {"tokens": {"9": 1}}}, "decode": {"sizes": {"batch": {"2": 5}}}}
    path = file(tmp_path, json.dumps(phases, indent=1))
    assert read([path], ["decode.batch"]).counts is not None
    with pytest.raises(ConfigError, match=r"no column is known as the lengths: given prefill.tokens, decode.batch"):
        read([path])


def test_a_histogram_and_a_list_are_read_together(tmp_path: Path) -> None:
    saved = file(tmp_path, '{"sizes": {"tokens": {"8": 3}}}', "saved.json")
    trace = read([file(tmp_path, "tokens\n8\n9\n", "a.csv"), saved])
    assert trace.counts is not None and demands.of(trace).counts.tolist() == [4, 1]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "trace: the trace is empty: expected a column of request lengths"),
        ("  \n\n", "trace: the trace is empty"),
        ("input_tokens\n", "trace: the trace is empty: given no rows"),
        ("input_tokens\n0\n0\n", "trace: the trace is empty: given 2 rows, 2 of them of length 0"),
        ('{"sizes": {"tokens": {}}}', "trace: the trace is empty"),
        (CSV.replace("12,", "-12,"), "trace: row 3, input_tokens is negative: given -12, expected 0 to 10,000,000"),
        (CSV.replace("12,", "10000001,"), "row 3, input_tokens is absurdly large: given 10000001"),
        (CSV.replace("12,", "9" * 40 + ","), "row 3, input_tokens is absurdly large"),
        (CSV.replace("12,", "twelve,"), "trace: row 3, input_tokens: given 'twelve', expected a whole number"),
        (CSV.replace("12,", "12.5,"), "row 3, input_tokens: given '12.5'"),
        (CSV.replace("12,", "nan,"), "row 3, input_tokens: given 'nan'"),
        (CSV.replace("12,", "1e400,"), "row 3, input_tokens: given '1e400'"),
        (CSV.replace("12,", "1_2,"), "row 3, input_tokens: given '1_2'"),
        (CSV.replace("12,", ","), "row 3, input_tokens: given ''"),
        ("a,input_tokens\n1,2\n3\n", "trace: row 2 has no input_tokens: given 1 fields, expected 2"),
        (
            "prompt_tokens,input_tokens,x\n1,2,3\n",
            "several columns could be the lengths: given prompt_tokens, input_to",
        ),
        ("a,b\n1,2\n", "no column is known as the lengths: given a, b; name one with --column"),
        ("a,a\n1,2\n", "column 'a' is there twice"),
        (JSONL.replace("12,", "-1,"), "row 3, input_length is negative"),
        (JSONL.replace("12,", "true,"), "row 3, input_length: given True"),
        (JSONL.replace("12,", "null,"), "row 3, input_length: given None"),
        (JSONL.replace("12,", "1.5,"), "row 3, input_length: given 1.5"),
        (JSONL + "{broken\n", "trace: row 6 is not JSON"),
        (JSONL + "[1]\n", "trace: row 6 is not an object: given list"),
        (JSONL + '{"a": 1},{"b": 2}\n', "trace: row 6 is not JSON"),
        (JSONL + '{"other": 1}\n', "trace: row 6 has no input_length"),
        ("[1, 2]", "trace: a JSON list: expected one JSON object a line"),
        ('{"sizes": {"tokens": {"x": 1}}}', "row 1, tokens: given 'x'"),
        ('{"sizes": {"tokens": {"8": -1}}}', "tokens: a count is negative"),
        ('{"sizes": {"tokens": {"4,8": 1}}}', "sizes of tokens: given '4,8', expected one size"),
        ('{"sizes": {"tokens": [8]}}', "sizes of tokens: expected a mapping"),
        ('{"calls": 3, "buckets": [{"hits": 3}]}', "these statistics count hits of buckets, not the sizes"),
        (b"\xff\xfe\x00", "trace: not UTF-8 text (byte 0)"),
        (PACKED[:-9], "trace: broken gzip"),
        (PACKED[:20] + b"\0" * 20, "trace: broken gzip"),
    ],
)
def test_a_bad_file_is_one_error_that_says_where(tmp_path: Path, text: str | bytes, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        read([file(tmp_path, text)])
    assert says in str(error.value) and "\n" not in str(error.value)


def test_wrong_columns_are_an_error_that_lists_them(tmp_path: Path) -> None:
    path = file(tmp_path, CSV)
    with pytest.raises(ConfigError, match="no column 'tokens': expected one of input_tokens, output_tokens, arrival_s"):
        read([path], ["tokens"])
    for columns in (["a", "b", "c"], ["a", "a"], [""], []):
        with pytest.raises(ConfigError, match="columns of a trace"):
            read([path], columns)
    with pytest.raises(ConfigError, match="no sizes of 'batch,tokens': expected one of tokens"):
        read([file(tmp_path, '{"sizes": {"tokens": {"8": 1}}}')], ["batch", "tokens"])


def test_files_with_different_columns_are_not_mixed(tmp_path: Path) -> None:
    first, second = file(tmp_path, CSV, "a.csv"), file(tmp_path, JSONL, "b.jsonl")
    with pytest.raises(
        ConfigError, match=r"a\.csv is read by its column 'input_tokens', and b\.jsonl has none"
    ) as error:
        read([first, second])
    assert "timestamp, input_length, hash_ids" in str(error.value)
    with pytest.raises(ConfigError, match=r"b\.jsonl: no column 'output_tokens'"):
        read([first, second], ["output_tokens"])


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read([path])


def test_a_trace_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketgraph.planner.readers.MAX_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match="too large for a trace: expected at most 1 MiB of text"):
        read([file(tmp_path, gzip.compress(b"1\n" * (1 << 20)))])


def test_the_longest_length_is_still_read(tmp_path: Path) -> None:
    assert read([file(tmp_path, f"tokens\n{MAX_LENGTH}\n")]).sizes.tolist() == [[MAX_LENGTH]]


# -- demand ------------------------------------------------------------------------------------------------------------


def trace(*lengths: int) -> Trace:
    return made(np.array(lengths, dtype=np.int64)[:, None], None, ("tokens",), ("t",))


def test_equal_lengths_are_counted_together() -> None:
    asked = demands.of(trace(*LENGTHS))
    assert asked.lengths.tolist() == [12, 374, 396, 4096] and asked.counts.tolist() == [1, 2, 1, 1]
    assert asked.launches == 5 and asked.work == sum(LENGTHS)
    pairs = Trace(("b", "t"), np.array([[2, 9], [1, 30], [2, 9]]), np.array([1, 5, 7]), ("t",))
    assert demands.of(pairs).sizes.tolist() == [[1, 30], [2, 9]] and demands.of(pairs).counts.tolist() == [5, 8]


def test_long_requests_run_in_pieces_eagerly_or_are_cut_off() -> None:
    lengths = trace(50, 100, 250, 1000)
    pieces = demands.limited(lengths, 100, "pieces")
    assert dict(zip(pieces.lengths.tolist(), pieces.counts.tolist(), strict=True)) == {50: 2, 100: 13}
    assert pieces.work == 1400
    eager = demands.limited(lengths, 100, "eager")
    assert eager.lengths.tolist() == [50, 100] and (eager.left_out, eager.left_out_work) == (2, 1250)
    cut = demands.limited(lengths, 100, "truncate")
    assert cut.counts.tolist() == [1, 3]
    with pytest.raises(ConfigError, match="no request is left to plan for: given all 4 are over 20"):
        demands.limited(lengths, 20, "eager")
    with pytest.raises(ConfigError, match="largest is out of range"):
        demands.limited(lengths, 0, "pieces")


def test_the_configured_maximum_is_a_size_even_if_nobody_asks_for_it() -> None:
    asked = demands.limited(trace(50, 60), 4096, "pieces")
    assert asked.lengths.tolist() == [50, 60, 4096] and asked.counts.tolist() == [1, 1, 0]
    pairs = Trace(("b", "t"), np.array([[2, 9], [1, 30]]), None, ("t",))
    assert demands.limited(pairs, 64, "eager").sizes.tolist() == [[1, 30], [2, 9], [2, 64]]


# -- packing -----------------------------------------------------------------------------------------------------------


def sums(lengths: list[int], tokens: int, slots: int = 8, cut: bool = True) -> list[int]:
    return pack(trace(*lengths), tokens, slots, cut).trace.sizes[:, 0].tolist()


def test_packing_is_first_come_within_tokens_and_slots() -> None:
    assert sums([10, 20, 30], 100) == [60]
    assert sums([60, 60, 60], 100) == [100, 80], "the second is cut, and its rest leads the next launch"
    assert sums([60, 60, 60], 100, cut=False) == [60, 60, 60]
    assert sums([60, 40, 30, 10], 100, cut=False) == [100, 40]
    assert sums([250, 10], 100) == [100, 100, 60] == sums([250, 10], 100, cut=False)
    assert sums([1] * 10, 100, slots=4) == [4, 4, 2]
    assert sums([100], 100) == [100]


def test_packing_loses_no_token_and_keeps_to_its_limits() -> None:
    random = np.random.default_rng(1)
    for number in range(300):
        lengths = random.integers(1, 60, int(random.integers(1, 40))).tolist()
        tokens, slots = int(random.integers(1, 80)), int(random.integers(1, 6))
        packed = pack(trace(*lengths), tokens, slots, bool(number % 2))
        launches = packed.trace.sizes[:, 0]
        assert launches.sum() == sum(lengths) and launches.max() <= tokens and launches.min() >= 1
        assert packed.fill == pytest.approx(launches.mean() / tokens) and 0 <= packed.full <= 1


def test_packing_agrees_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same launches as `Runner.pack` makes of a queue that holds everything from the start."""
    torch = pytest.importorskip("torch")
    del torch
    from bucketgraph.llm.request import Request
    from bucketgraph.llm.runner import Runner
    from bucketgraph.llm.sampling import SamplingParams

    runner = Runner.__new__(Runner)
    random = np.random.default_rng(2)
    for _ in range(30):
        lengths = random.integers(1, 300, 25).tolist()
        runner.max_tokens, runner.max_requests = int(random.integers(16, 400)), int(random.integers(1, 9))
        waiting = [Request([1] * n, SamplingParams(), seed=0) for n in lengths]
        launches = []
        while waiting:
            chunks = runner.pack(waiting)
            launches.append(sum(count for _, count in chunks))
            for request, count in chunks:
                request.computed += count
            waiting = [request for request in waiting if request.pending]
        assert sums(lengths, runner.max_tokens, runner.max_requests) == launches


def test_packing_needs_an_order_and_one_column() -> None:
    histogram = Trace(("tokens",), np.array([[4]]), np.array([9]), ("t",))
    with pytest.raises(ConfigError, match="a histogram has no order of arrival"):
        pack(histogram, 100)
    with pytest.raises(ConfigError, match="packing takes one column"):
        pack(Trace(("b", "t"), np.array([[2, 9]]), None, ("t",)), 100)
    for bad in ((0, 8), (100, 0)):
        with pytest.raises(ConfigError, match="out of range"):
            pack(trace(5), *bad)
