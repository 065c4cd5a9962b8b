"""Which LoRA adapters the workers keep, and which requests wait for room for theirs.

All workers are told alike what to load and to drop, so that no two of them can differ. An adapter that a request
needs is never dropped; of the others the one that was used longest ago goes first, and pinned ones stay.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from hardpoint.contracts.executor import Executor
from hardpoint.errors import ConfigError, without_origin
from hardpoint.log import init_logger
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.stats import SchedulerStats

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

logger = init_logger(__name__)


class AdapterTable:
    """The adapters of one engine core.

    is_unfinished  whether a request with this id, which `take_ready` gave back, has yet to end
    """

    def __init__(self, vllm_config: VllmConfig, executor: Executor, is_unfinished: Callable[[str], bool]) -> None:
        config = vllm_config.lora_config
        self._room = 0 if config is None else max(config.max_cpu_loras or 0, config.max_loras)
        self._enabled = config is not None
        self._executor = executor
        self._is_unfinished = is_unfinished
        # Request id -> the adapter it needs, since `take_ready` gave it back.
        self._users: dict[str, int] = {}
        # The one used last at the end.
        self._loaded: OrderedDict[int, LoRARequest] = OrderedDict()
        self._pinned: set[int] = set()
        # How often the weights of an id were replaced: blocks cached with the old ones must not be found.
        self._versions: dict[int, int] = {}
        self._waiting: deque[EngineCoreRequest] = deque()

    # Calls.

    def add(self, wanted: LoRARequest) -> bool:
        """Load an adapter; whether it was not there before. Raises what the workers raise when it cannot be.

        Where requests need all there is room for, it is only found to be sound, and loaded again when it is asked for.
        """
        self._require()
        self._check_name(wanted)
        if wanted.lora_int_id in self._loaded and not wanted.load_inplace:
            self._loaded.move_to_end(wanted.lora_int_id)
            return False
        added = self._load(wanted)
        needed = self._needed()
        while len(self._loaded) > self._room:
            spare = self._spare({*needed, wanted.lora_int_id})
            self._drop(wanted.lora_int_id if spare is None else spare)
        return added

    def remove(self, adapter: int) -> bool:
        """Drop an adapter; whether it was there. ConfigError while requests need it."""
        self._require()
        if adapter not in self._loaded:
            return False
        if adapter in self._needed():
            raise ConfigError(
                f"adapter {self._loaded[adapter].lora_name!r} is in use by running requests",
                code="lora-in-use", fix="try again once they have ended",
            )  # fmt: skip
        self._pinned.discard(adapter)
        self._drop(adapter)
        return True

    def pin(self, adapter: int) -> bool:
        """Keep an adapter until it is removed; whether it is there. ConfigError when no other would find room."""
        self._require()
        if adapter not in self._loaded:
            return False
        if len(self._pinned | {adapter}) >= self._room > 1:
            raise ConfigError(
                f"all but one of {self._room} places are pinned", code="lora-room", fix="raise --max-cpu-loras"
            )
        self._pinned.add(adapter)
        return True

    def ids(self) -> set[int]:
        """Of the loaded adapters."""
        return set(self._loaded)

    def _require(self) -> None:
        if not self._enabled:
            what = "this engine was started without adapters"
            raise ConfigError(what, code="lora-off", fix="start with --enable-lora")

    # Requests.

    def why_refused(self, wanted: LoRARequest | None) -> str | None:
        """Why a request with this adapter cannot run, as far as that is known before it is loaded."""
        if wanted is None:
            return None
        try:
            self._require()
            self._check_name(wanted)
        except ConfigError as error:
            return str(error)
        return None

    def key_of(self, wanted: LoRARequest | None) -> str | None:
        """What tells blocks computed with an adapter from all others."""
        if wanted is None:
            return None
        version = self._versions.get(wanted.lora_int_id, 0)
        return f"{wanted.lora_int_id} {version} {wanted.lora_name} {wanted.lora_path}"

    def hold(self, request: EngineCoreRequest) -> None:
        """Keep a request with an adapter until `take_ready` gives it back."""
        self._waiting.append(request)

    def take_ready(self) -> list[tuple[EngineCoreRequest, str | None]]:
        """The held requests that go on, each with its adapter loaded or with the reason why it cannot be.

        In order of arrival: nobody overtakes one that waits for room.
        """
        ready: list[tuple[EngineCoreRequest, str | None]] = []
        coming: dict[str, int] = {}
        while self._waiting:
            request = self._waiting[0]
            wanted = request.lora_request
            assert wanted is not None
            reason = None
            try:
                self._check_name(wanted)
                if not self._make_ready(wanted, coming.values()):
                    break
                coming[request.request_id] = wanted.lora_int_id
            except Exception as error:
                logger.warning("adapter %r cannot be loaded: %s", wanted.lora_name, error)
                reason = without_origin(str(error))
            ready.append((self._waiting.popleft(), reason))
        self._users.update(coming)
        return ready

    def _make_ready(self, wanted: LoRARequest, coming: Collection[int]) -> bool:
        """Load an adapter unless there is no room; whether it is there. `coming` are to be kept beside those in use."""
        if wanted.lora_int_id in self._loaded and not self._is_news(wanted):
            self._loaded.move_to_end(wanted.lora_int_id)
            return True
        spare = None
        if wanted.lora_int_id not in self._loaded and len(self._loaded) >= self._room:
            spare = self._spare({*self._in_use(), *coming})
            if spare is None:
                return False
        # One more than there is room for, for a moment: what cannot be loaded must not drive another out.
        self._load(wanted)
        if spare is not None:
            self._drop(spare)
        return True

    def _is_news(self, wanted: LoRARequest) -> bool:
        """Whether a request brings other weights for a known adapter, with `load_inplace`."""
        return wanted.load_inplace and self._loaded[wanted.lora_int_id].lora_path != wanted.lora_path

    def drop(self, request_ids: Iterable[str] | None) -> list[EngineCoreRequest]:
        """Give up held requests (None: all); returns those that were here."""
        ids = None if request_ids is None else set(request_ids)
        dropped = [held for held in self._waiting if ids is None or held.request_id in ids]
        if dropped:
            self._waiting = deque(held for held in self._waiting if ids is not None and held.request_id not in ids)
        return dropped

    def __contains__(self, request_id: object) -> bool:
        return any(held.request_id == request_id for held in self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def count_waiting(self, stats: SchedulerStats) -> None:
        """Add the held requests to a snapshot."""
        stats.num_waiting_reqs += len(self._waiting)
        for held in self._waiting:
            assert held.lora_request is not None
            name = held.lora_request.lora_name
            stats.waiting_lora_adapters[name] = stats.waiting_lora_adapters.get(name, 0) + 1

    # Room.

    def _check_name(self, wanted: LoRARequest) -> None:
        known = self._loaded.get(wanted.lora_int_id)
        if known is None or wanted.load_inplace:
            return
        if (known.lora_name, known.lora_path) != (wanted.lora_name, wanted.lora_path):
            raise ConfigError(
                f"lora_int_id {wanted.lora_int_id} belongs to adapter {known.lora_name!r}, not to {wanted.lora_name!r}",
                code="lora-id", fix="give every adapter an id of its own, or set load_inplace to replace one",
            )  # fmt: skip

    def _in_use(self) -> set[int]:
        self._users = {name: one for name, one in self._users.items() if self._is_unfinished(name)}
        return set(self._users.values())

    def _needed(self) -> set[int]:
        held = {request.lora_request.lora_int_id for request in self._waiting if request.lora_request is not None}
        return {*self._in_use(), *held}

    def _spare(self, needed: Collection[int]) -> int | None:
        """The adapter used longest ago that nobody needs."""
        return next((one for one in self._loaded if one not in needed and one not in self._pinned), None)

    def _load(self, wanted: LoRARequest) -> bool:
        known = wanted.lora_int_id in self._loaded
        request = LoRARequest(
            wanted.lora_name, wanted.lora_int_id, wanted.lora_path, wanted.base_model_name, load_inplace=known
        )
        try:
            self._executor.add_lora(request)
        except Exception:
            if not known:
                # One worker may have it and another not.
                self._executor.remove_lora(wanted.lora_int_id)
            raise
        self._versions[wanted.lora_int_id] = self._versions.get(wanted.lora_int_id, -1) + 1
        self._loaded[wanted.lora_int_id] = request
        self._loaded.move_to_end(wanted.lora_int_id)
        return not known

    def _drop(self, adapter: int) -> None:
        del self._loaded[adapter]
        self._executor.remove_lora(adapter)
