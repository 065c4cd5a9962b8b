"""Adapters as a server knows them: who answers for an unknown name, once however many ask, and with which errors."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from hardpoint.config.sections import LoRAConfig
from hardpoint.contracts.lora_resolver import LoRAResolver, LoRAResolverRegistry
from hardpoint.errors import ConfigError, EngineDeadError, ModelFileError
from hardpoint.extensions import registry
from hardpoint.front_end.server.errors import ApiError
from hardpoint.front_end.server.lora_modules import LoRAModulePath, parse_lora_modules
from hardpoint.front_end.server.serving.adapters import ServedAdapters
from hardpoint.front_end.server.settings import ServerSettings
from hardpoint.types.lora_request import LoRARequest


class Engine:
    """Takes any adapter, but those whose folder is named `broken`."""

    def __init__(self, lora=True) -> None:
        self.vllm_config = SimpleNamespace(lora_config=LoRAConfig() if lora else None)
        self.model_config = SimpleNamespace(model="base")
        self.added: list[LoRARequest] = []
        self.removed: list[int] = []
        self.failure: Exception | None = None

    async def add_lora(self, wanted):
        await asyncio.sleep(0.01)
        if self.failure is not None:
            raise self.failure
        if wanted.lora_path.endswith("broken"):
            raise ModelFileError(
                "adapter is cut [from /secret/place] Fix: fetch it", code="lora-weights", origin="/secret/other place"
            )
        self.added.append(wanted)
        return True

    async def remove_lora(self, number):
        self.removed.append(number)
        if self.failure is not None:
            raise self.failure
        return True


class Resolver(LoRAResolver):
    """Answers with a folder; `asked` counts."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str]] = []

    async def resolve_lora(self, base_model_name, lora_name):
        self.asked.append((base_model_name, lora_name))
        await asyncio.sleep(0.01)
        if isinstance(self.answer, Exception):
            raise self.answer
        return LoRARequest("other name", 77, self.answer) if isinstance(self.answer, str) else self.answer


