"""YAML -> a frozen, validated `BucketSet`. Imports no torch, so that a set can be checked anywhere.

Rules: validated once, here; an unknown key names the file, the key, what is allowed and the nearest match; nothing is
changed silently. The JSON Schema that editors use comes from these same models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from sys import float_info
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from bucketgraph import yaml_strict
from bucketgraph.buckets import Lattice, check_sizes, ladder
from bucketgraph.errors import ConfigError

# The values that each dtype holds: a pad or a range outside would fail, or wrap, at the first call.
_LIMITS: dict[str, tuple[float, float]] = {
    "float32": (-3.4028234663852886e38, 3.4028234663852886e38),
    "float16": (-65504.0, 65504.0),
    "bfloat16": (-3.3895313892515355e38, 3.3895313892515355e38),
    "float64": (-float_info.max, float_info.max),
    "int64": (-(1 << 63), (1 << 63) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "int8": (-(1 << 7), (1 << 7) - 1),
    "uint8": (0, 255),
    "bool": (0, 1),
}
DTYPES = tuple(_LIMITS)
ExecutableKind = Literal["auto", "cudagraph", "compiled", "eager"]
Bind = Literal["copy", "patch", "auto"]
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"expected a number, given {value!r}")
    return value


def _whole(value: object) -> object:
    # A literal 1 would take True and 1.0 for itself.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected a whole number, given {value!r}")
    return value


def _byte_size(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([KMGT]?i?B)", value) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"expected a size such as 512MiB or 4GiB, given {value!r}")
    return int(float(match[1]) * _UNITS[match[2]])


Number = Annotated[float, BeforeValidator(_number)]
# Bounds stand before the validator, or the JSON Schema would not say them.
Ratio = Annotated[float, Field(ge=1.0, allow_inf_nan=False), BeforeValidator(_number)]
Tolerance = Annotated[float, Field(gt=0.0, allow_inf_nan=False), BeforeValidator(_number)]
ByteSize = Annotated[int, Field(ge=1), BeforeValidator(_byte_size), WithJsonSchema({"type": ["integer", "string"]})]


class Model(BaseModel):
    """Base of every section: frozen, and an unknown key is an error that helps."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValueError(f"expected a mapping, given {data!r}")
        allowed = [field.alias or name for name, field in cls.model_fields.items()]
        for key in data:
            if key not in allowed:
                near = difflib.get_close_matches(str(key), allowed, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"unknown key {key!r}, allowed: {', '.join(allowed)}{hint}")
        return data


class Ladder(Model):
    """Sizes from `from` to `to`, each `growth` times the last, rounded up to `multiple_of`. `to` is always a size."""

    from_: StrictInt = Field(alias="from")
    to: StrictInt
    growth: Number = 2.0
    multiple_of: StrictInt = 1


def _axis(value: object) -> object:
    if isinstance(value, Mapping):
        try:
            steps = Ladder.model_validate(value)
        except ValidationError as error:
            raise ValueError(_problems(error)[0]) from error
        return ladder(steps.from_, steps.to, steps.growth, steps.multiple_of)
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list of sizes, or from/to/growth/multiple_of, given {value!r}")
    return check_sizes("", value)


_axis_schema = {
    "anyOf": [
        {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "uniqueItems": True},
        Ladder.model_json_schema(),
    ]
}
AxisSizes = Annotated[tuple[int, ...], BeforeValidator(_axis), WithJsonSchema(_axis_schema)]


