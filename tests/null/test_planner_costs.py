"""Cost curves: measured points come back exactly, nothing ever falls, and a bad file is one error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bucketgraph.errors import ConfigError
from bucketgraph.llm.presets import PRESETS
from bucketgraph.planner import roofline
from bucketgraph.planner.choose import Limits, choose
from bucketgraph.planner.costs import CostCurve, linear, load_costs, measured, rising, with_flat
from bucketgraph.planner.demand import Candidates


def at(curve: CostCurve, *sizes: int | tuple[int, int]) -> list[float]:
    rows = [size if isinstance(size, tuple) else (size,) for size in sizes]
    return [round(float(value), 9) for value in curve.cost(np.array(rows, dtype=np.int64))]


def test_linear_cost_is_tokens() -> None:
    assert at(linear(), 16, 64) == [16, 64] and at(linear(), (4, 128)) == [512] and linear().unit == "tokens"


def test_flat_memory_and_seconds_are_the_same_for_every_bucket() -> None:
    curve = with_flat(linear(), 2.5, None)
    assert curve.mib is not None and curve.mib(np.array([[1], [9]])).tolist() == [2.5, 2.5] and curve.seconds is None
    for bad in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="out of range"):
            with_flat(linear(), bad, None)
        with pytest.raises(ConfigError, match="out of range"):
            with_flat(linear(), None, bad)


# -- measured ----------------------------------------------------------------------------------------------------------


def test_a_measured_curve_goes_through_its_points_and_on_as_it_ended() -> None:
    curve = measured({(64,): {"ms": 1.0}, (128,): {"ms": 2.0}, (256,): {"ms": 6.0}}, "m")
    assert at(curve, 64, 128, 256) == [1.0, 2.0, 6.0]
    assert at(curve, 1, 16, 96, 192, 320) == [1.0, 1.0, 1.5, 4.0, 8.0]
    assert curve.mib is None and curve.notes == () and curve.measured_to == (256,)
    assert at(measured({(64,): {"ms": 3.0}}, "m"), 1, 64, 999) == [3.0, 3.0, 3.0]
    assert curve.reaching([256]) is curve
    assert curve.reaching([300]).notes == (
        "costs are measured up to 256; up to 300 they go on as between the last two sizes",
    )


def test_a_measured_grid_is_bilinear_and_ends_at_its_corner() -> None:
    points = {(b, t): {"ms": float(b * t), "mib": 1.0, "seconds": float(b)} for b in (1, 4) for t in (16, 64)}
    curve = measured(points, "m")
    assert at(curve, (1, 16), (4, 64), (2, 16), (1, 32), (2, 32), (1, 1)) == [16, 256, 32, 32, 64, 16]
    assert curve.seconds is not None and curve.seconds(np.array([[2, 20]])).tolist() == [2.0]
    with pytest.raises(ConfigError, match="costs end at 4,64: given sizes up to 4,128; measure larger ones"):
        curve.reaching([4, 128])
    del points[4, 64]
    with pytest.raises(ConfigError, match="sizes 4,64 are missing: expected every combination"):
        measured(points, "m")


def test_times_that_fall_are_made_to_rise_and_it_is_said() -> None:
    curve = measured({(64,): {"ms": 2.0}, (128,): {"ms": 1.0}, (256,): {"ms": 6.0}}, "m")
    assert at(curve, 64, 128, 256) == [1.5, 1.5, 6.0]
    assert curve.notes == ("the measured times fall in places; made to rise, which moves one by 50 %",)


def test_made_to_rise_is_the_nearest_rising_curve() -> None:
    random = np.random.default_rng(1)
    for _ in range(200):
        values = random.random(6)
        smooth = rising(values)
        assert (np.diff(smooth) >= -1e-12).all() and smooth.mean() == pytest.approx(values.mean())
        for _ in range(20):  # no other rising curve is nearer
            other = np.sort(smooth + random.normal(0, 0.1, 6))
            assert ((smooth - values) ** 2).sum() <= ((other - values) ** 2).sum() + 1e-12
        grid = rising(random.random((4, 5)))
        assert (np.diff(grid, axis=0) >= 0).all() and (np.diff(grid, axis=1) >= 0).all()


def test_no_curve_falls_between_or_beyond_its_points() -> None:
    random = np.random.default_rng(2)
    for _ in range(50):
        sizes = np.sort(random.choice(500, 6, replace=False)) + 1
        points = {(int(s),): {"ms": float(random.random() + 0.1)} for s in sizes}
        assert (np.diff(measured(points, "m").cost(np.arange(1, 700)[:, None])) >= -1e-12).all()
        grid = {(b, int(t)): {"ms": float(random.random() + 0.1)} for b in (1, 3, 8) for t in sizes}
        cells = np.stack(np.meshgrid(np.arange(1, 9), np.arange(1, sizes[-1] + 1), indexing="ij"), axis=-1)
        values = measured(grid, "m").cost(cells.reshape(-1, 2)).reshape(8, -1)
        assert (np.diff(values, axis=0) >= -1e-12).all() and (np.diff(values, axis=1) >= -1e-12).all()


def test_a_flat_measured_curve_is_no_reason_to_fail() -> None:
    random = np.random.default_rng(3)
    for _ in range(60):
        sizes = np.sort(random.choice(400, 6, replace=False)) + 1
        curve = measured({(int(s),): {"ms": float(random.random())} for s in sizes}, "m")  # mostly pooled to be flat
        points = Candidates(np.arange(1, 500), np.ones(499, np.int64))
        assert choose(points, curve, Limits(buckets=8), 8).gap == 0.0


def test_a_cost_file_holds_times_and_may_hold_memory_and_seconds(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(
        json.dumps({"device": "a GPU", "64": {"ms": 1, "mib": 2, "seconds": 0}, "9": {"ms": 1, "mib": 1, "seconds": 3}})
    )
    curve = load_costs(path, 1)
    assert curve.name == "measured on a GPU" and curve.unit == "ms" and at(curve, 64) == [1.0]
    assert curve.mib is not None and curve.mib(np.array([[64]])).tolist() == [2.0]
    path.write_text('{"4,128": 2.0}')
    assert load_costs(path, 2).name == "measured (costs.json)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "costs.json: not JSON"),
        ("[1]", "costs.json: not a cost curve: expected a mapping such as"),
        ("{}", "no points"),
        ('{"0": 1}', "a size: given '0'"),
        ('{"-5": 1}', "a size: given '-5'"),
        ('{"4,128": 1}', "costs of other axes than the plan's: given '4,128', expected 1 sizes"),
        ('{"64": -1}', "size 64: ms: given -1, expected a positive number"),
        ('{"64": 0}', "size 64: ms: given 0"),
        ('{"64": NaN}', "size 64: ms: given nan"),
        ('{"64": "fast"}', "size 64: ms: given 'fast'"),
        ('{"64": true}', "size 64: ms: given True"),
        ('{"64": {"mib": 1}}', "size 64: ms is missing"),
        ('{"64": {"ms": 1, "mb": 1}}', "size 64: unknown key 'mb': expected ms, mib, seconds"),
        ('{"64": {"ms": 1, "mib": 1}, "128": 2}', "mib is not given for every size"),
    ],
)
def test_a_bad_cost_file_is_one_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_costs(path, 1)
    assert says in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_costs(tmp_path / "none.json", 1)


# -- roofline ----------------------------------------------------------------------------------------------------------


def test_a_roofline_is_weights_read_once_and_operations() -> None:
    config = PRESETS["llama-3.1-8b"]
    body = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    head = 128256 * 4096
    curve = roofline.roofline(config, 4000.0, 800.0, "packed")
    read = 2 * (body + head) / 4e12
    assert at(curve, 1000)[0] == pytest.approx(1e3 * (read + (2 * body * 1000 + 2 * head) / 8e14))
    padded = roofline.roofline(config, 4000.0, 800.0, "padded")
    attention = 32 * 2 * 4096 * 1000**2 / 8e14
    assert at(padded, 1000)[0] - at(curve, 1000)[0] == pytest.approx(1e3 * attention)
    assert at(padded, (3, 1000))[0] == pytest.approx(
        1e3 * (read + (3 * 2 * body * 1000 + 3 * 2 * head) / 8e14 + 3 * attention)
    )
    decode = roofline.roofline(config, 4000.0, 800.0, "decode")
    assert at(decode, 7)[0] == pytest.approx(1e3 * (read + 7 * 2 * (body + head) / 8e14))
    assert padded.unit == "ms" and padded.mib is None


def test_a_model_is_a_preset_or_a_file(tmp_path: Path) -> None:
    assert roofline.model_shape("qwen3-0.6b") is roofline.model_shape("random:qwen3-0.6b") is PRESETS["qwen3-0.6b"]
    with pytest.raises(ConfigError, match="unknown model preset"):
        roofline.model_shape("random:what")
    for bad in ((0.0, 1.0), (1.0, float("nan"))):
        with pytest.raises(ConfigError, match="out of range"):
            roofline.roofline(PRESETS["qwen3-0.6b"], *bad, "padded")