@pytest.fixture
def folder(tmp_path):
    for name in ("good", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    return tmp_path


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    with registry.isolated():
        yield


def served(engine=None) -> ServedAdapters:
    return ServedAdapters(engine or Engine(), ["m"])


def resolvers(*answers) -> list[Resolver]:
    made = [Resolver(answer) for answer in answers]
    for number, resolver in enumerate(made):
        LoRAResolverRegistry.register_resolver(f"r{number}", resolver)
    return made


def refusal(work) -> tuple[int, str, str]:
    with pytest.raises(ApiError) as caught:
        asyncio.run(work)
    failure = caught.value.failure
    return failure.status, failure.kind, failure.message


def test_the_first_resolver_that_knows_a_name_answers(folder):
    unknowing, knowing, later = resolvers(None, str(folder / "good"), str(folder / "good"))
    adapters = served(engine := Engine())
    found = asyncio.run(adapters.find("wanted"))
    assert (found.lora_name, found.lora_int_id, found.lora_path) == ("wanted", 1, str(folder / "good"))
    assert unknowing.asked == knowing.asked == [("base", "wanted")]
    assert later.asked == []
    assert asyncio.run(adapters.find("wanted")) is found
    assert len(engine.added) == len(knowing.asked) == 1


def test_many_who_ask_at_once_load_once_and_whoever_leaves_hurts_nobody(folder):
    (resolver,) = resolvers(str(folder / "good"))
    adapters = served(engine := Engine())

    async def ask():
        tasks = [asyncio.create_task(adapters.find("wanted")) for _ in range(20)]
        await asyncio.sleep(0.005)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    left, *others = asyncio.run(ask())
    assert isinstance(left, asyncio.CancelledError)
    assert all(found.lora_int_id == 1 for found in others)
    assert len(resolver.asked) == len(engine.added) == 1


@pytest.mark.parametrize("fault", [OSError("disk"), "wrong", 5])
def test_a_resolver_that_fails_is_passed_over(folder, fault, caplog):
    answer = SimpleNamespace(lora_path="x") if fault == "wrong" else fault
    resolvers(answer, str(folder / "good"))
    assert asyncio.run(served().find("wanted")).lora_path == str(folder / "good")
    assert "'r0' failed for 'wanted'" in caplog.text


def test_what_is_no_resolver_is_told_and_passed_over(folder, caplog):
    LoRAResolverRegistry.register_resolver("class", Resolver)
    assert "no object with an async resolve_lora" in caplog.text
    resolvers(str(folder / "good"))
    assert asyncio.run(served().find("wanted")) is not None


def test_an_adapter_that_cannot_be_loaded_gives_the_next_resolver_its_turn(folder):
    resolvers(str(folder / "broken"), str(folder / "good"))
    assert asyncio.run(served().find("wanted")).lora_path == str(folder / "good")


def test_found_and_not_loadable_is_400_without_places_of_the_server(folder):
    resolvers(str(folder / "broken"), None)
    status, _, message = refusal(served().find("wanted"))
    assert status == 400
    assert "adapter is cut Fix: fetch it" in message
    assert "/secret" not in message


@pytest.mark.parametrize("name", ["x" * 513, "a\nb", "a\0b", "\ud800"])
def test_names_that_none_can_have_are_not_asked_for(name):
    (resolver,) = resolvers(None)
    assert asyncio.run(served().find(name)) is None
    assert resolver.asked == []


def test_nobody_is_asked_without_permission_or_adapters(folder, monkeypatch):
    (resolver,) = resolvers(str(folder / "good"))
    assert asyncio.run(served(Engine(lora=False)).find("wanted")) is None
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    assert asyncio.run(served().find("wanted")) is None
    assert resolver.asked == []


def test_an_engine_that_has_ended_is_nobodys_bad_request(folder):
    resolvers(str(folder / "good"))
    engine = Engine()
    engine.failure = EngineDeadError()
    with pytest.raises(EngineDeadError):
        asyncio.run(served(engine).find("wanted"))
    with pytest.raises(EngineDeadError):
        asyncio.run(served(engine).load("wanted", str(folder / "good"), False))


def test_loading_in_place_keeps_the_id_and_unloading_forgets_it(folder):
    adapters = served(engine := Engine())

    async def change():
        await adapters.load("a", str(folder / "good"), False)
        await adapters.load("b", str(folder / "good"), True)
        await adapters.load("a", str(folder / "good"), True)
        await adapters.unload("a")
        await adapters.load("a", str(folder / "good"), False)

    asyncio.run(change())
    assert [(one.lora_int_id, one.load_inplace) for one in engine.added] == [
        (1, False), (2, False), (1, True), (3, False),
    ]  # fmt: skip
    assert engine.removed == [1]
    assert [one.lora_name for one in adapters.all()] == ["b", "a"]


def test_two_who_load_the_same_name_at_once_do_not_both_succeed(folder):
    adapters = served(engine := Engine())

    async def both():
        loads = [adapters.load("a", str(folder / "good"), False) for _ in range(2)]
        return await asyncio.gather(*loads, return_exceptions=True)

    results = asyncio.run(both())
    assert sum(isinstance(one, ApiError) for one in results) == len(engine.added) == 1


def test_an_adapter_in_use_may_be_unloaded(folder):
    adapters = served(engine := Engine())
    asyncio.run(adapters.load("a", str(folder / "good"), False))
    engine.failure = ConfigError("it is in use")
    asyncio.run(adapters.unload("a"))
    assert adapters.get("a") is None


def test_a_load_that_fails_leaves_the_name_free(folder):
    adapters = served()
    assert refusal(adapters.load("a", str(folder / "broken"), False))[:2] == (400, "InvalidUserInput")
    assert refusal(adapters.load("a", str(folder / "absent"), False))[:2] == (404, "NotFoundError")
    assert refusal(adapters.unload("a"))[:2] == (404, "NotFoundError")
    assert refusal(served(Engine(lora=False)).load("a", "x", False))[0] == 400
    asyncio.run(adapters.load("a", str(folder / "good"), False))


# -- --lora-modules -------------------------------------------------------------------------------------


def test_modules_are_pairs_or_json():
    words = ["a=/x=y", json.dumps({"name": "b", "path": "p", "base_model_name": "q"}), '[{"name": "c", "path": "r"}]']
    assert parse_lora_modules(words, ["m"]) == [
        LoRAModulePath("a", "/x=y"), LoRAModulePath("b", "p", "q"), LoRAModulePath("c", "r"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("a", "neither NAME=FOLDER nor JSON"),
        ("=x", "neither"),
        ("a=", "neither"),
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ('{"name": "a"}', "no name or no path"),
        ('{"name": 1, "path": "x"}', "no name or no path"),
        ('{"name": "a", "path": "x", "rank": 1}', "rank is unknown"),
        ('{"name": "a", "path": "x", "base_model_name": 1}', "not a text"),
        ('{"name": "a", "path": "x", "is_3d_lora_weight": true}', "experts"),
        ("m=x", "the name 'm' is taken"),
    ],
)
def test_modules_that_cannot_be_read_are_refused(word, said):
    with pytest.raises(ConfigError, match=said) as caught:
        parse_lora_modules([word], ["m"])
    assert caught.value.fix
    with pytest.raises(ConfigError):
        ServerSettings(lora_modules=[word], enable_lora=True, served_model_name="m")._check()


def test_modules_need_adapters_to_be_on():
    with pytest.raises(ConfigError, match="--lora-modules needs"):
        ServerSettings(lora_modules=["a=b"])._check()


@pytest.mark.parametrize("name", ["a\nERROR forged", "a" * 513, "\u202eevil"], ids=["line", "long", "turned"])
def test_names_that_cannot_be_shown_are_refused(folder, name):
    status, kind, text = refusal(served().load(name, str(folder), False))
    assert (status, kind) == (400, "InvalidUserInput")
    assert "lora_name must have at most 512 printable characters" in text
