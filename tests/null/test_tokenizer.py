"""Ids, text and prompts equal transformers' on the real file; a stream of any ids joins to what decode gives."""

from __future__ import annotations

import functools
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from bucketgraph.errors import InputError, ModelError
from bucketgraph.llm import chat
from bucketgraph.llm.model_config import DEFAULT_MODEL, resolve_model
from bucketgraph.llm.tokenizer import DetokenizeStream, Tokenizer, token_bytes

TEXTS = [
    "The capital of France is Paris.",
    "It's we'll they've I'd you're — “quoted” text, isn't it?",
    "def f(x: int) -> str:\n    return f'{x!r}'\n\n\tif a != b: pass  # comment\r\n",
    "3.14159 x 10^12, 2024-02-29, 0x1F, 1,000,000; 7th",
    "emoji 🙂👩‍👩‍👧‍👦🇫🇷 and accents: naïve café Ångström",
    "日本語のテキスト。中文字符，한국어 텍스트",
    "Кириллица, ελληνικά, עברית, العربية",
    "  leading, trailing   \n\n\n and   runs \t\t of space  ",
    "<|im_start|>user\nhello<|im_end|>\n<repo_name>x<file_sep>",
    "<|im_start|><|im_end|>",
    "\x00\x01\x7f",
    "a" * 300,
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 2 + 2?\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<b> & 'c'"}, {"role": "user", "content": "d"}],
]
FAMILY = {"role": "user", "content": "x"}


@functools.cache
def packaged() -> Tokenizer:
    try:
        resolve_model(DEFAULT_MODEL)
    except ModelError as error:
        pytest.skip(str(error))
    return Tokenizer.from_path(DEFAULT_MODEL)


@functools.cache
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    packaged()
    path = resolve_model(DEFAULT_MODEL)
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers_on_the_packaged_model(text: str) -> None:
    ours, theirs = packaged(), reference()
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_prompts_equal_transformers(messages: list[dict[str, Any]], prompt: bool) -> None:
    ours = packaged().apply_chat_template(messages, add_generation_prompt=prompt)
    assert ours == reference().apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)


def test_smollm_splits_digits_off_before_it_looks_at_spaces() -> None:
    # As in training. transformers 5.24 rebuilds GGUF tokenizers without this step and cuts "Ġ", "Ġ" here.
    assert pieces(packaged(), "of  12") == ["of", "ĠĠ", "1", "2"]


def test_facts_of_the_packaged_tokenizer() -> None:
    ours = packaged()
    assert (ours.vocab_size, ours.bos, ours.bos_token, ours.eos_token) == (49152, 1, "<|im_start|>", "<|im_end|>")
    assert ours.eos_token_ids == (2,)
    assert ours.id_to_token(0) == "<|endoftext|>" and ours.id_to_token(49152) is None
    assert ours.encode("") == [] and ours.decode([]) == ""
    assert ours.decode([1, 19556, 2]) == "Hello" and ours.decode([1, 19556, 2], False) == "<|im_start|>Hello<|im_end|>"


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    stream = DetokenizeStream(tokenizer, skip)
    return [*(stream.feed(token_id) for token_id in ids), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_never_shows_half_a_character(text: str) -> None:
    tokenizer = packaged()
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids, skip=False)
    assert "".join(pieces) == tokenizer.decode(ids, False)
    assert not any("\ufffd" in piece for piece in pieces)
    assert DetokenizeStream(tokenizer, False).feed(ids) == "".join(pieces)


def test_a_stream_of_random_ids_joins_to_what_decode_gives() -> None:
    tokenizer = packaged()
    rng = random.Random(0)
    partial = [i for i in range(17, 49152) if not _is_utf8(token_bytes(str(tokenizer.id_to_token(i))))]
    assert len(partial) > 100
    for trial in range(600):
        # Ids past the vocabulary too: a model's embedding may have padding rows.
        draw = [lambda: rng.randrange(49200), lambda: rng.choice(partial)][trial % 2]
        ids = [draw() for _ in range(rng.randrange(1, 40))]
        for skip in (True, False):
            assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip), ids


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_an_unfinished_character_is_held_until_finish() -> None:
    tokenizer = packaged()
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    stream = tokenizer.stream()
    assert stream.feed(ids[:-1]) == "" and stream.finish() == "\ufffd"


