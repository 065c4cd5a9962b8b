import asyncio

import pytest

from hardpoint.contracts.lora_resolver import LoRAResolver


def test_one_method_is_enough():
    class Mine(LoRAResolver):
        async def resolve_lora(self, base_model_name, lora_name):
            return None

    assert asyncio.run(Mine().resolve_lora("base", "name")) is None
    with pytest.raises(TypeError, match="abstract"):
        LoRAResolver()
