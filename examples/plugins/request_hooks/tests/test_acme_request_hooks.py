import asyncio
from pathlib import Path

import pytest
from acme_request_hooks import FORBIDDEN, AcmeRequestHook, HideAddresses

from hardpoint.contracts.request_hook import HookedRequest, RequestRefused
from hardpoint.testing import check_project, check_request_hook, tiny_vllm_config

PROJECT = Path(__file__).parent.parent
TEXT = "Write to ann.lee@mail.example.org, or to bob@x.io"


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_request_hooks": AcmeRequestHook}


def test_it_keeps_the_contract():
    check_request_hook(AcmeRequestHook, texts=[TEXT])


def test_it_refuses_what_is_forbidden():
    hook = AcmeRequestHook(tiny_vllm_config())
    for body, refused in (({"prompt": "hello"}, False), ({"messages": [{"content": FORBIDDEN}]}, True)):
        request = HookedRequest("/v1/completions", body, {})
        if refused:
            with pytest.raises(RequestRefused):
                asyncio.run(hook.before_admission(request))
        else:
            asyncio.run(hook.before_admission(request))


@pytest.mark.parametrize("cut", range(len(TEXT)))
def test_addresses_are_hidden_wherever_the_text_is_cut(cut):
    one = HideAddresses()
    sent = one.feed(TEXT[:cut]) + one.feed(TEXT[cut:]) + one.finish()
    assert sent == "Write to [address], or to [address]"


def test_other_words_flow():
    one = HideAddresses()
    assert one.feed("a text and ") == "a text and "
