"""What `adaptive-spec doctor` looks at. Nothing here may fail because something is missing."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

OK, MISSING, BROKEN = "ok", "missing", "broken"

OPS = (
    "verify_tree_greedy",
    "verify_chain_greedy",
    "verify_chain_greedy_from_logits",
    "tree_speculative_sampling_target_only",
    "verify_chain_sampling",
    "update_and_select",
    "build_chain_tree",
)
# What each optional package is for, and the extra that brings it.
OPTIONAL = {
    "safetensors": ("loading model weights", "demo"),
    "tokenizers": ("text to tokens and back", "demo"),
    "matplotlib": ("the demo's picture", "demo"),
    "transformers": ("checking logits in the tests", "test"),
    "hypothesis": ("property tests", "test"),
    "pytest": ("running the tests", "test"),
    "triton": ("Triton kernels on a GPU", None),
    "sglang": ("serving with SGLang", "sglang"),
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``missing`` things are optional, ``broken`` ones are not."""

    name: str
    state: str
    text: str
    cure: str = ""


def examine() -> list[Finding]:
    """Everything, in the order in which one thing needs the other."""
    findings = [_python()]
    torch_finding = _torch()
    findings.append(torch_finding)
    if torch_finding.state == OK:
        findings += [_gpu(), _nvcc()]
        extension = _extension()
        findings.append(extension)
        if extension.state == OK:
            findings.append(_op_registration())
            findings.append(_self_check())
    findings += [_optional(name, *why) for name, why in OPTIONAL.items()]
    findings.append(_tiny_pair())
    return findings


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    version = version_of("adaptive-spec")
    installed = f"adaptive-spec {version}" if version else "adaptive-spec, not installed by pip"
    return Finding(
        "package",
        OK,
        f"{installed}; Python {platform.python_version()}, {os.cpu_count()} CPU cores, "
        f"{platform.machine()}",
    )


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding(
            "torch", BROKEN, f"cannot be imported: {_line(error)}", "pip install 'torch>=2.11'"
        )
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    return Finding("torch", OK, f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding("GPU", OK, ", ".join(names))
    if torch.version.cuda:
        return Finding("GPU", MISSING, "none that this torch can use; everything runs on the CPU")
    return Finding(
        "GPU",
        MISSING,
        "this torch is a CPU build; everything runs on the CPU",
        "on a machine with an NVIDIA GPU, install the CUDA build of torch",
    )


def _nvcc() -> Finding:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home or "", "bin")))
    if nvcc is None:
        return Finding("nvcc", MISSING, "not found; a build here has the CPU ops only")
    try:
        said = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("nvcc", MISSING, f"{nvcc} does not run: {_line(error)}")
    release = next((line for line in said.splitlines() if "release" in line), said.strip())
    return Finding("nvcc", OK, release.strip())


def _extension() -> Finding:
    try:
        extension = importlib.import_module("adaptive_spec_ext")
    except ImportError as error:
        cure = "run `make build` or `pip install -e .` in the repository; needs a C++20 compiler"
        return Finding("extension", BROKEN, f"adaptive_spec_ext: {_line(error)}", cure)
    info = extension.build_info
    cuda = (
        f"nvcc {info['nvcc_version']} for sm {info['cuda_architectures']}"
        if info["cuda_ops"]
        else "CPU ops only"
    )
    text = f"built by {info['compiler']} against torch {info['torch_version']}, {cuda}"
    return Finding("extension", OK, text)


def _op_registration() -> Finding:
    import torch

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    backends = [
        backend
        for backend in ("CPU", "CUDA", "Meta")
        if all(has(f"adaptive_spec::{op}", backend) for op in OPS if _is_registered(op))
    ]
    absent = [op for op in OPS if not _is_registered(op)]
    if absent:
        return Finding("ops", BROKEN, f"not registered: {', '.join(absent)}", "build again")
    return Finding("ops", OK, f"{len(OPS)} registered with torch for {', '.join(backends)}")


def _is_registered(op: str) -> bool:
    import torch

    return hasattr(torch.ops.adaptive_spec, op)


def _self_check() -> Finding:
    import torch

    from adaptive_spec.cli.self_check import check_ops
    from adaptive_spec.devices import default_device

    devices = dict.fromkeys([torch.device("cpu"), default_device()])
    try:
        num_calls = sum(check_ops(device) for device in devices)
    # Whatever goes wrong in here is the finding.
    except Exception as error:
        return Finding("self-check", BROKEN, _line(error), "build again, or report this")
    where = " and ".join(map(str, devices))
    return Finding(
        "self-check", OK, f"{num_calls} calls of the ops on {where} equal their references"
    )


def _optional(package: str, use: str, extra: str | None) -> Finding:
    version = version_of(package)
    if version is not None:
        return Finding(package, OK, version)
    cure = f"pip install 'adaptive-spec[{extra}]'" if extra else f"pip install {package}"
    return Finding(package, MISSING, f"not installed; for {use}", cure)


def _tiny_pair() -> Finding:
    from adaptive_spec.demo.pair import TINY_PAIR

    files = ("tokenizer.json", "prompts.json", *(f"{m}/{f}" for m in MODELS for f in MODEL_FILES))
    absent = [name for name in files if not (TINY_PAIR / name).is_file()]
    if absent:
        return Finding(
            "tiny pair",
            MISSING,
            f"lacks {', '.join(absent)}; demo and generate need --model DIR",
            "check that the repository is complete, or run examples/train_tiny_pair.py",
        )
    size = sum((TINY_PAIR / name).stat().st_size for name in files)
    return Finding("tiny pair", OK, f"found, {size / 1e6:.1f} MB")


MODELS = ("target", "draft")
MODEL_FILES = ("config.json", "model.safetensors")


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
