"""The tests. Whoever imports them, the ranks that they start too, does without torch's compiler.

An optimizer of torch imports the compiler for two functions that do nothing outside of compiled
code. That takes a second and a half of processor time, and most of the processes that tests start
make an optimizer. So those two are put in its place here. Nothing in the tests compiles a model;
what did so would have to take this out of ``sys.modules`` first.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

_COMPILER = "torch._dynamo"


class _NoCompiler(types.ModuleType):
    @staticmethod
    def graph_break(*_arguments: Any, **_keywords: Any) -> None:
        pass

    @staticmethod
    def disable(function: Any = None, *_arguments: Any, **_keywords: Any) -> Any:
        return function if function is not None else lambda wrapped: wrapped


if importlib.util.find_spec("torch_npu") is None:  # which changes the compiler when it is imported
    sys.modules.setdefault(_COMPILER, _NoCompiler(_COMPILER))
