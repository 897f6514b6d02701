"""transformers' own checks, which `tools/upstream_tests.py` installs, as a parent class for converted models."""

import sys
from types import ModuleType

import pytest

_ABSENT = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
"""what the checks import and the source distribution leaves out; export and generation have tests of their own here"""

pytest.importorskip("transformers_tests", reason="needs transformers' own tests: python tools/upstream_tests.py")
for _name, _mixin in _ABSENT.items():
    _module = ModuleType(f"transformers_tests.{_name}")
    setattr(_module, _mixin, type(_mixin, (), {}))
    sys.modules[_module.__name__] = _module

from transformers_tests.test_modeling_common import ModelTesterMixin  # noqa: E402

__all__ = ["ModelTesterMixin"]
