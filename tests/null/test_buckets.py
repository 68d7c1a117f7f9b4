"""The lattice against brute force: every request gets the cheapest bucket that covers it, or a stated way out."""

from __future__ import annotations

import itertools
from math import prod
from pathlib import Path

import pytest

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from bucketgraph import buckets as module  # noqa: E402
from bucketgraph import config  # noqa: E402
from bucketgraph.buckets import Bucket, Lattice, Overflow, Plan  # noqa: E402
from bucketgraph.config import BucketSet, load  # noqa: E402
from bucketgraph.errors import ConfigError, InputError  # noqa: E402

SHIPPED = [load(path) for path in sorted((Path(config.__file__).parent / "configs").glob("*.yaml"))]
AXES = ("batch", "tokens", "pages")


@st.composite
def lattices(draw: st.DrawFn, overflow: Overflow = "eager", max_padding: float | None = None) -> Lattice:
    """One to three axes, all combinations or an explicit list, all axes or some as work."""
    names = AXES[: draw(st.integers(1, 3))]
    axes = {name: sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=4))) for name in names}
    points = None
    if draw(st.booleans()):
        grid = list(itertools.product(*axes.values()))
        points = draw(st.lists(st.sampled_from(grid), min_size=1, max_size=6, unique=True))
        axes = {name: sorted({point[i] for point in points}) for i, name in enumerate(names)}
    work = draw(st.none() | st.sets(st.sampled_from(names), min_size=1).map(sorted))
    return Lattice(axes, points=points, work=work, overflow=overflow, request_axis=names[0], max_padding=max_padding)


def covering(lattice: Lattice, sizes: tuple[int, ...]) -> list[Bucket]:
    return [b for b in lattice.buckets if all(have >= want for have, want in zip(b.sizes, sizes, strict=True))]


def work_of(lattice: Lattice, sizes: tuple[int, ...]) -> int:
    return lattice.plan(sizes).real


def requests(lattice: Lattice) -> list[tuple[int, ...]]:
    """Every size from 1 to one past the largest, on every axis."""
    return list(itertools.product(*(range(1, axis.largest + 2) for axis in lattice.axes)))


@settings(max_examples=40)
@given(lattices())
def test_plan_is_the_cheapest_covering_bucket(lattice: Lattice) -> None:
    for sizes in requests(lattice):
        plan, able = lattice.plan(sizes), covering(lattice, sizes)
        if not able:
            assert plan.kind == "eager" and plan.bucket is None and plan.reason
            assert plan.code == ("no_cover" if all(s <= a.largest for s, a in zip(sizes, lattice.axes, strict=True))
                                 else "over_largest")  # fmt: skip
            continue
        assert plan.kind == "replay" and plan.bucket in able
        cost = [(work_of(lattice, bucket.sizes), prod(bucket.sizes)) for bucket in able]
        assert (plan.padded, prod(plan.bucket.sizes)) == min(cost)
        assert plan.real <= plan.padded


@settings(max_examples=40)
@given(lattices())
def test_an_exact_fit_is_never_padded(lattice: Lattice) -> None:
    for bucket in lattice.buckets:
        plan = lattice.plan(bucket.sizes)
        assert plan.bucket == bucket and plan.real == plan.padded


@settings(max_examples=40)
@given(lattices(overflow="split"))
def test_a_split_covers_the_whole_call_with_buckets_and_a_refusal_has_no_split(lattice: Lattice) -> None:
    for sizes in requests(lattice):
        for first in (sizes[0], sizes[0] + 20):
            plan = lattice.plan((first, *sizes[1:]))
            assert plan.kind in ("replay", "split", "refuse")
            if plan.kind == "split":
                assert sum(plan.parts) == first and len(plan.parts) > 1
                assert all(lattice.plan((part, *sizes[1:])).kind == "replay" for part in plan.parts)
            if plan.kind == "refuse":
                assert not any(covering(lattice, (n, *sizes[1:])) for n in range(1, first + 1)), "one row would do"


@settings(max_examples=40)
@given(st.data(), st.floats(1, 6))
def test_above_max_padding_a_call_runs_eagerly_and_never_below(data: st.DataObject, ratio: float) -> None:
    lattice = data.draw(lattices(max_padding=ratio))
    for sizes in requests(lattice):
        plan = lattice.plan(sizes)
        if plan.kind == "replay":
            assert plan.padded <= ratio * plan.real
        elif plan.code == "over_padding":
            best = min(lattice.plan(bucket.sizes).real for bucket in covering(lattice, sizes))
            assert best > ratio * plan.real and "max_padding" in str(plan.reason)


def lattices_of(bucket_set: BucketSet) -> list[Lattice]:
    return [phase.lattice() for phase in (bucket_set.phases or {"": bucket_set}).values()]


@pytest.mark.parametrize("bucket_set", SHIPPED, ids=lambda s: s.name)
def test_every_length_of_every_ready_set_gets_the_smallest_size_that_holds_it(bucket_set: BucketSet) -> None:
    for lattice in lattices_of(bucket_set):
        for at, axis in enumerate(lattice.axes):
            others = [other.largest for other in lattice.axes]
            for size in range(1, axis.largest + 1):
                others[at] = size
                plan = lattice.plan(others)
                if plan.code == "over_padding":
                    continue
                assert plan.bucket is not None and plan.bucket.sizes[at] == min(s for s in axis.sizes if s >= size)


