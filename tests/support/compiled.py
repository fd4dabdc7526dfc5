"""Kernels compiled for GPUs that are not there, in a process of their own.

Interpreted and compiled kernels cannot live in one process, so every call starts a
fresh one with ``TRITON_INTERPRET=0``. It imports ``module`` and reads from it
``kernel``, and compiles for one architecture after the other.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ARCHITECTURES = (80, 90, 100)
_FIELDS = {"registers": "REG", "stack": "STACK", "local": "LOCAL", "shared": "SHARED"}


@dataclass(frozen=True)
class Resources:
    """What one thread of a compiled kernel uses; bytes but for the registers.

    ``spills`` are the bytes that the assembler stored and loaded for want of registers.
    """

    architecture: int
    registers: int
    stack: int
    local: int
    shared: int
    spills: int


def compile_resources(
    kernel: str,
    signature: Mapping[str, str],
    constexprs: Mapping[str, int],
    architectures: Sequence[int] = ARCHITECTURES,
    *,
    num_warps: int = 4,
) -> list[Resources]:
    """Compile ``kernel`` ("package.module:function") and return what it uses, by architecture.

    Args:
        kernel: Where the kernel is.
        signature: Types by parameter: ``*i32``, ``*i64``, ``i32``, or ``constexpr``.
        constexprs: Values of the constexpr parameters.
        architectures: Compute capabilities, 90 for sm_90.
        num_warps: Warps of a program.
    """
    request = {
        "kernel": kernel,
        "signature": dict(signature),
        "constexprs": dict(constexprs),
        "architectures": list(architectures),
        "num_warps": num_warps,
    }
    answer = run_compiled("tests.support.compiled", json.dumps(request))
    return [Resources(**fields) for fields in json.loads(answer)]


def run_compiled(module: str, *arguments: str) -> str:
    """Run ``python -m module`` with compiled kernels; return what it printed."""
    environment = dict(os.environ)
    environment.update(TRITON_INTERPRET="0", TRITON_DEFAULT_FP_FUSION="1")
    finished = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(f"{module} failed:\n{finished.stderr}")
    return finished.stdout


def _compile(request: Mapping[str, object]) -> list[Resources]:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = str(request["kernel"]).split(":")
    kernel = getattr(importlib.import_module(module), name)
    found = []
    for architecture in request["architectures"]:  # type: ignore[attr-defined]  # from JSON
        source = ASTSource(kernel, request["signature"], request["constexprs"])
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", architecture, 32),
            options={"num_warps": request["num_warps"]},
        )
        found.append(_measure(architecture, compiled.asm["cubin"], compiled.asm["ptx"]))
    return found


def _measure(architecture: int, cubin: bytes, ptx: str) -> Resources:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembler = tools / ("ptxas-blackwell" if architecture >= 90 else "ptxas")
    target = re.search(r"\.target (sm_\w+)", ptx)
    if target is None:
        raise RuntimeError("no target in the PTX")
    with tempfile.TemporaryDirectory() as folder:
        binary, text = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        binary.write_bytes(cubin)
        text.write_text(ptx)
        usage = _run(tools / "cuobjdump", "-res-usage", binary)
        log = _run(assembler, "-v", f"--gpu-name={target[1]}", text, "-o", Path(folder, "out"))
    fields = {field: _number(rf"{label}:(\d+)", usage) for field, label in _FIELDS.items()}
    spills = sum(int(count) for count in re.findall(r"(\d+) bytes spill", log))
    return Resources(architecture=architecture, spills=spills, **fields)


def _run(*command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern} in:\n{text}")
    return int(found[1])


if __name__ == "__main__":
    print(json.dumps([asdict(found) for found in _compile(json.loads(sys.argv[1]))]))
