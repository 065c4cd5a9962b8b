from __future__ import annotations

import pytest
from example_plugins import load_example

from hardpoint.contracts.request_hook import RequestHook, TextFilter
from hardpoint.testing import ContractFailure, check_request_hook


def test_the_example_and_a_hook_that_does_nothing():
    check_request_hook(load_example("request_hooks").AcmeRequestHook)
    check_request_hook(RequestHook)


class Upper(TextFilter):
    def feed(self, text):
        return text.title()

    def finish(self):
        return ""


class CutsMatter(RequestHook):
    def text_filter(self, request, choice, channel):
        return Upper()


class NotAsync(RequestHook):
    def before_admission(self, request):
        return None


class Raises(RequestHook):
    async def before_admission(self, request):
        request.body["prompt"].upper()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (CutsMatter, "when it is cut at"),
        (NotAsync, "not a coroutine"),
        (Raises, "KeyError|AttributeError"),
        (int, "derive"),
    ],
)
def test_what_breaks_the_contract_is_said(kind, said):
    with pytest.raises(ContractFailure, match=said):
        check_request_hook(kind)
