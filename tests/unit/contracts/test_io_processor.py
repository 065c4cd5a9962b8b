import asyncio

import pytest

from hardpoint.contracts.io_processor import IOProcessor
from hardpoint.types.pooling_params import PoolingParams


class Upper(IOProcessor):
    def pre_process(self, prompt, request_id=None, **kwargs):
        return prompt.upper()

    def post_process(self, model_output, request_id=None, **kwargs):
        return list(model_output)


def test_two_methods_are_enough_to_be_built():
    processor = Upper("config", "renderer")
    assert processor.vllm_config == "config"
    with pytest.raises(NotImplementedError, match="Upper does not implement parse_data"):
        processor.parse_data({})
    with pytest.raises(TypeError, match="abstract"):
        IOProcessor("config", "renderer")


def test_params_of_the_request_are_kept():
    given = PoolingParams(task="embed")
    assert Upper(None).merge_pooling_params(given) is given
    assert Upper(None).merge_pooling_params().task == "plugin"


def test_the_async_forms_follow_the_plain_ones_in_the_order_of_the_prompts():
    async def outputs():
        for pair in ((2, "c"), (0, "a"), (1, "b")):
            yield pair

    processor = Upper(None)
    assert asyncio.run(processor.pre_process_async("x")) == "X"
    assert asyncio.run(processor.post_process_async(outputs())) == ["a", "b", "c"]
