"""Every `vllm serve` of the page is one that vLLM understands."""

import re
import shlex
from pathlib import Path

from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

PAGE = Path(__file__).resolve().parents[3] / "docs" / "pages" / "guide" / "serve.md"


def test_commands() -> None:
    commands = re.findall(r"^ *\$ vllm serve (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(commands) == 3
    parser = make_arg_parser(FlexibleArgumentParser())
    for command in commands:
        model, *options = shlex.split(command)
        assert parser.parse_args([model, *options]).model_tag == model
