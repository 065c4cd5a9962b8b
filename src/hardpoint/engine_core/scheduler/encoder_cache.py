"""Which encoded media the workers keep: a budget of embeddings, shared by all requests with the same items."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from hardpoint.engine_core.request import Request
from hardpoint.types.multimodal import MultiModalFeatureSpec


class EncoderCacheManager:
    """Counts the embeddings that are kept, by the identifiers of their items.

    An item stays as long as a request still needs it, and after that until its room is needed; what is dropped then
    is told to the workers with the next step.

    cache_size  embeddings in all
    """

    def __init__(self, cache_size: int, vllm_config: Any = None) -> None:
        self.cache_size = cache_size
        # Room that nobody uses, and that with what could be dropped.
        self.num_free_slots = cache_size
        self.num_freeable_slots = cache_size
        # Identifier -> requests that need it; empty: it may be dropped.
        self.cached: dict[str, set[str]] = {}
        # What may be dropped, oldest first -> its embeddings.
        self.freeable: OrderedDict[str, int] = OrderedDict()
        self.freed: list[str] = []

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """Whether an item of a request is kept; if so, the request holds it from now on."""
        feature = request.mm_features[input_id]
        users = self.cached.get(feature.identifier)
        if users is None:
            return False
        if not users:
            self.num_freeable_slots -= self.freeable.pop(feature.identifier)
        users.add(request.request_id)
        return True

    def can_allocate(self, num_embeds: int, planned: int, budget: int) -> bool:
        """Whether an item finds room, besides `planned` embeddings of this step and within its `budget` left.

        Drops items that nobody needs when that makes the room.
        """
        if num_embeds > budget:
            return False
        wanted = num_embeds + planned
        if wanted > self.num_freeable_slots:
            return False
        while wanted > self.num_free_slots:
            identifier, size = self.freeable.popitem(last=False)
            del self.cached[identifier]
            self.freed.append(identifier)
            self.num_free_slots += size
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        """Keep an item that the next step encodes for a request."""
        feature = request.mm_features[input_id]
        if feature.identifier in self.cached:
            self.check_and_update_cache(request, input_id)
            return
        size = feature.mm_position.get_num_embeds()
        self.cached[feature.identifier] = {request.request_id}
        self.num_free_slots -= size
        self.num_freeable_slots -= size

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """A request needs an item no more; what is kept of it may be dropped once no other does."""
        feature = request.mm_features[input_id]
        users = self.cached.get(feature.identifier)
        if not users or request.request_id not in users:
            return
        users.discard(request.request_id)
        if not users:
            size = feature.mm_position.get_num_embeds()
            self.freeable[feature.identifier] = size
            self.num_freeable_slots += size

    def free(self, request: Request) -> None:
        """A request needs none of its items any more."""
        for number in range(len(request.mm_features)):
            self.free_encoder_input(request, number)

    def drop(self, request: Request) -> None:
        """A request has failed, perhaps for its items: nobody must find what is kept of them."""
        self.free(request)
        for feature in request.mm_features:
            size = self.freeable.pop(feature.identifier, None)
            if size is not None:
                del self.cached[feature.identifier]
                self.freed.append(feature.identifier)
                self.num_free_slots += size

    def forget(self, feature: MultiModalFeatureSpec) -> None:
        """An item will not be encoded after all, whoever counted on it."""
        size = feature.mm_position.get_num_embeds()
        if self.cached.pop(feature.identifier, None):
            self.num_freeable_slots += size
        self.freeable.pop(feature.identifier, None)
        self.num_free_slots += size

    def drop_unused(self) -> None:
        """Drop all that nobody needs."""
        for identifier, size in self.freeable.items():
            del self.cached[identifier]
            self.freed.append(identifier)
            self.num_free_slots += size
        self.freeable.clear()

    def get_freed_mm_hashes(self) -> list[str]:
        """What was dropped since the last call, for the workers."""
        freed, self.freed = self.freed, []
        return freed


class MediaPlanner:
    """Plans which items each step encodes.

    budget       embeddings a step may make
    keeps_whole  never begin an item in a step that does not end it
    """

    def __init__(self, manager: EncoderCacheManager, budget: int, keeps_whole: bool) -> None:
        self.manager = manager
        self.budget = budget
        self.keeps_whole = keeps_whole
        self._left = budget
        self._planned: dict[str, list[int]] = {}
        # Those of the step, by their ids.
        self._requests: dict[str, Request] = {}

    def begin_step(self) -> None:
        """Forget the last step's plan."""
        self._left, self._planned, self._requests = self.budget, {}, {}

    def fit(self, request: Request, computed: int, num_tokens: int) -> tuple[int, list[int]]:
        """How many of the next `num_tokens` tokens can be computed, and which items must be encoded for them.

        computed  tokens of the request before them
        """
        wanted: list[int] = []
        embeds = 0
        for number, feature in enumerate(request.mm_features):
            place = feature.mm_position
            if place.offset >= computed + num_tokens:
                break
            if place.end <= computed:
                continue
            if self.keeps_whole and computed < place.offset and computed + num_tokens < place.end:
                num_tokens = place.offset - computed
                break
            if any(request.mm_features[other].identifier == feature.identifier for other in wanted):
                continue
            if self.manager.check_and_update_cache(request, number):
                continue
            size = place.get_num_embeds()
            if not self.manager.can_allocate(size, embeds, self._left - embeds):
                # What stands before the item can be computed.
                num_tokens = max(0, place.offset - computed)
                break
            embeds += size
            wanted.append(number)
        return num_tokens, wanted

    def keep(self, request: Request, wanted: list[int]) -> None:
        """The step will compute what `fit` said: make room for its items."""
        self._requests[request.request_id] = request
        for number in wanted:
            self.manager.allocate(request, number)
            self._left -= request.mm_features[number].mm_position.get_num_embeds()
        if wanted:
            self._planned[request.request_id] = wanted

    def drop(self, request: Request) -> None:
        """The request is not part of the step after all; it needs none of its items for now."""
        planned = self._planned.pop(request.request_id, ())
        self._requests.pop(request.request_id, None)
        self.manager.free(request)
        for number in planned:
            feature = request.mm_features[number]
            if not self._hand_over(feature):
                self._left += feature.mm_position.get_num_embeds()
                self.manager.forget(feature)

    def _hand_over(self, feature: MultiModalFeatureSpec) -> bool:
        """Let another request of the step bring an item that it counts on."""
        for request_id in self.manager.cached[feature.identifier]:
            other = self._requests.get(request_id)
            if other is not None:
                names = [one.identifier for one in other.mm_features]
                self._planned.setdefault(request_id, []).append(names.index(feature.identifier))
                return True
        return False

    def take_plan(self) -> dict[str, list[int]]:
        """Request -> its items to encode in this step."""
        return self._planned

    def release_computed(self, request: Request) -> None:
        """Let go of the items whose tokens are all computed."""
        for number, feature in enumerate(request.mm_features):
            if feature.mm_position.end > request.num_computed_tokens:
                break
            self.manager.free_encoder_input(request, number)

    def why_impossible(self, request: Request, in_one_step: bool) -> str | None:
        """Why a request's items could never be encoded; None when they can.

        in_one_step  the whole prompt is computed at once
        """
        most = min(self.budget, self.manager.cache_size)
        sizes = {one.identifier: one.mm_position.get_num_embeds() for one in request.mm_features}
        size = sum(sizes.values()) if in_one_step else max(sizes.values(), default=0)
        if size <= most:
            return None
        what = "the media of the prompt have" if in_one_step else "an item of media has"
        return f"{what} {size} embeddings, and a step makes at most {most} (raise --max-num-batched-tokens)"
