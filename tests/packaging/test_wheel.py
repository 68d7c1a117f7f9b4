"""What an install brings: one top-level module, `bucketgraph`, whole, beside another package named `triton_kernels`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE_PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "triton_kernels"
version = "1.0.0"
[tool.setuptools]
packages = ["triton_kernels"]
"""


def run(*command: str | Path, cwd: Path) -> str:
    # The checkout must not be importable from the path, or the test would prove nothing.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def build_wheel(source: Path, out: Path) -> Path:
    run(
        *(sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, source),
        cwd=out.parent,
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, symlinks kept, so that building leaves nothing behind in the tree."""
    copy = tmp_path_factory.mktemp("checkout")
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("bucketgraph", "triton_kernels", "bucket_configs"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=junk)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, copy / file)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and a stand-in for triton-lang's `triton_kernels`; torch is borrowed."""
    place = tmp_path_factory.mktemp("clean")
    fake = place / "fake"
    (fake / "triton_kernels").mkdir(parents=True)
    (fake / "pyproject.toml").write_text(FAKE_PYPROJECT)
    (fake / "triton_kernels" / "__init__.py").write_text("OWNER = 'triton-lang'\n")
    fake_wheel = build_wheel(fake, place / "dist")

    venv.create(place / "env", symlinks=True)
    python = place / "env" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place))
    # Borrowed folders come last on the path, and .pth files inside them do not run: no editable install is seen.
    borrowed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    borrowed += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "zz_borrowed.pth").write_text("\n".join(dict.fromkeys(borrowed)) + "\n")
    run(
        *(sys.executable, "-P", "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-index", "--force-reinstall", wheel, fake_wheel),
        cwd=place,
    )
    return python


def test_the_only_top_level_name_is_bucketgraph(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names_in(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"bucketgraph"}


def test_every_source_config_and_marker_is_in_the_wheel(wheel: Path) -> None:
    package = ROOT / "bucketgraph"
    sources = {path.relative_to(ROOT) for path in package.rglob("*.py")}
    for link, pattern in (("kernels", "*.py"), ("configs", "*.yaml")):  # rglob does not follow symlinks
        found = {Path("bucketgraph", link, path.name) for path in (package / link).glob(pattern)}
        assert found, f"bucketgraph/{link} holds no {pattern}: is the symlink intact?"
        sources |= found
    expected = {path.as_posix() for path in sources} | {"bucketgraph/py.typed"}
    assert expected - names_in(wheel) == set()


def test_a_wheel_made_from_the_sdist_holds_the_same_files(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-P", "-c", code, tmp_path / "sdist", cwd=checkout)
    (sdist,) = (tmp_path / "sdist").glob("*.tar.gz")
    assert names_in(build_wheel(sdist, tmp_path / "dist")) == names_in(wheel)


def test_neither_triton_kernels_shadows_the_other(clean_python: Path, tmp_path: Path) -> None:
    code = """if True:
        import triton_kernels, bucketgraph, bucketgraph.kernels
        modules = triton_kernels, bucketgraph, bucketgraph.kernels
        print(triton_kernels.OWNER, *(module.__file__ for module in modules), sep="\\n")
    """
    owner, fake, package, kernels = run(clean_python, "-c", code, cwd=tmp_path).splitlines()
    site = Path(package).parent.parent
    assert site.is_relative_to(clean_python.parent.parent)
    assert owner == "triton-lang"
    assert Path(fake) == site / "triton_kernels" / "__init__.py"
    assert Path(kernels) == site / "bucketgraph" / "kernels" / "__init__.py"


def test_kernel_twins_and_configs_are_reachable_when_installed(clean_python: Path, tmp_path: Path) -> None:
    code = """if True:
        import importlib.resources, bucketgraph.kernels.reference
        folder = importlib.resources.files("bucketgraph") / "configs"
        print(*sorted(file.name for file in folder.iterdir()))
    """
    installed = run(clean_python, "-c", code, cwd=tmp_path).split()
    assert installed == sorted(path.name for path in (ROOT / "bucket_configs").glob("*.yaml"))


def test_this_checkout_offers_no_top_level_triton_kernels(tmp_path: Path) -> None:
    code = "import importlib.util as u; spec = u.find_spec('triton_kernels'); print(spec and spec.origin)"
    origin = run(sys.executable, "-P", "-c", code, cwd=tmp_path)
    assert not Path(origin).is_relative_to(ROOT), "an editable install must map only `bucketgraph`"
