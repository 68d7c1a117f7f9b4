"""One tree of errors. Each says what was given, what was expected and what to do; none leaves a call half done.

Rules: raise the most specific class; put the numbers of both sides in the text; name file and key if any.
"""

from __future__ import annotations


class BucketGraphError(Exception):
    """Base of every error that bucketgraph raises on purpose.

    The text reads `what: given ..., expected ...; to do`. Parts that do not apply are left out.
    """

    def __init__(self, what: str, *, given: object = None, expected: object = None, hint: str | None = None) -> None:
        sides = []
        if given is not None:
            sides.append(f"given {given}")
        if expected is not None:
            sides.append(f"expected {expected}")
        text = what + (": " + ", ".join(sides) if sides else "") + (f"; {hint}" if hint else "")
        super().__init__(text)


class ConfigError(BucketGraphError, ValueError):
    """A bucket set, a setting or a command line is wrong; nothing was loaded."""


class InputError(BucketGraphError, ValueError):
    """A tensor, prompt or sampling parameter of a call is wrong; nothing was launched."""


class NoBucketError(BucketGraphError, ValueError):
    """No bucket covers the call and the set says `overflow: error`, or what overflows cannot be split."""


class NotWarmError(BucketGraphError, RuntimeError):
    """Something needs a finished `warmup()` and there was none, or the manager was released."""


class CaptureError(BucketGraphError, RuntimeError):
    """A bucket could not be warmed up or captured; the cause is chained."""


class ModelError(BucketGraphError, ValueError):
    """A model folder, weight file or tokenizer is missing, incomplete or of an unsupported kind."""


class StaleError(BucketGraphError, RuntimeError):
    """A tensor that a captured executable reads is not where it was; nothing was launched."""


class DeviceError(BucketGraphError, RuntimeError):
    """The CUDA context is broken, such as by an illegal address: nothing runs in this process any more."""


class NotQuietError(BucketGraphError, RuntimeError):
    """A call compiled, grew memory or synchronised after warm-up, and the set says `quiet: raise`."""
