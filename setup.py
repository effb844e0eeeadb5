"""Builds adaptive_spec_ext._C with CMake and ninja. Everything else is in pyproject.toml.

The module uses LibTorch's stable ABI, so the torch it is compiled against only lends its headers:
any torch from 2.11 on will do, and the binary then runs under all of them. Hence the torch already
installed where the package is going to live is used, also in pip's isolated builds; only where
there is none does the build ask for one.

Environment: ADAPTIVE_SPEC_CUDA = 1 (fail without nvcc), 0 (no CUDA code) or unset (where nvcc is
found); ADAPTIVE_SPEC_TORCH_DIR = folder of a torch package to compile against;
TORCH_CUDA_ARCH_LIST, CUDAARCHS or CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=..." = GPUs to compile
for (cmake/cuda_architectures.cmake).
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
MIN_TORCH = (2, 11)


def find_torch() -> Path | None:
    """The folder of the torch package to compile against. It is not imported."""
    if given := os.environ.get("ADAPTIVE_SPEC_TORCH_DIR"):
        return Path(given)
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    # pip's isolated build hides the environment's packages from sys.path, not from the disk.
    for scheme in ("purelib", "platlib"):
        folder = Path(sysconfig.get_path(scheme)) / "torch"
        if (folder / "__init__.py").exists():
            return folder
    return None


def torch_version(folder: Path) -> str:
    match = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text())
    if match is None:
        raise SystemExit(f"adaptive_spec: no version found in {folder / 'version.py'}")
    version = match[1]
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_TORCH:
        raise SystemExit(
            f"adaptive_spec: needs torch >= {'.'.join(map(str, MIN_TORCH))}, "
            f"found {version} in {folder}"
        )
    return version


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        torch = find_torch()
        if torch is None:
            raise SystemExit("adaptive_spec: no torch to compile against; pip install torch first")
        version = torch_version(torch)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = ROOT / "build" / f"module-{sysconfig.get_config_var('SOABI')}"
        cuda = {"1": "ON", "0": "OFF"}.get(os.environ.get("ADAPTIVE_SPEC_CUDA", ""), "AUTO")
        configure = [
            "cmake",
            f"-S{ROOT}",
            f"-B{build}",
            "-GNinja",
            "-DADAPTIVE_SPEC_MODULE=ON",
            "-DADAPTIVE_SPEC_TESTS=OFF",
            f"-DADAPTIVE_SPEC_CUDA={cuda}",
            f"-DADAPTIVE_SPEC_TORCH_DIR={torch}",
            f"-DADAPTIVE_SPEC_TORCH_VERSION={version}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        # --fresh: an isolated build's compiler paths are gone by the next one.
        subprocess.run([*configure, "--fresh"], check=True)
        subprocess.run(["cmake", "--build", str(build), "--target", "_C"], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(build / target.name), str(target))


setup(
    ext_modules=[Extension("adaptive_spec_ext._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    setup_requires=[] if find_torch() else ["torch>=2.11"],
)