@pytest.mark.parametrize("bucket_set", SHIPPED, ids=lambda s: s.name)
def test_boundaries_of_every_ready_set(bucket_set: BucketSet) -> None:
    for lattice in lattices_of(bucket_set):
        largest = [axis.largest for axis in lattice.axes]
        for at, axis in enumerate(lattice.axes):
            for index, size in enumerate(axis.sizes):
                for n in {1, size - 1, size, size + 1} - {0}:
                    plan = lattice.plan([*largest[:at], n, *largest[at + 1 :]])
                    assert plan.kind != "replay" or (plan.bucket is not None and plan.bucket.sizes[at] >= n)
                    if n == size:
                        assert plan.bucket is not None and plan.bucket.sizes[at] == axis.sizes[index]
            over = lattice.plan([*largest[:at], axis.largest + 1, *largest[at + 1 :]])
            assert over.kind != "replay" and over.code == "over_largest"
            assert f"{axis.name} {axis.largest + 1}" in str(over.reason)


@pytest.mark.parametrize(
    ("overflow", "sizes", "kind", "parts"),
    [
        ("eager", (9, 16), "eager", ()),
        ("eager", (8, 65), "eager", ()),
        ("error", (9, 16), "refuse", ()),
        ("error", (8, 65), "refuse", ()),
        ("split", (9, 16), "split", (8, 1)),
        ("split", (16, 16), "split", (8, 8)),
        ("split", (17, 16), "split", (8, 8, 1)),
        ("split", (8, 65), "refuse", ()),
        ("split", (9, 65), "refuse", ()),
    ],
)
def test_overflow(overflow: Overflow, sizes: tuple[int, ...], kind: str, parts: tuple[int, ...]) -> None:
    lattice = Lattice({"batch": [4, 8], "tokens": [16, 64]}, overflow=overflow, request_axis="batch")
    plan = lattice.plan(sizes)
    assert (plan.kind, plan.parts, plan.code) == (kind, parts, "over_largest")
    if sizes[1] > 64 and overflow == "split":  # what cannot be split is the reason, not what could
        assert "tokens 65 is over the largest bucket's 64" in str(plan.reason)


def test_a_split_takes_pieces_that_have_a_bucket_not_the_axis_maximum() -> None:
    lattice = Lattice(
        {"batch": [2, 8], "tokens": [16, 64]}, points=[[8, 16], [2, 64]], overflow="split", request_axis="batch"
    )
    assert lattice.plan((5, 64)).parts == (2, 2, 1)  # 8 rows exist only for short ones
    assert lattice.plan((5, 64)).code == "no_cover"
    assert lattice.plan((20, 16)).parts == (8, 8, 4)


def test_several_covers_take_the_one_of_least_work_not_the_first_in_order() -> None:
    lattice = Lattice({"a": [1, 2], "b": [1, 64], "c": [1, 64]}, points=[[1, 64, 64], [2, 1, 1]])
    plan = lattice.plan((1, 1, 1))
    assert plan.bucket is not None and plan.bucket.sizes == (2, 1, 1)


def test_distinct_sizes_never_share_a_bucket_by_their_product() -> None:
    lattice = Lattice({"batch": [4, 8], "tokens": [16, 32]})
    assert {lattice.plan(sizes).bucket for sizes in ((4, 32), (8, 16))} == {
        Bucket(("batch", "tokens"), (4, 32)), Bucket(("batch", "tokens"), (8, 16))
    }  # fmt: skip


def test_a_bucket_dearer_than_one_that_covers_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bucket batch=2 can be reached by no request: batch=4 covers"):
        Lattice({"batch": [1, 2, 4]}, cost=lambda bucket: {1: 1.0, 2: 9.0, 4: 3.0}[bucket["batch"]])


@pytest.mark.parametrize(
    ("axes", "options", "says"),
    [
        ({}, {}, "at least one axis"),
        ({"a": list(range(1, 100)), "b": list(range(1, 100))}, {}, "too many buckets"),
        ({"a": list(range(1, 400)), "b": list(range(1, 400))}, {"points": [[1, 1]]}, "too many buckets"),
        ({"a": [1]}, {"request_axis": "b"}, "request_axis names declared axes"),
        ({"a": [1]}, {"work": ["a", "a"]}, "each once"),
        ({"a": [2, 1]}, {}, "must ascend"),
    ],
)
def test_a_lattice_that_cannot_be_is_refused(
    axes: dict[str, list[int]], options: dict[str, list[list[int]]], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Lattice(axes, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "says"), [((0, 1), "batch is empty"), ((1, -1), "tokens is empty"), ((1,), "one size")]
)
def test_a_request_without_sizes_is_an_input_error(sizes: tuple[int, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Lattice({"batch": [4], "tokens": [4]}).plan(sizes)


def test_long_axes_are_bisected_with_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [1, 7, 8, 100, 257, 300]

    def answers() -> list[Plan]:
        lattice = Lattice({"n": sizes})
        return [lattice.plan((n,)) for n in range(1, 302)]

    dense = answers()
    monkeypatch.setattr(module, "DENSE_LIMIT", 10)
    assert answers() == dense
