"""Every wrong set is one ConfigError that names file, key, what was given and what is allowed."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from bucketgraph import config, yaml_strict  # noqa: E402
from bucketgraph.buckets import ladder  # noqa: E402
from bucketgraph.config import BucketSet, Ring, load, parse, schema  # noqa: E402
from bucketgraph.errors import ConfigError  # noqa: E402

SHIPPED = sorted((Path(config.__file__).parent / "configs").glob("*.yaml"))

GOOD = """\
version: 1
name: encoder
executable: auto
axes:
  batch: [1, 2, 4]
  tokens: {from: 16, to: 64, growth: 2, multiple_of: 16}
inputs:
  ids: {shape: [batch, tokens], dtype: int64, pad: 0, range: [0, 100]}
  scale: {shape: [batch, 3], dtype: float32, pad: repeat_last}
outputs:
  hidden: {shape: [batch, tokens, any]}
overflow: split
max_padding: 8.0
outputs_are: {ring: 3}
memory: {budget: 2GiB}
warmup: {self_check: true, lazy: false}
"""

LLM = """\
version: 1
name: llm
phases:
  prefill: {axes: {tokens: [64, 128], requests: [8]}}
  decode: {axes: {batch: [1, 2, 4]}}
kv_cache: {page_size: 16, memory: 4GiB}
"""


def made(text: str) -> BucketSet:
    return parse(yaml_strict.read(text, "set.yaml"), "set.yaml")


def test_a_good_set_is_read_as_written_and_is_frozen() -> None:
    good = made(GOOD)
    assert good.axes == {"batch": (1, 2, 4), "tokens": (16, 32, 64)}
    assert good.memory.budget == 2 << 30 and good.outputs_are == Ring(ring=3) and good.request_axis == "batch"
    assert not good.is_llm and good.source == "set.yaml"
    with pytest.raises(Exception, match="frozen"):
        good.name = "other"  # type: ignore[misc]


# old text, new text, and what the error must hold
WRONG: list[tuple[str, str, tuple[str, ...]]] = [
    # unknown and misspelt keys, at each level
    ("name: encoder", "nmae: encoder", ("'nmae'", "did you mean name?", "allowed: ")),
    ("name: encoder", "name: encoder\ncolour: red", ("'colour'", "allowed: executable, axes")),
    ("growth: 2", "grwoth: 2", ("axes.tokens", "'grwoth'", "did you mean growth?")),
    ("dtype: int64", "dtpye: int64", ("inputs.ids", "'dtpye'", "did you mean dtype?")),
    ("hidden: {shape", "hidden: {shapes", ("outputs.hidden", "'shapes'", "did you mean shape?")),
    ("{ring: 3}", "{rnig: 3}", ("outputs_are", "'rnig'", "did you mean ring?")),
    ("{budget: 2GiB}", "{bugdet: 2GiB}", ("memory", "'bugdet'", "did you mean budget?")),
    ("lazy: false", "lzay: false", ("warmup", "'lzay'", "did you mean lazy?")),
    # missing keys
    ("version: 1\n", "", ("key version is missing",)),
    ("name: encoder\n", "", ("key name is missing",)),
    ("dtype: int64, ", "", ("key inputs.ids.dtype is missing",)),
    ("from: 16, ", "", ("axes.tokens", "key from is missing")),
    # versions
    ("version: 1", "version: 2", ("key version", "given 2")),
    ("version: 1", "version: '1'", ("key version", "given '1'")),
    ("version: 1", "version: true", ("key version", "given True")),
    ("version: 1", "version: 1.0", ("key version", "given 1.0")),
    # sizes
    ("[1, 2, 4]", "[0, 2, 4]", ("axes.batch", "must be positive", "given 0")),
    ("[1, 2, 4]", "[-1, 2]", ("axes.batch", "must be positive", "given -1")),
    ("[1, 2, 4]", "[4, 2, 1]", ("axes.batch", "must ascend", "2 after 4")),
    ("[1, 2, 4]", "[1, 2, 2]", ("axes.batch", "2 is listed twice")),
    ("[1, 2, 4]", "[true, 2]", ("axes.batch", "whole number", "given True")),
    ("[1, 2, 4]", "[1.0, 2]", ("axes.batch", "whole number", "given 1.0")),
    ("[1, 2, 4]", "[1e3]", ("axes.batch", "whole number", "given '1e3'")),
    ("[1, 2, 4]", "[0100]", ("axes.batch", "whole number", "given '0100'")),
    ("[1, 2, 4]", "[1:30]", ("axes.batch", "whole number", "given '1:30'")),
    ("[1, 2, 4]", "[yes]", ("axes.batch", "whole number", "given 'yes'")),
    ("[1, 2, 4]", "[1_024]", ("axes.batch", "whole number", "given '1_024'")),
    ("[1, 2, 4]", "[.nan]", ("axes.batch", "whole number", "given nan")),
    ("[1, 2, 4]", "[[1]]", ("axes.batch", "whole number", "given [1]")),
    ("[1, 2, 4]", "[]", ("axes.batch", "no sizes")),
    ("[1, 2, 4]", "4", ("axes.batch", "list of sizes", "given 4")),
    ("[1, 2, 4]", "null", ("axes.batch", "list of sizes", "given None")),
    ("[1, 2, 4]", "[4294967296]", ("axes.batch", "absurdly large")),
    # ladders
    ("to: 64", "to: 60", ("axes.tokens", "`to` is not a multiple of 16", "use 48 or 64")),
    ("from: 16", "from: 20", ("axes.tokens", "`from` is not a multiple of 16", "use 16 or 32")),
    ("to: 64", "to: 8", ("axes.tokens", "1 <= from <= to")),
    ("to: 64", "to: 1e3", ("axes.tokens", "key to", "given '1e3'")),
    ("to: 64", "to: " + "9" * 400, ("axes.tokens", "absurdly large")),
    ("growth: 2", "growth: 1", ("axes.tokens", "growth is out of range")),
    ("growth: 2", "growth: .nan", ("axes.tokens", "growth is out of range")),
    ("growth: 2", "growth: fast", ("axes.tokens", "key growth", "given 'fast'")),
    ("growth: 2", "growth: " + "9" * 400, ("axes.tokens", "key growth")),
    ("multiple_of: 16", "multiple_of: 0", ("axes.tokens", "multiple_of is too small")),
    ("to: 64, growth: 2", "to: 1073741824, growth: 1.0000001", ("axes.tokens", "too many sizes")),
    # axes and shapes
    ("[batch, tokens], dtype", "[batch, token], dtype", ("inputs.ids uses axis 'token'", "batch, tokens")),
    ("tokens, any]", "tokns, any]", ("outputs.hidden uses axis 'tokns'", "batch, tokens")),
    ("  tokens: {", "  heads: [8]\n  tokens: {", ("axis 'heads' is in no input's shape",)),
    ("batch: [1, 2, 4]", "any: [1, 2]", ("axes", "given 'any'")),
    ("batch: [1, 2, 4]", "2nd: [1, 2]", ("axes", "given '2nd'")),
    ("batch: [1, 2, 4]", "7: [1, 2]", ("axes.7", "given 7")),
    ("[batch, 3]", "[batch, 0]", ("inputs.scale.shape", "given 0")),
    ("[batch, 3]", "[batch, 3.0]", ("inputs.scale.shape", "given 3.0")),
    ("[batch, 3]", "[batch, true]", ("inputs.scale.shape", "given True")),
    ("[batch, 3]", "[batch, any]", ("inputs.scale", "`any` is for outputs")),
    ("[batch, 3]", "[]", ("inputs.scale", "shape is empty")),
    ("[batch, 3]", "batch", ("inputs.scale.shape", "given 'batch'")),
    ("[batch, 3]", "[3, batch]", ("overflow: split needs one axis that leads",)),
    ("[batch, 3]", "[batch, batch]", ("overflow: split needs one axis that leads",)),
    # slots
    ("dtype: int64", "dtype: int65", ("inputs.ids.dtype", "'int64'", "given 'int65'")),
    ("pad: 0", "pad: 0.5", ("inputs.ids", "pad 0.5 does not fit dtype int64")),
    ("pad: 0", "pad: .nan", ("inputs.ids", "pad nan does not fit dtype int64")),
    ("pad: 0", "pad: -.inf", ("inputs.ids", "pad -inf does not fit dtype int64")),
    ("pad: 0", "pad: 9223372036854775808", ("inputs.ids", "does not fit dtype int64")),
    ("dtype: int64, pad: 0", "dtype: uint8, pad: -1", ("inputs.ids", "pad -1 does not fit dtype uint8")),
    ("dtype: int64, pad: 0", "dtype: bool, pad: 2", ("inputs.ids", "pad 2 does not fit dtype bool")),
    ("dtype: float32, pad: repeat_last", "dtype: float16, pad: 65505", ("inputs.scale", "does not fit dtype float16")),
    ("pad: repeat_last", "pad: skip", ("inputs.scale", "signed integer dtype", "float32")),
    ("pad: repeat_last", "pad: repeat", ("inputs.scale.pad", "zero, repeat_last or skip", "given 'repeat'")),
    ("pad: repeat_last", "pad: true", ("inputs.scale.pad", "given True")),
    ("pad: repeat_last", "pad: [0]", ("inputs.scale.pad", "given [0]")),
    ("[0, 100]", "[5, 5]", ("inputs.ids", "low below high", "[5, 5]")),
    ("[0, 100]", "[0, 100, 200]", ("inputs.ids.range",)),
    ("[0, 100]", "[0, 9223372036854775809]", ("inputs.ids", "does not fit dtype int64")),
    ("pad: repeat_last", "range: [0, 1]", ("inputs.scale", "for integer dtypes")),
    # policies
    ("max_padding: 8.0", "max_padding: 0.9", ("max_padding", "greater than or equal to 1", "given 0.9")),
    ("max_padding: 8.0", "max_padding: .nan", ("max_padding", "given nan")),
    ("max_padding: 8.0", "max_padding: .inf", ("max_padding", "finite")),
    ("max_padding: 8.0", "max_padding: true", ("max_padding", "given True")),
    ("overflow: split", "overflow: spilt", ("overflow", "'eager', 'split' or 'error'", "given 'spilt'")),
    ("executable: auto", "executable: cuda", ("executable", "'cudagraph'", "given 'cuda'")),
    ("{ring: 3}", "{ring: 0}", ("outputs_are", "ring", "given 0")),
    ("{ring: 3}", "copied", ("outputs_are", "cloned, borrowed or {ring: N}", "given 'copied'")),
    ("2GiB", "2 gigs", ("memory.budget", "512MiB or 4GiB", "given '2 gigs'")),
    ("2GiB", "0", ("memory.budget", "given 0")),
    ("2GiB", "9" * 400 + "GiB", ("memory.budget", "512MiB or 4GiB")),
    ("self_check: true", "self_check: yes", ("warmup.self_check", "given 'yes'")),
    ("self_check: true", "self_check: 1", ("warmup.self_check", "given 1")),
    ("lazy: false", "tolerance: 0", ("warmup.tolerance", "given 0")),
    ("lazy: false", "tolerance: .inf", ("warmup.tolerance", "given inf")),
    # sections of the wrong kind
    ("{budget: 2GiB}", "2GiB", ("memory", "expected a mapping", "given '2GiB'")),
    ("{self_check: true, lazy: false}", "[true]", ("warmup", "expected a mapping")),
    ("  hidden: {shape: [batch, tokens, any]}", "  hidden: [batch, tokens]", ("outputs.hidden", "expected a mapping")),
    ("outputs:\n  hidden: {shape: [batch, tokens, any]}\n", "outputs: {}\n", ("outputs is missing",)),
    ("outputs:\n  hidden: {shape: [batch, tokens, any]}\n", "", ("outputs is missing",)),
    # explicit buckets and work
    ("overflow: split", "buckets: [[1, 16], [4, 64]]", ("axis batch: no bucket uses size 2",)),
    ("overflow: split", "buckets: [[1, 17]]", ("bucket [1, 17]", "17 is not a size of axis tokens", "[16, 32, 64]")),
    ("overflow: split", "buckets: [[1, 16], [1, 16]]", ("bucket [1, 16] is listed twice",)),
    ("overflow: split", "buckets: [[1]]", ("buckets", "one size for each axis", "given [1]")),
    ("overflow: split", "buckets: []", ("buckets", "empty")),
    ("overflow: split", "work: [token]", ("work", "given ['token']", "batch, tokens")),
    ("overflow: split", "work: [tokens, tokens]", ("work", "each once")),
    ("overflow: split", "work: []", ("work", "given []")),
    # keys of the other kind of set
    ("name: encoder", "name: encoder\nkv_cache: {page_size: 16}", ("kv_cache", "LLM set")),
    ("name: encoder", "name: encoder\nmax_model_len: 100", ("max_model_len", "LLM set")),
]


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        made(text)
    message = str(caught.value)
    assert message.startswith("set.yaml: ") and "\n" not in message and len(message) < 700
    return message


@pytest.mark.parametrize(("old", "new", "says"), WRONG, ids=[f"{old[:20]}->{new[:30]}" for old, new, _ in WRONG])
def test_a_wrong_set_is_an_error_that_says_where_and_what(old: str, new: str, says: tuple[str, ...]) -> None:
    assert old in GOOD
    message = refused(GOOD.replace(old, new))
    for part in says:
        assert part in message


WRONG_LLM: list[tuple[str, str, tuple[str, ...]]] = [
    ("name: llm", "name: llm\ninputs: {ids: {shape: [4], dtype: int64}}", ("no inputs of its own", "phases.prefill")),
    ("name: llm", "name: llm\naxes: {batch: [1]}", ("no axes of its own",)),
    # Keys that hold for one function: at the top of an LLM set they would be silently without effect.
    ("name: llm", "name: llm\nexecutable: eager", ("no executable of its own", "phases.decode")),
    ("name: llm", "name: llm\noverflow: error", ("no overflow of its own",)),
    ("name: llm", "name: llm\nmax_padding: 2", ("no max_padding of its own",)),
    ("  decode: {axes: {batch: [1, 2, 4]}}\n", "", ("phases.decode is missing",)),
    ("  prefill: {axes: {tokens: [64, 128], requests: [8]}}\n", "", ("phases.prefill is missing",)),
    ("prefill:", "prefil:", ("phases.prefil", "prefill")),
    ("requests: [8]", "request: [8]", ("phases.prefill.axes.request", "unknown axis", "tokens, requests")),
    ("batch: [1, 2, 4]", "bacth: [1]", ("phases.decode.axes.bacth", "unknown axis")),
    ("tokens: [64, 128], ", "", ("phases.prefill.axes.tokens is missing",)),
    (
        "{axes: {batch",
        "{inputs: {x: {shape: [batch], dtype: int64}}, axes: {batch",
        ("phases.decode", "not configured"),
    ),
    ("page_size: 16", "page_size: 24", ("kv_cache.page_size", "16, 32, 64 or 128", "given 24")),
    ("page_size: 16", "page_size: 16.0", ("kv_cache.page_size", "given 16.0")),
    ("memory: 4GiB", "memory: 4Gib", ("kv_cache.memory", "given '4Gib'")),
    ("memory: 4GiB", "memroy: 4GiB", ("kv_cache", "did you mean memory?")),
    ("name: llm", "name: llm\nmax_model_len: 0", ("max_model_len", "given 0")),
    ("name: llm", "name: llm\nmax_model_len: 1e3", ("max_model_len", "given '1e3'")),
]


@pytest.mark.parametrize(("old", "new", "says"), WRONG_LLM, ids=[f"{new[:40]}" for _, new, _ in WRONG_LLM])
def test_a_wrong_llm_set_is_an_error_that_says_where_and_what(old: str, new: str, says: tuple[str, ...]) -> None:
    assert made(LLM).is_llm and old in LLM
    message = refused(LLM.replace(old, new))
    for part in says:
        assert part in message


def test_buckets_that_no_request_reaches_are_refused() -> None:
    # With only tokens as work, batch=4 tokens=16 costs what batch=1 tokens=16 does, and batch 2 to 4 still reach it.
    assert made(GOOD.replace("overflow: split", "work: [tokens]"))
    buckets = "buckets: [[1, 16], [2, 16], [2, 64], [4, 32]]"
    message = refused(GOOD.replace("max_padding: 8.0", buckets).replace("[1, 2, 4]", "[1, 2, 4, 8]"))
    assert "axis batch: no bucket uses size 8" in message


def test_two_sets_in_one_file_and_sets_that_are_no_mapping_are_refused() -> None:
    assert "single document" in refused(GOOD + "---\n" + GOOD)
    assert "expected a mapping with version" in refused("- " + GOOD.splitlines()[0])


def test_load_names_the_ready_sets_when_nothing_is_found() -> None:
    for path in ("no_such_set", "no/such/set.yaml", GOOD, "x" * 5000, "nul\0byte", ""):
        with pytest.raises(ConfigError, match=r"no such bucket set.*minilm"):
            load(path)


def test_load_takes_a_path_or_a_ready_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    assert load(file).name == load(str(file)).name == "encoder" and load(file).source == str(file)
    assert load("minilm").name == "minilm"


def test_reading_a_set_imports_no_torch() -> None:
    code = (
        "import sys, bucketgraph; bucketgraph.load('minilm'); assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(config.__file__).parents[1])


# -- fuzz: whatever is written, the end is a BucketSet or a ConfigError ----------------------------------------------

PIECES = [
    "null", "true", "[]", "{}", "-1", "0", "1e309", ".nan", ".inf", "-.inf", "'", '"', "&a", "*a", "!!int", "? ", ": ",
    "- ", "<<", "[[1]]", "{a: 1}", "9" * 40, "batch", "any", "\n", "---", "...", "\t", "|", ">", "%YAML 1.1", "\ufeff",
]  # fmt: skip


def mutated(seed: int) -> bytes:
    rng = random.Random(seed)
    data = bytearray(rng.choice((GOOD, LLM)).encode())
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at : at + rng.randint(1, 12)] = b""
            case 1:
                data[at:at] = bytes(rng.choices(range(32, 127), k=rng.randint(1, 4)))
            case 2:
                data[at : at + rng.randint(0, 8)] = rng.choice(PIECES).encode()
            case 3:
                start = rng.randrange(len(data) + 1)
                data[at:at] = data[start : start + rng.randint(1, 40)]
            case _:
                if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)  # seldom still UTF-8
    return bytes(data)


def test_mutated_bytes_end_in_a_set_or_a_config_error(tmp_path: Path) -> None:
    file, loaded = tmp_path / "set.yaml", 0
    for seed in range(1400):
        file.write_bytes(mutated(seed))
        try:
            loaded += isinstance(load(file), BucketSet)
        except ConfigError as error:
            assert str(file) in str(error)
    assert loaded > 10, "the mutations should leave some sets whole"


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats()
    | st.sampled_from(
        ["batch", "tokens", "any", "zero", "skip", "repeat_last", "int64", "float32", "cloned", "1GiB", ""]
    )
    | st.text(max_size=5)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(scalars, inner, max_size=3), max_leaves=8
)


def paths(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [at, *(path for key, value in items for path in paths(value, (*at, key)))]


TREES = [yaml_strict.read(text, "") for text in (GOOD, LLM)]
PLACES = [(tree, path) for tree in TREES for path in paths(tree) if path]


@settings(max_examples=600)
@given(st.sampled_from(PLACES), values, st.booleans())
def test_any_value_at_any_key_ends_in_a_set_or_a_config_error(
    place: tuple[Any, tuple[Any, ...]], value: object, drop: bool
) -> None:
    tree, path = copy.deepcopy(place[0]), place[1]
    holder = tree
    for key in path[:-1]:
        holder = holder[key]
    if drop:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    try:
        parse(tree, "set.yaml")
    except ConfigError as error:
        assert str(error).startswith("set.yaml: ") and len(str(error)) < 1000


# -- ladders ---------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.integers(1, 64), st.integers(1, 40), st.integers(0, 60), st.floats(1.01, 8))
def test_a_ladder_starts_at_from_ends_at_to_and_grows_no_faster_than_told(
    step: int, first: int, extra: int, growth: float
) -> None:
    start, to = first * step, (first + extra) * step
    sizes = ladder(start, to, growth, step)
    assert sizes[0] == start and sizes[-1] == to
    assert list(sizes) == sorted(set(sizes)) and all(size % step == 0 for size in sizes)
    for small, large in pairwise(sizes):
        assert large <= -(-max(small + 1, int(small * growth)) // step) * step, "a step larger than growth"
        assert large == to or large >= int(small * growth), "a step smaller than growth, away from the end"


@pytest.mark.parametrize("to", [1, 2, 3, 12, 42, 100, 257, 300, 997])
def test_the_exact_maximum_is_a_size_wherever_the_stride_falls(to: int) -> None:
    assert ladder(1, to)[-1] == to and max(ladder(1, to)) == to


# -- the JSON Schema -------------------------------------------------------------------------------------------------


def accepts(spec: dict[str, Any], data: Any, root: dict[str, Any]) -> bool:
    """The parts of JSON Schema that ours uses, so that no package is needed to try it."""
    known = {"$schema", "$defs", "$ref", "title", "description", "default", "type", "properties", "required", "items",
             "additionalProperties", "anyOf", "enum", "const", "prefixItems", "minItems", "maxItems", "uniqueItems",
             "minimum", "maximum", "exclusiveMinimum", "minLength", "propertyNames"}  # fmt: skip
    assert set(spec) <= known, f"the checker does not know {set(spec) - known}"
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}

    def is_a(kind: str) -> bool:
        if kind in ("integer", "number"):
            return not isinstance(data, bool) and isinstance(data, int if kind == "integer" else (int, float))
        return isinstance(data, kinds[kind])

    if "$ref" in spec and not accepts(root["$defs"][spec["$ref"].removeprefix("#/$defs/")], data, root):
        return False
    if "anyOf" in spec and not any(accepts(option, data, root) for option in spec["anyOf"]):
        return False
    wanted = spec.get("type", [])
    if wanted and not any(is_a(kind) for kind in ([wanted] if isinstance(wanted, str) else wanted)):
        return False
    if ("enum" in spec and data not in spec["enum"]) or ("const" in spec and data != spec["const"]):
        return False
    if isinstance(data, dict):
        extra = spec.get("additionalProperties", True)
        for key, value in data.items():
            inner = spec.get("properties", {}).get(key, extra)
            if inner is False or (isinstance(inner, dict) and not accepts(inner, value, root)):
                return False
        return set(spec.get("required", ())) <= set(data)
    if isinstance(data, list):
        prefix = spec.get("prefixItems", [])
        pairs = [*zip(prefix, data, strict=False), *((spec.get("items", {}), item) for item in data[len(prefix) :])]
        sized = spec.get("minItems", 0) <= len(data) <= spec.get("maxItems", len(data))
        return sized and all(inner is not False and accepts(inner, item, root) for inner, item in pairs)
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        return spec.get("minimum", data) <= data <= spec.get("maximum", data)
    return True


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_the_schema_accepts_every_ready_set(file: Path) -> None:
    assert accepts(schema(), yaml_strict.read_file(file), schema())


def test_the_schema_refuses_what_an_editor_should_underline() -> None:
    made_schema = schema()
    assert made_schema["$schema"].startswith("https://json-schema.org/")
    assert accepts(made_schema, TREES[0], made_schema) and accepts(made_schema, TREES[1], made_schema)
    for key, value in (("nmae", "x"), ("version", 2), ("overflow", "spilt"), ("axes", {"batch": [0]}), ("warmup", [])):
        assert not accepts(made_schema, {**TREES[0], key: value}, made_schema), key


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_ready_set_loads_and_is_named_after_its_file(file: Path) -> None:
    assert load(file.stem).name == file.stem
