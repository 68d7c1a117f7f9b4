"""Text to token ids and back, over the `tokenizers` library, from a model folder or from inside a .gguf file.

Rules: `tokenizers` is imported on first use; ids are those that the model was trained with, so a pre-tokenizer that is
not known exactly is refused by name; `decode` never tidies spaces; a stream's pieces join to exactly what `decode`
gives for all the ids, and no piece ends inside a character. Special tokens written in a text become those tokens.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketgraph.errors import InputError, ModelError
from bucketgraph.llm import chat, gguf_file
from bucketgraph.llm.model_config import read_json, resolve_model, token_ids

if TYPE_CHECKING:
    import tokenizers

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A model's tokenizer with its special tokens and chat templates."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_token_ids: tuple[int, ...] = (),
        chat_templates: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
    ) -> None:
        """`add_bos` and `add_eos` None leave special tokens to the backend's own post-processor."""
        self.backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos = self._known_id(bos_token)
        eos = self._known_id(eos_token)
        self.eos_token_ids = eos_token_ids or (() if eos is None else (eos,))
        self.chat_templates = dict(chat_templates or {})
        self._post_processed = add_bos is None and add_eos is None
        self._prefix = [self.bos] if add_bos and self.bos is not None else []
        self._suffix = [eos] if add_eos and eos is not None else []

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """From a folder with tokenizer.json, a .gguf file or a `package:` reference. Raises ModelError."""
        resolved = resolve_model(path)
        return _from_gguf(resolved) if resolved.is_file() else _from_folder(resolved)

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; a model's embedding may have more rows, as padding."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, or None for an id that it does not have."""
        return self.backend.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the model's bos / eos where it wants them. Raises InputError."""
        if not isinstance(text, str):
            raise InputError("text to encode", given=type(text).__name__, expected="str")
        try:
            by_backend = add_special_tokens and self._post_processed
            ids = list(self.backend.encode(text, add_special_tokens=by_backend).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise InputError("text to encode", given=str(error), expected="text without lone surrogates") from error
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD, unknown ids nothing. Raises InputError."""
        try:
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except (OverflowError, TypeError) as error:
            raise InputError("ids to decode", given=str(error), expected="non-negative integers") from error

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt text for a conversation; `kwargs` (tools, enable_thinking, ...) reach the template.

        Encode the result with add_special_tokens=False. Raises ModelError without a template, InputError.
        """
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            raise ModelError(
                "the model has no chat template",
                given=f"templates {sorted(self.chat_templates)}" if self.chat_templates else None,
                hint="it is a base model: give it a plain prompt, or use the instruct version",
            )
        special = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        variables = {"tools": None, "documents": None, **{key: text for key, text in special.items() if text}, **kwargs}
        return chat.render(
            self.chat_templates[name], messages, add_generation_prompt=add_generation_prompt, **variables
        )

    def stream(self, skip_special_tokens: bool = True) -> DetokenizeStream:
        """A new stream that turns ids into text pieces as they come."""
        return DetokenizeStream(self, skip_special_tokens)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @functools.cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens are bytes written as characters (GPT-2's way), rather than SentencePiece's."""
        decoder = self.backend.decoder
        return decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"

    def _known_id(self, token: str | None) -> int | None:
        token_id = None if token is None else self.backend.token_to_id(token)
        if token is not None and token_id is None:
            raise ModelError("special token is not in the vocabulary", given=repr(token))
        return token_id


class DetokenizeStream:
    """Text pieces for one sequence: `feed` every new id, then `finish`; the pieces join to `decode(all ids)`.

    Work per token does not grow with the sequence. Byte-level tokens pass through an incremental UTF-8 decoder. With
    SentencePiece's byte tokens a run of them is held until it ends, since one bad byte turns the whole run to U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._context: list[int] = []  # the last id already shown: decoders treat a first token differently
        self._held: list[int] = []

    def feed(self, ids: int | Iterable[int]) -> str:
        """Add one id or several; returns the text that is now certain, often "". Raises InputError."""
        listed = list(ids) if isinstance(ids, Iterable) else [ids]
        if (lowest := min(listed, default=0)) < 0:
            raise InputError("token id", given=lowest, expected="a non-negative integer")
        named = [(i, self._tokenizer.id_to_token(i)) for i in listed if i not in self._skipped]
        known = [(i, token) for i, token in named if token is not None]
        if self._utf8:
            return self._utf8.decode(b"".join([token_bytes(token) for _, token in known]))
        return "".join([self._feed_one(i, token) for i, token in known])

    def finish(self) -> str:
        """The rest: what was held back, with an unfinished character as U+FFFD."""
        return self._utf8.decode(b"", final=True) if self._utf8 else self._flush()

    def _feed_one(self, token_id: int, token: str) -> str:  # of SentencePiece's
        self._held.append(token_id)
        return "" if _BYTE_TOKEN.fullmatch(token) else self._flush()

    def _flush(self) -> str:
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        text = self._tokenizer.decode([*self._context, *self._held], skip_special_tokens=False)
        self._context, self._held = self._held[-1:], []
        return text[len(before) :]


@functools.lru_cache(maxsize=1 << 16)  # the tokens of a text are few, and asked for again and again
def token_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for; a token with any other character is plain text."""
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the 68 others take the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + rank): b for rank, b in enumerate(others)}


def _backend_class() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ModelError("a tokenizer needs the tokenizers package", hint=gguf_file.EXTRA) from error
    return tokenizers.Tokenizer


def _from_folder(folder: Path) -> Tokenizer:
    backend_class = _backend_class()
    file = folder / "tokenizer.json"
    if not file.is_file():
        hint = "load and save it with transformers' AutoTokenizer, which writes tokenizer.json"
        raise ModelError(f"no tokenizer.json in {folder}", hint=hint)
    try:
        backend = backend_class.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception for whatever it cannot parse
        raise ModelError(f"cannot read {file}", given=str(error)) from error
    # Some files carry the limits of a training run; cutting a prompt is the caller's decision.
    backend.no_truncation()
    backend.no_padding()
    config = _optional_json(folder / "tokenizer_config.json")
    generation = _optional_json(folder / "generation_config.json")
    eos_ids = token_ids(generation.get("eos_token_id"), "eos_token_id", folder / "generation_config.json")
    return Tokenizer(
        backend,
        bos_token=_content(config.get("bos_token")),
        eos_token=_content(config.get("eos_token")),
        eos_token_ids=eos_ids,
        chat_templates=_folder_templates(folder, config.get("chat_template")),
        add_bos=config.get("add_bos_token"),
        add_eos=config.get("add_eos_token"),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: str | Mapping[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, Mapping) else token


def _folder_templates(folder: Path, configured: str | list[dict[str, str]] | None) -> dict[str, str]:
    """Named templates; a chat_template.jinja file wins over tokenizer_config.json, as newer savers write it."""
    if isinstance(configured, list):
        templates = {entry["name"]: entry["template"] for entry in configured}
    else:
        templates = {"default": configured} if configured else {}
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates


def _from_gguf(path: Path) -> Tokenizer:
    backend_class = _backend_class()
    from tokenizers import AddedToken, decoders, models

    metadata = gguf_file.open_gguf(path).metadata
    own = {key.removeprefix("tokenizer.ggml."): v for key, v in metadata.items() if key.startswith("tokenizer.ggml.")}
    kind, pre = own.get("model"), own.get("pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"unsupported tokenizer in {path}",
            given=f"model {kind!r}, pre-tokenizer {pre!r}",
            expected=f"byte-level BPE (model 'gpt2') with pre-tokenizer {', '.join(_PRE_TOKENIZERS)}",
            hint="give a folder with tokenizer.json",
        )
    if absent := [key for key in ("tokens", "merges", "token_type") if not isinstance(own.get(key), list)]:
        raise ModelError(f"tokenizer in {path}", given=f"no {', '.join(absent)}", expected="tokens, merges, token_type")
    tokens, types = own["tokens"], own["token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in own["merges"]]
    if len(vocabulary) != len(tokens) or len(types) != len(tokens) or any(len(merge) != 2 for merge in merges):
        given = f"{len(tokens)} tokens, {len(vocabulary)} distinct, {len(types)} types, {len(merges)} merges"
        raise ModelError(f"tokenizer in {path}", given=given, expected="distinct tokens, a type each, merges of two")
    # Llama 3 takes a whole word that is a token as it is, even where the merges would not arrive at it.
    model = models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=pre == "llama-bpe")
    backend = backend_class(model)
    _PRE_TOKENIZERS[pre](backend)
    backend.decoder = decoders.ByteLevel()
    marked = list(zip(tokens, types, strict=True))
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in marked if k == _CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in marked if k == _USER_DEFINED])
    return _gguf_tokenizer(backend, own, metadata, path)


def _gguf_tokenizer(
    backend: tokenizers.Tokenizer, own: Mapping[str, Any], metadata: Mapping[str, Any], path: Path
) -> Tokenizer:
    """Add special tokens and templates. Without a flag, Llama 3 files expect a bos token and the others none."""
    special = {}
    for key in ("bos", "eos", "eot"):
        ids = token_ids(own.get(f"{key}_token_id"), f"{key}_token_id", path)
        if any(token_id >= len(own["tokens"]) for token_id in ids):
            raise ModelError(f"{key}_token_id in {path}", given=ids[0], expected=f"below {len(own['tokens'])}")
        special[key] = ids
    prefix = "tokenizer.chat_template"
    templates = {key.removeprefix(prefix + "."): text for key, text in metadata.items() if key.startswith(prefix + ".")}
    if prefix in metadata:
        templates["default"] = metadata[prefix]
    return Tokenizer(
        backend,
        bos_token=own["tokens"][special["bos"][0]] if special["bos"] else None,
        eos_token=own["tokens"][special["eos"][0]] if special["eos"] else None,
        eos_token_ids=tuple(dict.fromkeys(special["eos"] + special["eot"])),
        chat_templates=templates,
        add_bos=bool(own.get("add_bos_token", own["pre"] == "llama-bpe")),
        add_eos=bool(own.get("add_eos_token", False)),
    )


def _smollm(backend: tokenizers.Tokenizer) -> None:
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _split_by(numbers: str, backend: tokenizers.Tokenizer) -> None:
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(_SPLIT % numbers), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])


def _qwen2(backend: tokenizers.Tokenizer) -> None:
    from tokenizers import normalizers

    backend.normalizer = normalizers.NFC()
    _split_by(r"\p{N}", backend)


_PRE_TOKENIZERS: dict[str, Callable[[tokenizers.Tokenizer], None]] = {
    "smollm": _smollm,
    "llama-bpe": functools.partial(_split_by, r"\p{N}{1,3}"),
    "qwen2": _qwen2,
}
