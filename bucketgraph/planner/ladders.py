"""The default ladders of public engines, as their sources define them, for comparison on one's own trace.

Rules: a ladder is a pure function of its maximum and names the file it was read from. What is over its largest size
runs eagerly and unpadded in all three engines, unless it was cut into pieces before (`--largest`), so waste alone says
little: the covered share stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bucketgraph.buckets import ladder

_SGLANG = "sgl-project/sglang@019667ad python/sglang/srt/arg_groups/cuda_graph_hook.py"


@dataclass(frozen=True)
class PeerLadder:
    """Sizes that an engine captures by default for a forward pass over `tokens`."""

    name: str
    sizes: tuple[int, ...]
    source: str

    def upto(self, largest: int) -> PeerLadder:
        """Without the sizes that no request can reach: those after the first that covers `largest`."""
        covering = next((place for place, size in enumerate(self.sizes) if size >= largest), len(self.sizes) - 1)
        return PeerLadder(self.name, self.sizes[: covering + 1], self.source)


def powers_of_two(largest: int, start: int = 16) -> PeerLadder:
    """Doubling from `start`; the last size is `largest` itself, as a bucket set's maximum always is a bucket."""
    first = min(start, largest)
    return PeerLadder("powers of two", ladder(first, largest, 2.0), "common practice; bucketgraph/buckets.py `ladder`")


def vllm(largest: int = 512) -> PeerLadder:
    """`cudagraph_capture_sizes` where nothing is set: up to min(2 * max_num_seqs, 512), 1024 on data-centre Blackwell.

    In tokens of a step, prefill and decode alike.
    """
    sizes = [size for size in (1, 2, 4) if size <= largest]
    sizes += [*range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]
    return PeerLadder("vLLM", tuple(sizes), "vllm-project/vllm@000fc94b vllm/config/vllm.py `_set_cudagraph_sizes`")


def sglang(largest: int = 8192) -> PeerLadder:
    """Prefill token counts up to `cuda_graph_max_bs_prefill`.

    8192 is the default size of prefill chunks on GPUs of 60 to 160 GiB, so there longer prompts come in pieces of it.
    """
    steps = [(4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256), (4608, largest, 512)]
    sizes = [size for start, end, step in steps for size in range(start, end + 1, step) if size <= largest]
    return PeerLadder("SGLang", tuple(sizes), f"{_SGLANG} `generate_prefill_cuda_graph_batch_sizes`")


def sglang_decode(largest: int = 256) -> PeerLadder:
    """Decode batch sizes without speculation; 256 is the default maximum on GPUs of 60 to 160 GiB."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, largest + 1, 32)]
    sizes = sorted({*(size for size in sizes if size <= largest), largest})
    return PeerLadder("SGLang", tuple(sizes), f"{_SGLANG} `generate_decode_cuda_graph_batch_sizes`")


def tensorrt_llm(largest: int = 3072) -> PeerLadder:
    """`capture_num_tokens` of the piecewise graphs where nothing is set."""
    sizes = [size for size in (*(2**power for power in range(8)), *range(256, 3073, 256)) if size <= largest]
    source = "NVIDIA/TensorRT-LLM@14e6b10f docs/source/features/torch_compile_and_piecewise_cuda_graph.md"
    return PeerLadder("TensorRT-LLM", tuple(sizes), source)


def tensorrt_llm_decode() -> PeerLadder:
    """Decode batch sizes with `enable_padding` and the default `max_batch_size` of 128."""
    source = "NVIDIA/TensorRT-LLM@fcd3f316 tensorrt_llm/llmapi/llm_args.py `_generate_cuda_graph_batch_sizes`"
    return PeerLadder("TensorRT-LLM", (1, 2, 4, *range(8, 129, 8)), source)


def peers(largest: int, start: int, decode: bool = False) -> list[PeerLadder]:
    """The four ladders, without sizes that no request up to `largest` reaches; `start` is the first power of two."""
    engines = (vllm(), sglang_decode(), tensorrt_llm_decode()) if decode else (vllm(), sglang(), tensorrt_llm())
    return [powers_of_two(largest, start), *(each.upto(largest) for each in engines)]


def grid_of_powers(largest: tuple[int, int], start: tuple[int, int]) -> list[tuple[int, int]]:
    """Every combination of the powers of two of both axes."""
    first, second = (ladder(min(low, high), high, 2.0) for low, high in zip(start, largest, strict=True))
    return [(one, two) for one in first for two in second]
