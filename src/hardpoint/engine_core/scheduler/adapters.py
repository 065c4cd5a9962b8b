"""How many LoRA adapters may be in one step, and who is passed over for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hardpoint.engine_core.request import Request

# Requests that may overtake one whose adapter finds no place; later ones wait behind it, so that it comes to its turn.
PATIENCE = 32


class AdapterPlaces:
    """Decides, while a step is planned, whether a waiting request's adapter finds a place among `most`.

    most  adapters in a step; None = there are none at all, and every request fits
    """

    def __init__(self, most: int | None, running: Iterable[Request]) -> None:
        self._most = most
        self._taken: set[int] = set()
        if most is not None:
            self._taken = {one.lora_request.lora_int_id for one in running if one.lora_request is not None}
        # Requests passed over in this step, in order, to be put back.
        self.skipped: list[Request] = []
        self._blocked = False

    def take(self, request: Request) -> bool:
        """Whether a request fits; one that does not is kept in `skipped`."""
        if self._most is None or request.lora_request is None:
            return True
        adapter = request.lora_request.lora_int_id
        if not self._blocked and (adapter in self._taken or len(self._taken) < self._most):
            return True
        self._blocked = self._blocked or request.times_passed_over >= PATIENCE
        self.skipped.append(request)
        return False

    def admitted(self, request: Request) -> None:
        """Note that a request runs from now on."""
        if request.lora_request is None:
            return
        self._taken.add(request.lora_request.lora_int_id)
        for other in self.skipped:
            other.times_passed_over += 1


def count_adapters(requests: Iterable[Request]) -> dict[str, int]:
    """Adapter name -> how many of the requests want it."""
    return dict(Counter(one.lora_request.lora_name for one in requests if one.lora_request is not None))
