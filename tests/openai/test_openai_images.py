"""Images over HTTP, on a real server whose model is split over two ranks, asked through the official client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import openai
from hardpoint.front_end.multimodal.images import ClipImageProcessor
from server_process import ServerProcess
from tiny_llava import TOKENS, VISION, data_url, expected_logits, picture, write_tiny_llava

SIDE = VISION["image_size"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("llava")
    (folder / "media").mkdir()
    picture(6).save(folder / "media" / "six.png")
    return write_tiny_llava(folder), folder


@pytest.fixture(scope="module")
def server(checkpoint: tuple[Any, Path]) -> Iterator[ServerProcess]:
    folder = checkpoint[1]
    started = ServerProcess(
        folder, "--dtype", "float32", "--tensor-parallel-size", "2", "--max-model-len", "200",
        "--max-num-batched-tokens", "48", "--max-num-seqs", "8", "--allowed-local-media-path", str(folder / "media"),
        "--allowed-media-domains", "pictures.invalid", "--limit-mm-per-prompt", '{"image": 3}',
        "--enable-prompt-tokens-details",
    )  # fmt: skip
    with started:
        yield started.wait_ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with httpx.Client(trust_env=False) as http:
        url = f"http://127.0.0.1:{server.port}/v1"
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120, http_client=http)


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def ask(client: openai.OpenAI, *parts: dict[str, Any], **options: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True}
    return client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": list(parts)}], temperature=0, max_tokens=4,  # type: ignore[misc]
        extra_body=extra, **options,
    )  # fmt: skip


def check(model: Any, answer: Any, images: list[int]) -> None:
    """The tokens are those transformers would choose."""
    prepare = ClipImageProcessor({"size": SIDE, "crop_size": SIDE})
    chosen = answer.choices[0].token_ids
    ids = [*answer.prompt_token_ids, *chosen]
    logits = expected_logits(model, ids, [prepare(picture(seed)) for seed in images])
    best = logits[len(answer.prompt_token_ids) - 1 : -1]
    assert [float(row[token]) for row, token in zip(best, chosen, strict=True)] == pytest.approx(
        best.amax(-1).tolist(), abs=1e-3
    )


def test_images_of_every_origin_are_seen(client, checkpoint):
    model, folder = checkpoint
    answer = ask(client, text_part("look"), image_part(data_url(picture(5))), text_part("what?"))
    check(model, answer, [5])
    assert answer.usage.prompt_tokens_details.multimodal_tokens == {"image": TOKENS}
    local = ask(client, image_part(f"file://{folder}/media/six.png"), image_part(data_url(picture(5))))
    check(model, local, [6, 5])
    check(model, ask(client, text_part("no image at all")), [])


def test_streams_batches_and_other_images_do_not_disturb_each_other(client, checkpoint):
    def one(number: int) -> Any:
        if number % 3 == 0:
            return [], ask(client, text_part(f"just words {number}"))
        return [number], ask(client, image_part(data_url(picture(number))), text_part("what is it?"))

    with ThreadPoolExecutor(8) as pool:
        for images, answer in pool.map(one, range(12)):
            check(checkpoint[0], answer, images)
    whole = ask(client, image_part(data_url(picture(2))), text_part("what?"))
    pieces = ask(client, image_part(data_url(picture(2))), text_part("what?"), stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
    assert text == whole.choices[0].message.content


BAD = "data:image/png;base64," + base64.b64encode(b"this is no image").decode()


@pytest.mark.parametrize(
    ("parts", "where", "text"),
    [
        ([text_part("x"), image_part(BAD)], "messages.0.content.1", "no image of a known format"),
        ([image_part("data:image/png;base64,%%")], "messages.0.content.0", "not base64"),
        ([image_part("http://elsewhere.invalid/a.png")], "messages.0.content.0", "--allowed-media-domains"),
        ([image_part("http://pictures.invalid/a.png")], "messages.0.content.0", "not known"),
        ([image_part("file:///etc/passwd")], "messages.0.content.0", "not below --allowed-local-media-path"),
        ([{"type": "image_url"}], "messages.0.content.0", "needs a URL"),
        ([image_part(data_url(picture(1))) | {"uuid": "a"}], "messages.0.content.0.uuid", "known by its content"),
        (
            [{"type": "image_url", "image_url": {"url": data_url(picture(1)), "detail": "low"}}],
            "messages.0.content.0.image_url.detail",
            "size the model's processor takes",
        ),
        (
            [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
            "messages.0.content.0",
            "input_audio",
        ),
        ([image_part(data_url(picture(1)))] * 4, "messages.0.content.3", "At most 3 image"),
        ([text_part("<image>"), image_part(data_url(picture(1)))], "messages", "more image placeholders"),
    ],
)
def test_bad_images_are_refused_by_their_part(client, parts, where, text):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, *parts)
    assert caught.value.param == where
    assert text in str(caught.value)


def test_options_of_requests_need_trust(client):
    with pytest.raises(openai.BadRequestError, match="--trust-request-mm-kwargs"):
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], extra_body={"mm_processor_kwargs": {"size": 8}}
        )


def test_what_was_processed_is_counted(client, server):
    def figures() -> tuple[float, float]:
        lines = server.http.get("/metrics").text.splitlines()
        found = {
            line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:mm_")
        }
        return found["vllm:mm_cache_queries_total"], found["vllm:mm_cache_hits_total"]

    ask(client, image_part(data_url(picture(31))))
    before = figures()
    ask(client, image_part(data_url(picture(31))))
    after = figures()
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1)
