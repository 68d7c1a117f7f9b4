"""CUDA C++ to machine code at run time, for the little that Triton cannot say."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bucketgraph.errors import ConfigError


def compiled(source: str, architecture: str) -> bytes:
    """A cubin of CUDA C++ by NVRTC. Raises ConfigError where that library is missing, or refuses the source."""
    try:
        nvrtc = import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the package, or the library behind it
        text = " ".join(str(error).split())[:300]
        raise ConfigError("NVRTC is missing", given=text, hint="pip install nvidia-cuda-nvrtc") from error

    def call(name: str, *args: Any) -> Any:
        error, *out = getattr(nvrtc, name)(*args)
        if int(error) != 0:
            raise ConfigError(f"{name} failed", given=f"{error.name}{log()}")
        return out[0] if out else None

    def log() -> str:
        text = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, text)
        return ": " + " ".join(text.decode(errors="replace").strip("\0 ").split())[:500]

    program = nvrtc.nvrtcCreateProgram(source.encode(), b"bucketgraph.cu", 0, [], [])[1]
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"-default-device"]
        call("nvrtcCompileProgram", program, len(options), options)
        image: bytes = b" " * call("nvrtcGetCUBINSize", program)
        call("nvrtcGetCUBIN", program, image)
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)
