"""Sentence encoders (BERT family) from a Hugging Face folder, served from buckets: text in, unit vectors out.

The model is transformers' own, so this needs the `encoder` extra. It shows what any module takes to run from buckets:
a bucket set and `BucketManager(module, set)`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bucketgraph.config import BucketSet, load
from bucketgraph.errors import ConfigError, InputError, ModelError
from bucketgraph.manager import BucketManager, device_of
from bucketgraph.stats import Stats
from bucketgraph.warmup import Progress, WarmupReport

DEFAULT_SET = "minilm"


def load_encoder(folder: str | os.PathLike[str], device: torch.device | str | None = None) -> torch.nn.Module:
    """transformers' encoder from a local folder, in eval mode. Raises ModelError."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelError("not an encoder's folder", given=str(path), expected="config.json and model.safetensors in it")
    if not list(path.glob("*.safetensors")):
        raise ModelError("no safetensors weights", given=str(path), hint="save with safe_serialization=True")
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise ModelError("an encoder needs transformers", hint='pip install "bucketgraph[encoder]"') from error
    try:
        module: torch.nn.Module = AutoModel.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{path}: cannot be loaded", given=str(error).splitlines()[0]) from error
    return module.to(device_of(None, device)).eval()


class Encoder:
    """Embeds texts: tokenise, run from buckets, mean over real tokens, normalise.

    Args:
        model: a local folder with config.json, model.safetensors and tokenizer.json, or `package:NAME/folder`.
        buckets: a bucket set with inputs input_ids and attention_mask; None takes the ready set for MiniLM.

    Raises:
        ModelError, ConfigError: nothing was loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        buckets: BucketSet | str | os.PathLike[str] = DEFAULT_SET,
        *,
        device: torch.device | str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        from bucketgraph.llm.model_config import resolve_model

        bucket_set = buckets if isinstance(buckets, BucketSet) else load(os.fspath(buckets))
        if set(bucket_set.inputs) != {"input_ids", "attention_mask"} or "tokens" not in bucket_set.axes:
            what = f"{bucket_set.source}: an encoder's set has an axis `tokens` and inputs input_ids and attention_mask"
            raise ConfigError(what)
        reference = model if model is not None else bucket_set.model
        if reference is None:
            raise ModelError("no model was named", hint="give one, or set `model` in the bucket set")
        folder = resolve_model(os.fspath(reference))
        self._tokenizer = _tokenizer(folder)
        self.manager = BucketManager(load_encoder(folder, device), bucket_set)
        self._longest = self.manager.lattice.axes[self.manager.lattice.names.index("tokens")].largest
        self.report: WarmupReport = self.manager.warmup(on_progress)

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors `[len(texts), hidden]` float32 on the CPU. A text over the largest bucket is cut, as the model's
        own pipeline cuts at its maximum. Raises InputError for an empty list or something that is not text.
        """
        listed = texts if isinstance(texts, Sequence) and not isinstance(texts, str) else []
        if not listed or not all(isinstance(text, str) for text in listed):
            raise InputError("texts to embed", given=_short(texts), expected="a list of strings, not empty")
        requests = []
        for encoding in self._tokenizer.encode_batch(list(listed)):
            ids = torch.tensor(encoding.ids, dtype=torch.int64)
            if len(ids) > self._longest:  # keep the closing token
                ids = torch.cat([ids[: self._longest - 1], ids[-1:]])
            requests.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        states = [result["last_hidden_state"] for result in self.manager.run_batch(requests)]
        return F.normalize(torch.stack([state.float().mean(dim=0) for state in states]), dim=-1).cpu()

    def stats(self) -> Stats:
        return self.manager.stats()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _tokenizer(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ModelError("a tokenizer needs the tokenizers package", hint='pip install "bucketgraph[llm]"') from error
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError("no tokenizer.json", given=str(folder))
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
