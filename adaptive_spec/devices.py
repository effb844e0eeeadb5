"""Which devices the ops run on here, and what is missing for the others."""

from __future__ import annotations

import torch

from adaptive_spec.extension import ext


def resolve_device(device: torch.device | str) -> torch.device:
    """`device`, checked; "cuda" becomes the current CUDA device, by index.

    Raises:
        ValueError: no such device, or torch or the extension cannot use it; says which.
    """
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"`device` must be 'cpu' or 'cuda[:index]', got {device!r}") from error
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise ValueError(f"`device` must be 'cpu' or 'cuda[:index]', got {str(resolved)!r}")
    missing = _missing_for_cuda()
    if missing is not None:
        raise ValueError(f"`device` is {str(resolved)!r}, but {missing}")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"`device` is {str(resolved)!r}, but there are {torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", index)


def default_device() -> torch.device:
    """The current CUDA device where torch, the extension and the machine have one, else the CPU."""
    return resolve_device("cpu" if _missing_for_cuda() else "cuda")


def _missing_for_cuda() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not ext.build_info["cuda_ops"]:
        return (
            "adaptive_spec_ext is built without CUDA code; build it where nvcc is found "
            "(ADAPTIVE_SPEC_CUDA=1)"
        )
    if torch.cuda.device_count() == 0:
        return "torch finds no CUDA device"
    return None
