"""The managers' interface, which plugins know from vLLM."""

from __future__ import annotations

import pytest

from hardpoint.contracts.reasoning_parser import ReasoningParser
from hardpoint.contracts.tool_parser import ToolParser
from hardpoint.extensions.builtins import BUILTINS
from hardpoint.extensions.parser_managers import ReasoningParserManager, ToolParserManager
from hardpoint.extensions.registry import isolated, registry


class Tools(ToolParser):
    pass


class Thoughts(ReasoningParser):
    pass


BOTH = pytest.mark.parametrize(
    ("manager", "cls", "get", "view"),
    [
        (ToolParserManager, Tools, ToolParserManager.get_tool_parser, "tool_parsers"),
        (ReasoningParserManager, Thoughts, ReasoningParserManager.get_reasoning_parser, "reasoning_parsers"),
    ],
)


@pytest.fixture(autouse=True)
def undone():
    with isolated():
        yield


@BOTH
def test_as_a_decorator_and_as_a_call(manager, cls, get, view):
    assert manager.register_module("one")(cls) is cls
    assert manager.register_module(["two", "three"], module=cls) is cls
    manager.register_module()(cls)
    assert {get(name) for name in ("one", "two", "three", cls.__name__)} == {cls}
    assert {"one", "two", "three"} < set(manager.list_registered())
    assert manager.list_registered() == sorted(manager.list_registered())


@BOTH
def test_the_last_one_has_a_name_unless_it_may_not(manager, cls, get, view):
    other = type("Other", (cls,), {})
    manager.register_module("x", module=cls)
    manager.register_module("x")(other)
    assert get("x") is other
    manager.register_lazy_module("x", __name__, cls.__name__)
    assert get("x").__name__ == cls.__name__
    with pytest.raises(KeyError, match="taken"):
        manager.register_module("x", force=False, module=other)
    with pytest.raises(KeyError, match="taken"):
        manager.register_module("x", force=False)(other)


@BOTH
def test_what_is_wrong_is_an_error_at_once(manager, cls, get, view):
    with pytest.raises(TypeError, match="force"):
        manager.register_module("x", force="yes", module=cls)
    with pytest.raises(TypeError, match="name"):
        manager.register_module(3, module=cls)
    with pytest.raises(TypeError, match="does not derive"):
        manager.register_module("x", module=dict)
    with pytest.raises(TypeError, match="does not derive"):
        manager.register_module("x")(dict)
    with pytest.raises(
        KeyError, match="did you mean.*hermes" if manager is ToolParserManager else "did you mean.*qwen3"
    ):
        get("hermess" if manager is ToolParserManager else "qwen4")


@BOTH
def test_lazy_ones_are_imported_when_they_are_asked_for(manager, cls, get, view):
    manager.register_lazy_module("x", "no.such.module", "Parser")
    manager.register_lazy_module("y", "collections", "OrderedDict")
    assert manager.lazy_parsers["x"] == ("no.such.module", "Parser")
    assert "x" in manager.list_registered()
    with pytest.raises(ImportError, match=r"no\.such\.module"):
        get("x")
    with pytest.raises(TypeError, match="does not derive"):
        get("y")


@BOTH
def test_the_dictionaries_are_live(manager, cls, get, view):
    everything = getattr(manager, view)
    assert set(everything) == set(BUILTINS[view])
    everything["x"] = cls
    assert get("x") is cls
    assert "x" not in manager.lazy_parsers
    assert everything.pop("x") is cls
    assert everything.pop("x", None) is None
    manager.lazy_parsers["y"] = (__name__, cls.__name__)
    assert registry(view).entry("y").ref == f"{__name__}:{cls.__name__}"
    del manager.lazy_parsers["y"]
    assert "y" not in manager.list_registered()
    with pytest.raises(KeyError):
        del manager.lazy_parsers["y"]