def sentencepiece_like() -> Tokenizer:
    """A backend with SentencePiece's decoder, as Llama 2's tokenizer.json has: meta space, byte tokens."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "é"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>", add_bos=True, add_eos=False)


def test_a_sentencepiece_stream_joins_to_what_decode_gives() -> None:
    tokenizer = sentencepiece_like()
    rng = random.Random(0)
    size = tokenizer.vocab_size
    assert size == 265
    for _ in range(2000):
        ids = [rng.choice([rng.randrange(size), rng.randrange(259, size + 1)]) for _ in range(rng.randrange(1, 12))]
        for skip in (True, False):
            assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip), ids
    euro = [3 + byte for byte in "€".encode()]
    assert streamed(tokenizer, [*euro, 260]) == ["", "", "", "€a", ""]
    assert tokenizer.encode("a") == [1, 260] and tokenizer.encode("a", add_special_tokens=False) == [260]


def save_folder(folder: Path, config: dict[str, Any] | None = None, post_bos: bool = False) -> Path:
    """A small byte-level tokenizer.json of its own, with a tokenizer_config.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, "he", "ll"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(3)
    backend.enable_padding(length=3)
    if post_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    default = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "chat_template": "old"}
    (folder / "tokenizer_config.json").write_text(json.dumps(default if config is None else config))
    return folder


