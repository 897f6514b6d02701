"""Puts transformers' own model checks, of the installed version, beside it as the package `transformers_tests`.

    python tools/upstream_tests.py            of the installed version
    python tools/upstream_tests.py 5.23.0     of this one, while it is being installed

The wheel lacks them, the source distribution has those that all models share. Does nothing the second time.
"""

import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

FILES = ("test_modeling_common.py", "test_training_mixin.py")


def main() -> None:
    """Install them."""
    version = sys.argv[1] if len(sys.argv) > 1 else metadata.version("transformers")
    target = Path(sysconfig.get_path("purelib")) / "transformers_tests"
    stamp = target / "__init__.py"
    text = f'"""Checks of transformers {version}, from its source distribution."""\n'
    if stamp.is_file() and stamp.read_text() == text:
        return
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--no-binary=transformers", f"transformers=={version}"], cwd=folder, check=True)
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            for name in FILES:
                member = archive.extractfile(f"transformers-{version}/tests/{name}")
                assert member is not None
                (target / name).write_bytes(member.read())
    stamp.write_text(text)


if __name__ == "__main__":
    main()
