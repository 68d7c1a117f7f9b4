"""What the JIT would compile over a sweep of counts, asked of the JIT itself in a process without the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

from kernel_cases import VARIANTS


def test_no_count_and_no_metadata_alignment_compiles_anew():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *(p for p in sys.path if p)])
    script = Path(__file__).with_name("jit_keys.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == VARIANTS