def _dim(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or (isinstance(value, int) and value < 1):
        raise ValueError(f"a dimension is an axis's name or a positive whole number, given {value!r}")
    return value


Dim = Annotated[str | int, BeforeValidator(_dim)]


def _pad(value: object) -> object:
    if value in ("zero", "repeat_last", "skip") or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    raise ValueError(f"expected a number, zero, repeat_last or skip, given {value!r}")


class InputSpec(Model):
    """A static input: its shape in axes, its dtype, and what its padding holds."""

    shape: tuple[Dim, ...]
    dtype: Literal[DTYPES]  # type: ignore[valid-type]
    pad: Annotated[int | float | str, BeforeValidator(_pad)] = "zero"
    range: tuple[StrictInt, StrictInt] | None = None  # legal integer values, low to high (exclusive): for self-checks
    # Padding may hold any legal value without a change in the result; self-checks hold it to that.
    inert: StrictBool = False
    bind: Bind = "copy"  # of a graph: copied into its slot, or read where the caller has it; auto takes the faster

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        is_float = self.dtype in DTYPES[:4]
        if not self.shape:
            raise ValueError("shape is empty; a static input has at least one dimension")
        if "any" in self.shape:
            raise ValueError("`any` is for outputs; an input's dimensions are axes or fixed sizes")
        if self.pad == "skip" and self.dtype not in ("int64", "int32", "int16", "int8"):
            raise ValueError(f"pad: skip marks an index with -1 and needs a signed integer dtype, given {self.dtype}")
        low, high = _LIMITS[self.dtype]
        if isinstance(self.pad, (int, float)):
            # Floats can pad with nan and inf, too; whole numbers cannot.
            fits = low <= self.pad <= high and (is_float or self.pad == int(self.pad))
            if not fits and not (is_float and not isfinite(self.pad)):
                raise ValueError(f"pad {self.pad} does not fit dtype {self.dtype}")
        if self.range is not None:
            if is_float or self.range[0] >= self.range[1]:
                given = list(self.range)
                raise ValueError(f"range is [low, high) with low below high, for integer dtypes, given {given}")
            if self.range[0] < low or self.range[1] - 1 > high:
                raise ValueError(f"range {list(self.range)} does not fit dtype {self.dtype}")
        return self


class OutputSpec(Model):
    """An output: its shape in axes; `any` stands for a size that padding does not touch."""

    shape: tuple[Dim, ...]
    check: StrictBool = True  # false: not compared in self-checks, such as an argmax, which rounding can turn
    bind: Literal["copy", "patch"] = "copy"  # how a graph writes into a call's `out`: patch makes it write there itself


class Ring(Model):
    """Outputs are copied into one of `ring` buffers in turn; the `ring`-th call afterwards overwrites them."""

    ring: StrictInt = Field(ge=1, le=1024)


def _ownership(value: object) -> object:
    if isinstance(value, Mapping):
        try:
            return Ring.model_validate(value)
        except ValidationError as error:
            raise ValueError(_problems(error)[0]) from error
    if isinstance(value, Ring) or value in ("cloned", "borrowed"):
        return value
    raise ValueError(f"expected cloned, borrowed or {{ring: N}}, given {value!r}")


_ownership_schema = {"anyOf": [{"enum": ["cloned", "borrowed"]}, Ring.model_json_schema()]}
Ownership = Annotated[
    Literal["cloned", "borrowed"] | Ring, BeforeValidator(_ownership), WithJsonSchema(_ownership_schema)
]


class Memory(Model):
    """`budget`: buckets whose graphs would go over it run eagerly instead."""

    budget: ByteSize | None = None


def _self_check(value: object) -> object:
    if isinstance(value, bool) or value in ("quick", "full"):
        return value
    raise ValueError(f"expected true, false, quick or full, given {value!r}")


SelfCheck = Annotated[
    bool | Literal["quick", "full"],
    BeforeValidator(_self_check),
    WithJsonSchema({"enum": [True, False, "quick", "full"]}),
]


class Warmup(Model):
    """`self_check`: replay every bucket against unpadded eager; `full` tries more sizes and paddings than `quick`,
    which is what `true` means. `lazy`: capture a bucket when it is first hit.
    """

    self_check: SelfCheck = True
    lazy: StrictBool = False
    tolerance: Tolerance | None = None  # relative; None picks by dtype


class KVCacheSpec(Model):
    """The paged KV cache of an LLM set. `memory: null` takes what the model and the device leave."""

    page_size: Annotated[Literal[16, 32, 64, 128], BeforeValidator(_whole)] = 64
    memory: ByteSize | None = None


class PhaseSpec(Model):
    """Axes, slots and policies of one function: a whole set, or a phase of an LLM set."""

    executable: ExecutableKind = "auto"
    axes: dict[StrictStr, AxisSizes] = Field(default_factory=dict)
    buckets: tuple[tuple[StrictInt, ...], ...] | None = None  # None: every combination of the axes' sizes
    work: tuple[StrictStr, ...] | None = None  # axes whose product is work; None: all
    inputs: dict[StrictStr, InputSpec] = Field(default_factory=dict)
    outputs: dict[StrictStr, OutputSpec] = Field(default_factory=dict)
    overflow: Literal["eager", "split", "error"] = "eager"
    dispatch: Literal["nearest", "cheapest"] = "nearest"  # cheapest: pad, split or run eagerly, by measured costs
    max_padding: Ratio | None = None
    outputs_are: Ownership = "cloned"
    on_stale: Literal["error", "recapture"] = "error"  # when a tensor that a graph reads was rebound, moved or freed
    io: Literal["staged", "in_graph"] = "staged"  # in_graph: the copies of host inputs are nodes of the graph

    @field_validator("axes", mode="after")
    @classmethod
    def _axis_names(cls, axes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        for name in axes:
            if not name.isidentifier() or name == "any":
                raise ValueError(f"an axis needs a plain name other than `any`, given {name!r}")
        return axes

    @model_validator(mode="after")
    def _axes_agree(self) -> Self:
        used: set[str] = set()
        for section, specs in (("inputs", self.inputs), ("outputs", self.outputs)):
            for name, spec in specs.items():
                for dim in spec.shape:
                    if isinstance(dim, str) and dim != "any" and dim not in self.axes:
                        declared = ", ".join(self.axes) or "none"
                        raise ValueError(f"{section}.{name} uses axis {dim!r}, declared axes: {declared}")
                    if section == "inputs" and isinstance(dim, str):
                        used.add(dim)
        if self.inputs and (idle := [name for name in self.axes if name not in used]):
            raise ValueError(f"axis {idle[0]!r} is in no input's shape, so no call could say its size")
        return self

    @model_validator(mode="after")
    def _one_rule_for_padding(self) -> Self:
        if self.dispatch == "cheapest" and self.max_padding is not None:
            raise ValueError("dispatch: cheapest weighs padding by its measured cost, so max_padding must be null")
        return self

    @property
    def request_axis(self) -> str | None:
        """The axis that leads every input and output and is nowhere else: a call can be split along it."""
        shapes = [item.shape for item in self.inputs.values()] + [item.shape for item in self.outputs.values()]
        leading = {shape[0] if shape else None for shape in shapes}
        only = leading.pop() if len(leading) == 1 else None
        if not isinstance(only, str) or only == "any" or any(only in shape[1:] for shape in shapes):
            return None
        return only

    def lattice(self) -> Lattice:
        """The buckets and their total lookup."""
        return Lattice(
            self.axes,
            points=self.buckets,
            work=self.work,
            overflow=self.overflow,
            request_axis=self.request_axis,
            max_padding=self.max_padding,
        )


class BucketSet(PhaseSpec):
    """A whole set, as loaded from YAML; immutable.

    Either one function (`axes`, `inputs`, `outputs`) or an LLM (`phases: {prefill, decode}` and `kv_cache`).
    """

    version: Annotated[Literal[1], BeforeValidator(_whole)]
    name: StrictStr = Field(min_length=1)
    model: StrictStr | None = None  # what `bucketgraph warmup` loads when --model is not given
    memory: Memory = Memory()
    warmup: Warmup = Warmup()
    phases: dict[StrictStr, PhaseSpec] | None = None  # prefill and decode
    kv_cache: KVCacheSpec | None = None
    max_model_len: StrictInt | None = Field(default=None, ge=1)
    # Of an LLM: invariant makes a request's bits its own, phase by phase.
    numerics: Literal["fast", "invariant"] = "fast"
    # What a compile, a new memory segment or a sync after warm-up does.
    quiet: Literal["count", "warn", "raise"] = "count"
    _source: str = PrivateAttr(default="bucket set")  # the file it came from

    @property
    def source(self) -> str:
        return self._source

    @property
    def is_llm(self) -> bool:
        return self.phases is not None

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        return self.kv_cache or KVCacheSpec()

    @field_validator("phases", mode="before")
    @classmethod
    def _llm_defaults(cls, phases: Any) -> Any:
        """A decode batch over the largest bucket is run in parts unless the set says otherwise."""
        decode = phases.get("decode") if isinstance(phases, Mapping) else None
        if not isinstance(decode, Mapping) or "overflow" in decode:
            return phases
        return {**phases, "decode": {**decode, "overflow": "split"}}

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        parts: list[PhaseSpec] = [self, *(self.phases or {}).values()]
        if self.warmup.lazy and any(part.dispatch == "cheapest" for part in parts):
            raise ValueError("dispatch: cheapest goes by costs that warm-up measures, so warmup.lazy must be false")
        if self.phases is not None:
            if misplaced := sorted(self.model_fields_set & PhaseSpec.model_fields.keys()):
                raise ValueError(
                    f"a set with phases (an LLM) has no {misplaced[0]} of its own; what one function has at the top"
                    " belongs to phases.prefill and phases.decode"
                )
            _check_llm(self.phases)
            return self
        if self.kv_cache is not None or self.max_model_len is not None:
            raise ValueError("kv_cache and max_model_len belong to an LLM set, which has phases")
        if self.numerics != "fast":
            raise ValueError(
                "numerics: invariant belongs to an LLM set; what one function computes is its own, and a bucket's shape"
                " may pick another library kernel"
            )
        for section in ("axes", "inputs", "outputs"):
            if not getattr(self, section):
                raise ValueError(f"{section} is missing; a set without phases describes one function")
        if self.overflow == "split" and self.request_axis is None:
            raise ValueError("overflow: split needs one axis that leads every input and output")
        self.lattice()
        return self


_PHASE_AXES = {"prefill": (("tokens", "requests"), ("tokens",)), "decode": (("batch",), ("batch",))}


def _check_llm(phases: Mapping[str, PhaseSpec]) -> None:
    if unknown := [name for name in phases if name not in _PHASE_AXES]:
        raise ValueError(f"phases.{unknown[0]}: unknown phase, allowed: {', '.join(_PHASE_AXES)}")
    for name, (allowed, needed) in _PHASE_AXES.items():
        if name not in phases:
            raise ValueError(f"phases.{name} is missing; an LLM set has prefill and decode")
        phase = phases[name]
        for axis in phase.axes:
            if axis not in allowed:
                raise ValueError(f"phases.{name}.axes.{axis}: unknown axis, allowed: {', '.join(allowed)}")
        for axis in needed:
            if axis not in phase.axes:
                raise ValueError(f"phases.{name}.axes.{axis} is missing")
        if "outputs_are" in phase.model_fields_set:
            raise ValueError(f"phases.{name}.outputs_are: an LLM's results are its caller's own, and not configured")
        if phase.inputs or phase.outputs or phase.work:
            raise ValueError(f"phases.{name}: inputs, outputs and work are the model's own and not configured")
        phase.lattice()


def parse(data: Mapping[str, Any], source: str = "bucket set") -> BucketSet:
    """A `BucketSet` from a mapping. Raises ConfigError naming `source`, the key, what was given and what is allowed."""
    if "version" not in data:
        raise ConfigError(f"{source}: key version is missing", expected="version: 1")
    try:
        made = BucketSet.model_validate(data)
    except ValidationError as error:
        problems = _problems(error)
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise ConfigError(f"{source}: {problems[0]}{more}") from error
    made._source = source
    return made


def load(path: str | Path) -> BucketSet:
    """Load a bucket set from a YAML file.

    Args:
        path: the file, or the name of a ready set that ships with the package, such as `minilm`.

    Raises:
        ConfigError: the file is missing, is not plain YAML, or describes no valid set; the text names file and key.
    """
    file = find(path)
    return parse(yaml_strict.read_file(file), str(file))


def find(path: str | Path) -> Path:
    """The file behind a path or the name of a ready set. Raises ConfigError listing the ready sets."""
    file, ready = Path(path), Path(__file__).parent / "configs"
    with suppress(OSError, ValueError):  # the text of a set instead of its path: too long, or not a name at all
        if file.is_file():
            return file
        named = ready / f"{path}.yaml"
        if file.name == str(path) and named.is_file():
            return named
    names = ", ".join(sorted(p.stem for p in ready.glob("*.yaml")))
    raise ConfigError(f"{_short(path)}: no such bucket set", expected=f"a YAML file, or a ready set: {names}")


def schema() -> dict[str, Any]:
    """The JSON Schema of a bucket set."""
    made = BucketSet.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _problems(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        parts = (str(part) for part in problem["loc"])
        path = ".".join(part for part in parts if part != "[key]" and not part.startswith("function-"))
        text = problem["msg"].removeprefix("Value error, ").removeprefix("axis : ")
        if problem["type"] == "missing":
            lines.append(f"key {path} is missing")
            continue
        given = "" if problem["type"] == "value_error" else f", given {problem['input']!r}"
        lines.append(_short((f"key {path}: " if path else "") + text[0].lower() + text[1:] + given))
    return lines


def _short(text: object) -> str:
    """An error quotes what it was given, but not a page of it."""
    whole = str(text)
    return whole if len(whole) <= 600 else f"{whole[:400]} ... {whole[-200:]}"
