"""Kernels compiled for GPUs that are not there, in a process of their own.

Interpreted and compiled kernels cannot live in one process, so every call starts a fresh one
with ``TRITON_INTERPRET=0``, which compiles one kernel after the other.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True)
class KernelUse:
    """A kernel in one of the ways it is compiled.

    Attributes:
        name: What it is called here.
        where: Its module and name, "package.module:function".
        signature: Types of its parameters: ``*i32``, ``*i64``, ``i32``.
        constexprs: Values of its compile-time parameters.
        architectures: Compute capabilities, 90 for sm_90.
    """

    name: str
    where: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, int] = field(default_factory=dict)
    architectures: tuple[int, ...] = ARCHITECTURES


def compile_resources(uses: Iterable[KernelUse]) -> dict[str, list[Resources]]:
    """Compile kernels in one process; return what each uses, by architecture."""
    answer = run_compiled("tests.support.compiled", json.dumps([asdict(use) for use in uses]))
    found = json.loads(answer)
    return {name: [Resources(**fields) for fields in each] for name, each in found.items()}


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


def _compile(use: KernelUse) -> list[Resources]:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = use.where.split(":")
    kernel = getattr(importlib.import_module(module), name)
    constants = dict.fromkeys(use.constexprs, "constexpr")
    found = []
    for architecture in use.architectures:
        source = ASTSource(kernel, {**use.signature, **constants}, use.constexprs)
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
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
    asked = [KernelUse(**fields) for fields in json.loads(sys.argv[1])]
    print(json.dumps({use.name: [asdict(found) for found in _compile(use)] for use in asked}))
