"""Two whole traces of real traffic at GLM-5.2's shape, every check on.

Azure's conversations and Mooncake's, from the folder ``BT_DATA`` (``../shared/data``): block 64,
350,000 tokens, two context-parallel ranks, 256 running requests, 3 drafts. A trace or config
that is not there is skipped. The exit code is 1 where a check fails or a trace takes longer
than it may.
"""

import os
import platform
import sys
import time
from pathlib import Path

import torch

from bt_runner.__main__ import main as bt_runner

ROOT = Path(__file__).parents[1]
DATA = ROOT / os.environ.get("BT_DATA", "../shared/data")
CONFIG = DATA / "configs" / "zai-org--GLM-5.2.json"
OPTIONS = "--max-model-len 350000 --block-size 64 --dcp 2 --max-num-seqs 256 --speculative-tokens 3"
MAX_SECONDS = {
    "AzureLLMInferenceTrace_conv.csv": 300,
    "mooncake_conversation_trace.jsonl": 600,
}


def processor() -> str:
    """Name the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def replay(name: str) -> bool:
    """Replay one trace and print its summary; say whether all went as it should."""
    trace = DATA / "traces" / name
    print(f"\n{name}, {OPTIONS}")
    missing = [path for path in (trace, CONFIG) if not path.exists()]
    if missing:
        print(f"skipped: {missing[0]} is missing")
        return True
    began, began_cpu = time.perf_counter(), time.process_time()
    code = bt_runner(["replay", str(trace), "--config", str(CONFIG), *OPTIONS.split()])
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    print(f"took {seconds:.0f} s ({cpu:.0f} s of one core), and may take {MAX_SECONDS[name]} s")
    return code == 0 and seconds <= MAX_SECONDS[name]


def main() -> int:
    """Replay both traces."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        f"{processor()}, {cores} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )
    passed = [replay(name) for name in MAX_SECONDS]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
