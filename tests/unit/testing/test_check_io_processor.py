from __future__ import annotations

import pytest

from hardpoint.contracts.io_processor import IOProcessor
from hardpoint.testing import ContractFailure, check_io_processor


class Good(IOProcessor):
    def parse_data(self, data):
        if not isinstance(data, list):
            raise ValueError("a list is expected")
        return data

    def pre_process(self, prompt, request_id=None, **kwargs):
        return [str(one) for one in prompt]

    def post_process(self, model_output, request_id=None, **kwargs):
        return [float(one.outputs.data[0]) for one in model_output]


def bad(**members):
    return type("Bad", (Good,), members)


def test_good_ones():
    assert check_io_processor(Good) is None
    assert len(check_io_processor(Good, data=[1, 2, 3])) == 3
    assert check_io_processor(Good, data=[1], output_of=lambda i: [i + 7]) == [7.0]


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (dict, "does not derive"),
        (type("Bad", (IOProcessor,), {"pre_process": len, "post_process": len}), "does not implement parse_data"),
        (type("Bad", (IOProcessor,), {"parse_data": len}), "does not implement post_process, pre_process"),
        (bad(parse_data=lambda self, data: data["x"]), "parse_data raises TypeError .* answered with 500"),
        (bad(pre_process=lambda self, data: []), "cannot be called as the host"),
        (bad(pre_process=lambda self, prompt, request_id=None: None), "pre_process gives None"),
        (bad(pre_process=lambda self, prompt, request_id=None: []), "pre_process gives no prompt"),
        (bad(post_process=lambda self, model_output, request_id=None: None), "post_process gives None"),
        (bad(merge_pooling_params=lambda self, params=None: params), r"merge_pooling_params\(\) gives None"),
        (bad(__init__=lambda self, config: None), "cannot be called as the host"),
    ],
)
def test_bad_ones(cls, what):
    with pytest.raises(ContractFailure, match=what):
        check_io_processor(cls, data=[1])
