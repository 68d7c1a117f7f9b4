"""Prints, as JSON, how many JIT keys each kernel gets over a sweep of counts: real keys, and neither GPU nor compile.

A process of its own, without the interpreter: a stand-in driver names the target, and launches stop after the key.
"""

import json
from typing import Any

from kernel_cases import COUNTS, forward
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key


class Hopper:
    """The part of a driver that key computation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


KEYS: dict[str, set[str]] = {}


def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    _, key_cache, *_, binder = self.device_caches[0]
    _, specialization, options = binder(*args, debug=False, instrumentation_mode="", **kwargs)
    KEYS.setdefault(self.fn.__name__, set()).add(compute_cache_key(key_cache, specialization, options))


driver.set_active(Hopper())
JITFunction.run = run
for rows, width in COUNTS:
    forward(rows, width, "cpu")
    forward(rows, width, "cpu", odd=True)
print(json.dumps({name: len(keys) for name, keys in KEYS.items()}))