def test_a_folder_is_read_without_its_training_limits(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(save_folder(tmp_path))
    assert tokenizer.decode(tokenizer.encode("hello hello")) == "hello hello"
    assert (tokenizer.bos, tokenizer.eos_token, tokenizer.eos_token_ids) == (0, "</s>", (1,))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert Tokenizer.from_path(tmp_path).eos_token_ids == (1, 5)


def test_bos_comes_from_the_post_processor_or_from_an_explicit_flag(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    assert Tokenizer.from_path(save_folder(tmp_path, config, post_bos=True)).encode("he")[0] == 0
    assert Tokenizer.from_path(save_folder(tmp_path, config)).encode("he")[0] != 0
    explicit = Tokenizer.from_path(save_folder(tmp_path, config | {"add_bos_token": True, "add_eos_token": True}))
    assert (explicit.encode("he")[0], explicit.encode("he")[-1], len(explicit.encode("he"))) == (0, 1, 3)
    off = Tokenizer.from_path(save_folder(tmp_path, config | {"add_bos_token": False}, post_bos=True))
    assert len(off.encode("he")) == 1


def test_named_templates_and_a_template_file(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.from_path(save_folder(tmp_path, {"chat_template": named}))
    assert tokenizer.apply_chat_template([FAMILY]) == "plain"
    assert tokenizer.apply_chat_template([FAMILY], tools=[{"name": "f"}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file {{ mood }}")
    assert Tokenizer.from_path(save_folder(tmp_path)).apply_chat_template([FAMILY], mood="good") == "<s>file good"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no chat template.*base model"):
        Tokenizer.from_path(save_folder(tmp_path, {})).apply_chat_template([FAMILY])


def test_folders_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json in"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_path(tmp_path)
    save_folder(tmp_path, {"bos_token": "<absent>"})
    with pytest.raises(ModelError, match="<absent>"):
        Tokenizer.from_path(tmp_path)


def gguf_tokenizer(path: Path, change: dict[str, Any]) -> Path:
    """A GGUF file that holds nothing but a tokenizer of bytes and a few merges."""
    gguf = pytest.importorskip("gguf")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    extra = ["12", "123", "hé", "<user>", "<s>", "</s>"]
    values = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [*alphabet, *extra],
        "token_type": [1] * (len(alphabet) + 3) + [4, 3, 3],
        "merges": ["1 2", "12 3"],
        "bos": 260,
        "eos": 261,
    } | change
    writer = gguf.GGUFWriter(path / "t.gguf", "llama")
    writer.add_tokenizer_model(values["model"])
    writer.add_tokenizer_pre(values["pre"])
    writer.add_token_list(values["tokens"])
    writer.add_token_types(values["token_type"])
    writer.add_token_merges(values["merges"])
    writer.add_bos_token_id(values["bos"])
    writer.add_eos_token_id(values["eos"])
    if "add_bos" in values:
        writer.add_add_bos_token(values["add_bos"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path / "t.gguf"


def pieces(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]


def test_gguf_llama_bpe_groups_three_digits_and_begins_with_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(gguf_tokenizer(tmp_path, {}))
    assert pieces(tokenizer, "1231") == ["<s>", "123", "1"]
    assert pieces(tokenizer, "<user></s>") == ["<s>", "<user>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("<user>x</s>")) == "<user>x"
    plain = Tokenizer.from_path(gguf_tokenizer(tmp_path, {"add_bos": False}))
    assert pieces(plain, "12") == ["12"]


def test_gguf_qwen2_splits_digits_normalises_and_has_no_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(gguf_tokenizer(tmp_path, {"pre": "qwen2"}))
    assert pieces(tokenizer, "123") == ["1", "2", "3"]
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "llama"}, "model 'llama'"),
        ({"pre": "deepseek-llm"}, "deepseek-llm.*smollm, llama-bpe, qwen2"),
        ({"merges": ["1 2 3"]}, "merges of two"),
        ({"token_type": [1]}, "a type each"),
        ({"eos": 9999}, "eos_token_id.*9999"),
    ],
    ids=["sentencepiece", "unknown pre-tokenizer", "merge of three", "types cut short", "eos outside"],
)
def test_a_gguf_tokenizer_that_is_not_known_exactly_is_refused(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        Tokenizer.from_path(gguf_tokenizer(tmp_path, change))


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("hello", "messages"),
        ([], "messages"),
        (FAMILY, "messages"),
        (["hello"], r"messages\[0\].*role and content"),
        ([FAMILY, {"content": "x"}], r"messages\[1\] role"),
        ([{"role": "user"}], r"messages\[0\] content"),
        ([{"role": "user", "content": 3}], r"messages\[0\] content"),
    ],
)
def test_malformed_messages_are_named(messages: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        chat.render("x", messages)


def test_template_tools_that_chat_templates_expect() -> None:
    template = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y')[:2] }}"
    )
    assert chat.render(template, [{"role": "user", "content": "<é>"}] * 2) == '{"role": "user", "content": "<é>"}20'


def test_what_a_template_refuses_forbids_or_cannot_render_is_told_apart() -> None:
    with pytest.raises(InputError, match=r"refused.*no system role"):
        chat.render("{{ raise_exception('no system role') }}", [FAMILY])
    with pytest.raises(InputError, match="cannot render"):
        chat.render("{{ 'a' + messages[0].content }}", [{"role": "user", "content": [{"type": "text"}]}])
    with pytest.raises(ModelError, match="does not compile"):
        chat.render("{% if %}", [FAMILY])
    with pytest.raises(ModelError, match="sandbox"):
        chat.render("{{ messages.__class__.__mro__ }}", [FAMILY])
    with pytest.raises(ModelError, match="sandbox"):
        chat.render("{{ messages.append(1) }}", [FAMILY])


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    tokenizer = Tokenizer.from_path(save_folder(tmp_path, {"chat_template": f"for {tmp_path}"}))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=rf"{package} package.*pip install .bucketgraph\[llm\]"):
        Tokenizer.from_path(tmp_path).apply_chat_template([FAMILY])
    assert tokenizer.bos is None


def test_inputs_that_are_no_text_or_no_ids_are_refused() -> None:
    tokenizer = sentencepiece_like()
    with pytest.raises(InputError, match="text to encode"):
        tokenizer.encode(b"x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="text to encode"):
        tokenizer.encode("\ud800")
    with pytest.raises(InputError, match="ids to decode"):
        tokenizer.decode([-1])
    with pytest.raises(InputError, match="token id"):
        tokenizer.stream().feed(-1)
