"""The pages on plugins: their Python runs and they name what there is. The links of every page lead somewhere."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import hardpoint
from hardpoint import testing
from hardpoint.extensions.plugin_config import get_plugin_config, setting_flags

DOCS = Path(hardpoint.__file__).parents[2] / "docs"
WRITING = DOCS / "plugins" / "writing-plugins.md"
PAGES = [*sorted(DOCS.parent.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted(DOCS.parent.glob("examples/*/*/*.md"))]
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.fixture
def page(isolated_registries):
    """The namespace of the page, its blocks run in order."""
    namespace = {"__name__": "writing_plugins"}
    for block in BLOCK.findall(WRITING.read_text()):
        exec(compile(block, str(WRITING), "exec", dont_inherit=True), namespace)
    return namespace


def test_what_the_page_shows_works(page, capsys):
    page["register"]()
    assert capsys.readouterr().out == "0.5\n"
    assert isinstance(get_plugin_config("my_plugin"), page["Settings"])
    assert [flag.flag for flag in setting_flags()] == [
        "--my-plugin-threshold",
        "--my-plugin-names",
        "--my-plugin-label",
    ]
    page["test_it_keeps_the_contract"]()


def test_the_server_it_shows_answers(page, hardpoint_server, make_plugin):
    page["test_my_route_answers"](hardpoint_server, make_plugin)


def test_it_names_every_suite_and_fixture():
    text = WRITING.read_text()
    suites = {name for name in testing.__all__ if name.startswith("check_")} - {"check_model_class"}
    assert {name for name in suites if name not in text} == set()
    from hardpoint.testing import pytest_plugin

    fixtures = [
        name for name, value in vars(pytest_plugin).items() if type(value).__name__ == "FixtureFunctionDefinition"
    ]
    assert fixtures, "pytest has another name for a fixture"
    assert {name for name in fixtures if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS.parent)))
def test_links_lead_somewhere(path):
    for target, anchor in LINK.findall(FENCED.sub("", path.read_text())):
        if target.startswith("http"):
            continue
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings}, anchor


def test_every_suite_says_what_it_does():
    for name in testing.__all__:
        if name.startswith("check_"):
            assert inspect.getdoc(getattr(testing, name))
