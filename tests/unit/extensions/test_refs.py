import sys

import pytest

from hardpoint.errors import ConfigError
from hardpoint.extensions.refs import (
    RefAttributeError,
    RefImportError,
    RefShapeError,
    load_ref,
    loaded_ref,
    parse_ref,
    ref_from_qualname,
    ref_of,
    resolve_obj_by_qualname,
)


class Outer:
    class Inner:
        pass


def test_parse_splits_module_and_nested_name():
    assert parse_ref("a.b:C.D") == ("a.b", "C.D")


@pytest.mark.parametrize("text", ["", "a.b", "a:b:c", ":C", "a:", "a b:C", "a:C()", "a:C.", ".a:C", None, 3])
def test_a_string_of_another_shape_is_refused(text):
    with pytest.raises(RefShapeError) as caught:
        parse_ref(text)
    assert repr(text) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, ConfigError)


def test_load_walks_nested_names():
    assert load_ref(f"{__name__}:Outer.Inner") is Outer.Inner
    assert resolve_obj_by_qualname(f"{__name__}.Outer") is Outer


@pytest.mark.parametrize("load", [load_ref, resolve_obj_by_qualname])
def test_a_missing_module_is_named(load):
    ref = "no_such_package.sub:X" if load is load_ref else "no_such_package.sub.X"
    with pytest.raises(ImportError, match="there is no module 'no_such_package'") as caught:
        load(ref)
    assert isinstance(caught.value, RefImportError)
    assert ref in str(caught.value)


def test_a_missing_attribute_is_named():
    with pytest.raises(AttributeError, match="has no attribute 'Nope'") as caught:
        load_ref("json:decoder.Nope")
    assert isinstance(caught.value, RefAttributeError)


def test_a_missing_dependency_is_told_from_a_missing_module(tmp_path, monkeypatch):
    (tmp_path / "p_needs.py").write_text("import not_installed_at_all\n")
    (tmp_path / "p_raises.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RefImportError, match="'not_installed_at_all' is not installed"):
        load_ref("p_needs:X")
    with pytest.raises(RefImportError, match="raised RuntimeError: broken"):
        load_ref("p_raises:X")


@pytest.mark.parametrize("text", ["Class", "", ".Class", "a.", None])
def test_a_class_path_needs_a_module(text):
    with pytest.raises(ValueError, match="is not a class path"):
        resolve_obj_by_qualname(text)


def test_class_path_becomes_a_reference():
    assert ref_from_qualname("a.b.C") == "a.b:C"


def test_loaded_ref_imports_nothing():
    assert "tabnanny" not in sys.modules
    assert loaded_ref("tabnanny:rgb_to_hls") is None
    assert "tabnanny" not in sys.modules
    assert loaded_ref(f"{__name__}:Outer") is Outer


def test_ref_of_names_what_another_process_can_import():
    assert load_ref(ref_of(Outer.Inner)) is Outer.Inner


def test_ref_of_refuses_what_another_process_cannot_import(monkeypatch):
    class Local:
        pass

    with pytest.raises(RefShapeError, match="a function"):
        ref_of(Local)
    monkeypatch.setattr(Outer, "__module__", "__main__")
    with pytest.raises(RefShapeError, match="the start script"):
        ref_of(Outer)
    with pytest.raises(RefShapeError):
        ref_of(3)
