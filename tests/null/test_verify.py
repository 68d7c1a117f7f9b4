"""`scripts/verify.py` at its smallest, so that it cannot rot: each check is green, and some faults turn theirs red."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("verify", "seeded_faults")
FEW = {"shipped_sets": 1, "soak": 1, "quiet": 1, "threads": 1, "warm_up": 1, "capture_failure": 4, "tampered": 5}
FAULTS = ("tail-not-reset", "duplicate-key", "page-leaked", "rope-restarts")


@pytest.fixture(scope="module")
def main() -> Iterator[ModuleType]:
    """The script itself; its package has the same name, so it is loaded by its path."""
    threads, log = torch.get_num_threads(), logging.getLogger("bucketgraph")
    level = log.level
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("verify_script", ROOT / "scripts" / "verify.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "scripts"))
    torch.set_num_threads(threads)
    log.setLevel(level)
    for name in [name for name in sys.modules if name.split(".")[0] in NAMES]:
        del sys.modules[name]


def test_each_check_is_green_on_a_few_small_cases(main: ModuleType) -> None:
    setting = main.Setting(torch.device("cpu"), small=True)
    for check in main.CHECKS:
        if not check.unable(setting) and not check.environment and not check.name.endswith("_faults"):
            result = main.run(check, setting, range(FEW.get(check.name, 2)), None, print)
            assert (result.run, result.failures) == (FEW.get(check.name, 2) * check.unit, 0), result


def test_what_needs_a_gpu_says_so(main: ModuleType) -> None:
    setting = main.Setting(torch.device("cpu"))
    checks = [check for check in main.CHECKS if check.unable(setting)]
    assert {"graph_equals_eager", "sanitizer"} <= {check.name for check in checks}
    for result in main.run_all(checks, setting, None, 0, None):
        assert result.run == 0 and result.not_run and result.bound is None


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_turns_its_guard_red(main: ModuleType, name: str) -> None:
    import seeded_faults

    fault = next(fault for fault in seeded_faults.FAULTS if fault.id == name)
    assert seeded_faults.red(fault.guard, fault.cases) is None
    said = seeded_faults.caught(fault)
    assert said is not None and "out of date" not in said


def test_the_published_list_is_the_list(main: ModuleType) -> None:
    import seeded_faults

    assert len(seeded_faults.FAULTS) + len(seeded_faults.KERNEL_FAULTS) >= 22
    assert seeded_faults.table() in (ROOT / "docs" / "seeded-faults.md").read_text(encoding="utf-8")
    for fault in seeded_faults.KERNEL_FAULTS:
        assert fault.old in (ROOT / "triton_kernels" / f"{fault.file}.py").read_text(encoding="utf-8"), fault.id
    ids = [fault.id for fault in (*seeded_faults.FAULTS, *seeded_faults.KERNEL_FAULTS)]
    assert len(set(ids)) == len(ids)


def test_a_failure_is_written_down_with_the_command_that_repeats_it(
    main: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def prepare(setting: object) -> object:
        def trial(seed: int) -> None:
            assert seed != 8, "eight is wrong"

        return trial

    pad_rules = next(check for check in main.CHECKS if check.name == "pad_rules")
    monkeypatch.setattr(main, "CHECKS", (replace(pad_rules, prepare=prepare, count=10, cpu=1.0, workers=0),))
    monkeypatch.setenv("BUCKETGRAPH_COMMIT", "0123abc")
    arguments = ["--device", "cpu", "--only", "pad_rules", "--seed", "3"]
    assert main.main([*arguments, "--json", str(tmp_path / "r.json")]) == 1
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ok"] is False and report["commit"] == "0123abc" and report["device"] == "cpu"
    (check,) = report["checks"]
    assert (check["asked"], check["run"], check["failures"], check["failing_seeds"]) == (10, 10, 1, [8])
    assert check["bound_95"] is None and "eight is wrong" in check["first"]
    assert "--case pad_rules:8" in capsys.readouterr().out
    assert main.main(["--device", "cpu", "--case", "pad_rules:8"]) == 1
    assert main.main(["--device", "cpu", "--case", "pad_rules:9"]) == 0
    assert main.main(["--device", "cpu", "--only", "pad_rules", "--seed", "20"]) == 0


def test_minutes_end_a_check_early_and_what_ran_is_written(main: ModuleType) -> None:
    check = next(check for check in main.CHECKS if check.name == "pad_rules")
    (result,) = main.run_all([replace(check, workers=0)], main.Setting(torch.device("cpu")), 0.25, 0, 1e-6)
    assert result.run == 500 and result.asked == 5_000 and result.failures == 0, "a tenth is run in any case"
    assert result.bound == 3 / result.run
