"""Run the commands of the pages and write what they print into the pages.

python -m docs.refresh              all pages
python -m docs.refresh tutorial.md  one page
"""

import argparse
import re
import tempfile
from pathlib import Path

from docs.examples import PAGES, Workplace, blocks, commands, machine, page_paths

_MACHINE = re.compile(r"(?<=Outputs of this page: )[^\n]*?(?=\.\n)")


def refreshed(text: str, workplace: Workplace) -> str:
    """The page's text with the outputs of its commands as they are now."""
    parts, end = [], 0
    for block in blocks(text):
        if block.title is not None:
            workplace.write(block)
        elif block.language == "python" and block.is_run_here:
            workplace.run_script(block)
        elif block.language == "console" and block.is_run_here:
            body = "".join(
                f"$ {command.text}\n{workplace.run(command.text, fails='fails' in block.classes)}"
                for command in commands(block.body)
            )
            parts += [text[end : block.span[0]], *(f"{block.indent}{line}\n" for line in body.splitlines())]
            end = block.span[1]
    return _MACHINE.sub(machine(), "".join([*parts, text[end:]]))


def refresh(path: Path, workplace: Workplace) -> None:
    """Rewrite a page."""
    text = refreshed(path.read_text(encoding="utf-8"), workplace)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="pages below docs/pages; all where none is named")
    names = parser.parse_args().pages
    for path in [PAGES / name for name in names] or page_paths():
        with tempfile.TemporaryDirectory() as folder:
            refresh(path, Workplace(Path(folder)))
        print(f"refreshed {path.relative_to(PAGES)}")


if __name__ == "__main__":
    main()
