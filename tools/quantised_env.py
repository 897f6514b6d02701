"""Makes the environment of `make test-quantised`: the libraries that quantise, over the packages of this Python.

    .venv/bin/python tools/quantised_env.py [FOLDER]    .venv-quantised unless FOLDER says otherwise

They come without what they ask for: their wheels name another torch, or an older transformers than the tested one.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

LIBRARIES = (
    "torchao==0.18.0",
    "bitsandbytes==0.50.2",
    "llmcompressor==0.14.0.1",
    "compressed-tensors==0.19.0",
    "auto-round==0.16.1",
    "loguru==0.7.3",
    "nvidia-ml-py==13.615.71",
)


def main(folder: Path) -> None:
    """Make the environment in `folder`, unless it is there."""
    stamp, wanted = folder / ".installed", "\n".join(LIBRARIES)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    venv.create(folder, with_pip=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "beneath.pth").write_text(sysconfig.get_path("purelib"))
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    subprocess.run([*pip, *LIBRARIES], check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv-quantised"))
