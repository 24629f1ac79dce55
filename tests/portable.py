"""Tests whose verdict comes from training, bits or tolerances, under other instruction sets and numbers of threads.

`python -m tests.portable` (make test-portable) runs them in every combination and prints a table; `--fast` in two.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FILES = (
    *("tests/suite/test_critic.py", "tests/suite/test_in_process.py", "tests/suite/test_distributed.py"),
    *("tests/suite/test_reference.py", "tests/suite/test_train.py", "tests/suite/test_greedy.py"),
    *("tests/suite/test_policy.py", "tests/suite/test_checkpoint.py", "tests/suite/test_lineage.py"),
    *("tests/suite/test_replies.py", "tests/suite/test_reward_model.py", "tests/suite/test_seed_model.py"),
    *("tests/suite/test_window.py", "tests/suite/test_dynamic_sampling.py", "tests/suite/test_mixture.py"),
    *("tests/suite/objectives", "tests/ablations/test_learning.py"),
)

SETS: dict[str, dict[str, str]] = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "native": {},
}
"""Instruction set -> what tells PyTorch, MKL and oneDNN to use no more than it."""


def run(name: str, threads: int, jobs: int) -> tuple[bool, str]:
    """Whether all passed, and pytest's last line; what failed is printed."""
    environment = {key: value for key, value in os.environ.items() if key not in {k for v in SETS.values() for k in v}}
    environment |= {**SETS[name], "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "loadfile", "--durations=0", *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    print("\n".join(line for line in lines if re.match(r"FAILED|ERROR|E   ", line)), end="")
    return done.returncode == 0, lines[-1].strip("= ") if lines else done.stderr[-500:]


def main() -> int:
    """Run the combinations; 1 if a test failed in any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="two combinations instead of six")
    parser.add_argument("--jobs", type=int, default=2, help="pytest processes side by side")
    given = parser.parse_args()
    combinations = [(name, threads) for name in SETS for threads in (1, 2)]
    chosen = [("default", 1), ("avx2", 2)] if given.fast else combinations
    rows, whole = [], True
    for number, (name, threads) in enumerate(chosen, 1):
        print(f"{number} of {len(chosen)}: {name}, {threads} threads", flush=True)
        start = time.monotonic()
        passed, words = run(name, threads, given.jobs)
        whole &= passed
        rows.append(f"| {name} | {threads} | {words} | {time.monotonic() - start:.0f} |")
    print("\n| instruction set | threads | tests | s |\n|---|---|---|---|", *rows, sep="\n")
    return 0 if whole else 1


if __name__ == "__main__":
    raise SystemExit(main())
