"""Just enough of an OpenAI client for `chat` and `complete`: standard library only, streaming."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hardpoint.errors import HardpointError

DEFAULT_URL = "http://localhost:8000/v1"
# A line of a stream is one token's JSON; with logprobs a few kilobytes.
_MAX_LINE_BYTES = 1 << 24
_CONNECT_S = 10.0


class ApiClientError(HardpointError):
    """The server cannot be reached, or refuses."""


class ApiClient:
    """Talks to one server.

    url  the base of the API, with or without the final /v1
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ApiClientError(
                f"{url!r} is not the address of a server", code="flag-value", fix=f"write it like {DEFAULT_URL}"
            )
        self.url = url
        self._parts = parts
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """The name of the model the server answers with unless told otherwise."""
        with self._asking("GET", "/models") as answer:
            names = [card["id"] for card in json.loads(answer.read())["data"]]
        if not names:
            raise ApiClientError(f"the server at {self.url} serves no model", code="no-model")
        return str(names[0])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Post a request with stream=true and yield its chunks; closing the iterator ends the request.

        Raises ApiClientError when the server refuses, or fails on the way.
        """
        with self._asking("POST", path, {**body, "stream": True}) as answer:
            while line := answer.readline(_MAX_LINE_BYTES):
                text = line.decode("utf-8", "replace").strip()
                if not text.startswith("data:"):
                    continue
                data = text[5:].strip()
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise _refusal(chunk, 0)
                yield chunk

    @contextmanager
    def _asking(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=_CONNECT_S)
        try:
            connection.connect()
            # Generating may take long; only connecting is limited.
            connection.sock.settimeout(None)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._base + path, data, self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise _refusal(_json_of(answer.read(_MAX_LINE_BYTES)), answer.status)
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise ApiClientError(
                f"the server at {self.url} does not answer: {error or type(error).__name__}",
                code="no-server",
                fix="start one with `hardpoint serve`, or name another with --url",
            ) from None
        finally:
            connection.close()


def _json_of(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return {"error": {"message": data.decode("utf-8", "replace")[:500]}}


def _refusal(body: Any, status: int) -> ApiClientError:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else str(error or body)
    fix = "give its key with --api-key" if status == 401 else ""
    return ApiClientError(f"the server says: {message}", code="refused", fix=fix)


def add_client_args(parser: argparse.ArgumentParser) -> None:
    """The flags both commands have."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server's API (default {DEFAULT_URL})")
    parser.add_argument("--model-name", "--model", dest="model_name", help="the model; default: the server's first")
    parser.add_argument("--api-key", help="the server's key; default: VLLM_API_KEY or OPENAI_API_KEY")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, help="0 = always the likeliest token")


def client_of(args: argparse.Namespace) -> tuple[ApiClient, dict[str, Any]]:
    """The client the flags describe, and the part of every request they fill."""
    key = args.api_key or os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY")
    client = ApiClient(args.url, key)
    body: dict[str, Any] = {"model": args.model_name or client.first_model()}
    for name in ("max_tokens", "temperature"):
        if getattr(args, name) is not None:
            body[name] = getattr(args, name)
    return client, body
