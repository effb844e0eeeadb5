"""Python in a process of its own, where Triton compiles instead of interpreting."""

import os
import subprocess
import sys


def run_compiling(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs this Python with what it can import here, without TRITON_INTERPRET."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )
