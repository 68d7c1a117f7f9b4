"""The Triton kernels under the names and signatures of `reference`."""

from .advance import advance
from .decode_attention import decode_attention
from .matmul import linear
from .pdl import pdl_supported
from .prefill_attention import prefill_attention
from .rms_norm import rms_norm
from .rope import rope_and_write
from .sampling import sample
from .skinny import linear_add, norm_gate_up, norm_linear
from .streamed import available as streamed_available
from .swiglu import swiglu
from .tiled import supported as tiled_supported

__all__ = [
    "advance",
    "decode_attention",
    "linear",
    "linear_add",
    "norm_gate_up",
    "norm_linear",
    "pdl_supported",
    "prefill_attention",
    "rms_norm",
    "rope_and_write",
    "sample",
    "streamed_available",
    "swiglu",
    "tiled_supported",
]
