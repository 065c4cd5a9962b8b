"""What passes between pipeline stages in a step: the hidden states, from each stage to the next."""

from __future__ import annotations

from typing import Any

from hardpoint.contracts.model import IntermediateTensors
from hardpoint.worker.distributed.parallel_state import get_pp_group


def run_stage(model: Any, **inputs: Any) -> Any:
    """Run this stage's part of a model: hidden states [tokens, hidden], or None when the next stage goes on.

    All ranks of a pipeline must come here in the same order of steps.
    """
    group = get_pp_group()
    if not group.is_first_rank:
        inputs["intermediate_tensors"] = IntermediateTensors(group.recv_tensor_dict())
    result = model(**inputs)
    if not isinstance(result, IntermediateTensors):
        return result
    group.send_tensor_dict(result.tensors)
    return None
