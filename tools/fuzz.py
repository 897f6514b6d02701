"""Try bad input of every class in numbers, and keep what came of it in tools/fuzz.json.

    python tools/fuzz.py                       # 2,000 cases of each class
    python tools/fuzz.py --only config header  # of these; the others keep their entries

The generators and the judges are those of tests/fuzz, of which the test suite runs 200 cases a class. A fault is
anything but input that was accepted and is right, or a clear error with its exit code; each is printed, and makes this
exit with 1.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.fuzz import places  # noqa: E402
from tests.fuzz.campaign import Tally, campaign  # noqa: E402
from tests.fuzz.classes import CLASSES  # noqa: E402

RESULT = ROOT / "tools" / "fuzz.json"


def main() -> int:
    """Run the classes one after the other; the file is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[kind.name for kind in CLASSES], help="classes to run")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULT.read_text("utf-8")) if RESULT.is_file() else {}
    faults = 0
    with tempfile.TemporaryDirectory() as made:
        places.build(Path(made))
        for kind in CLASSES:
            if given.only and kind.name not in given.only:
                continue
            start = time.process_time()
            tally = campaign(kind, Path(made), given.cases, given.seed)
            found[kind.name] = entry(tally, given.seed, time.process_time() - start)
            RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(f"{kind.name}: {json.dumps(found[kind.name])}", flush=True)
            for reason, case in tally.faults:
                print(f"  {reason}\n    {case}", flush=True)
            faults += len(tally.faults)
    return 1 if faults else 0


def entry(tally: Tally, seed: int, cpu_seconds: float) -> dict[str, Any]:
    """What the file keeps of a class."""
    return {
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("-dirty" if _git("status", "--porcelain", "sse_convert") else ""),
        "command": "python " + " ".join(["tools/fuzz.py", *sys.argv[1:]]),
        "seed": seed,
        "hypothesis": version("hypothesis"),
        "cases": tally.cases,
        "accepted": tally.accepted,
        "refused": {str(code): count for code, count in sorted(tally.refused.items())},
        "faults": len(tally.faults),
        "cpu_seconds": round(cpu_seconds),
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
