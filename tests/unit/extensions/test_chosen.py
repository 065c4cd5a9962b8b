import pytest

from hardpoint.errors import ConfigError
from hardpoint.extensions.chosen import check_choice, require_built_hook
from hardpoint.extensions.points import CONFIG_HOOKS
from hardpoint.extensions.registry import PlannedError
from hardpoint.extensions.rows import State


@pytest.mark.parametrize("row", CONFIG_HOOKS, ids=lambda row: row.key)
def test_a_planned_hook_is_refused_by_name(row):
    if row.state is State.BUILT:
        assert require_built_hook(row.key, "x") is row
        return
    with pytest.raises(PlannedError, match="was chosen") as caught:
        check_choice(row.key, "some.module")
    assert row.flag in str(caught.value)


def test_each_form_is_imported_as_its_row_says():
    assert check_choice("worker_cls", "fractions.Fraction").__name__ == "Fraction"
    assert check_choice("worker_cls", "auto") == "auto"
    assert check_choice("executor_class", "uni") == "uni"
    assert check_choice("model_class_overrides", '{"A": "fractions:Fraction"}')["A"].__name__ == "Fraction"
    assert check_choice("additional_config", '{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("worker_cls", "nodots", ValueError),
        ("scheduler_cls", "fractions.Nope", AttributeError),
        ("worker_extension_cls", "not_there.X", ImportError),
        ("logits_processors", "fractions:Fraction", ValueError),
        ("model_class_overrides", "[]", ConfigError),
        ("additional_config", "{", ConfigError),
    ],
)
def test_what_cannot_be_used_is_refused(key, value, error):
    with pytest.raises(error):
        check_choice(key, value)
