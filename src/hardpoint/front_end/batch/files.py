"""The two files of a batch: requests in, results out, and what is left when a run is interrupted.

Format: https://platform.openai.com/docs/guides/batch, one JSON object a line. Results are kept in a file beside
the output until the last one is there, so that the output is whole or as it was.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hardpoint.errors import ConfigError

_TIMEOUT_S = 60.0
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of the input.

    problem  why it cannot be asked, empty where it can
    """

    line: int
    custom_id: str | None
    path: str = ""
    body: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class InputFacts:
    """What a first look at the input tells: how many requests it has, and a digest of its bytes."""

    requests: int
    digest: str


def read_requests(path: Path, max_line_bytes: int) -> Iterator[BatchRequest]:
    """Yield the requests of an input file; blank lines are none. A line that is no request has a `problem`."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_line_bytes + 1):
            number += 1
            if len(line) > max_line_bytes:
                _skip_rest_of_line(file, line)
                yield BatchRequest(number, None, problem=f"the line is longer than {max_line_bytes} bytes")
            elif line.strip():
                yield _parse(number, line)


def _skip_rest_of_line(file: BinaryIO, line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = file.readline(_BLOCK)


def _parse(number: int, line: bytes) -> BatchRequest:
    try:
        entry = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return BatchRequest(number, None, problem=f"the line is not valid JSON: {error}")
    if not isinstance(entry, dict):
        return BatchRequest(number, None, problem="the line is not a JSON object")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str):
        return BatchRequest(number, None, problem="the line has no custom_id that is a text")
    problem = _problem(entry)
    if problem:
        return BatchRequest(number, custom_id, problem=problem)
    return BatchRequest(number, custom_id, entry["url"], msgspec.json.encode(entry["body"]))


def _problem(entry: dict[str, Any]) -> str:
    if entry.get("method", "POST") != "POST":
        return f"method {entry['method']!r} is not possible in a batch: use POST"
    if not isinstance(entry.get("url"), str):
        return "url is missing: give a path such as /v1/chat/completions"
    body = entry.get("body")
    if not isinstance(body, dict):
        return "body is missing, or not a JSON object"
    return "stream is not possible in a batch" if body.get("stream") else ""


def look_at(path: Path, max_line_bytes: int) -> InputFacts:
    """Count an input's requests. Raises ConfigError when a custom_id stands twice: results could not be told apart."""
    lines: dict[str, int] = {}
    count = 0
    for request in read_requests(path, max_line_bytes):
        count += 1
        if request.custom_id is not None:
            first = lines.setdefault(request.custom_id, request.line)
            if first != request.line:
                raise ConfigError(
                    f"custom_id {request.custom_id[:200]!r} stands in line {first} and in line {request.line}",
                    code="batch-input",
                    origin=str(path),
                    fix="give every request a custom_id of its own",
                )
    with path.open("rb") as file:
        return InputFacts(count, hashlib.file_digest(file, "sha256").hexdigest())


def check_apart(source: Path, output: Path) -> None:
    """Raise ConfigError when the results would take the place of the requests."""
    if output.exists() and output.samefile(source):
        raise ConfigError(
            f"the results would take the place of the requests in {source}",
            code="batch-output",
            origin="--output-file",
            fix="name another file than --input-file",
        )


class Results:
    """The results of a run, in a file beside `output` until `publish` puts them in its place.

    key    tells runs apart that share an output: only one with the same key goes on where another ended
    count  results so far, those of an earlier run included
    """

    def __init__(self, output: Path, key: str, fresh: bool) -> None:
        self.output = output
        self.partial = output.with_name(f"{output.name}.{key[:12]}.partial")
        try:
            if output.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self.answered = {} if fresh else self._kept()
            self.count = len(self.answered)
            self._file = self._begun()
        except OSError as error:
            raise _cannot_write(output, error) from None

    def _begun(self) -> BinaryIO:
        """The file to go on in. What is kept is there whole or as it was: a full disk loses nothing."""
        new = self.partial.with_name(f"{self.partial.name}.new")
        file = new.open("wb")
        try:
            file.writelines(self.answered.values())
            file.flush()
            new.replace(self.partial)
        except OSError:
            file.close()
            new.unlink(missing_ok=True)
            raise
        return file

    def _kept(self) -> dict[str, bytes]:
        """custom_id -> line, of the results an earlier run left that asking again would not change."""
        kept: dict[str, bytes] = {}
        if not self.partial.is_file():
            return kept
        with self.partial.open("rb") as file:
            for line in file:
                custom_id = _settled(line)
                if custom_id is not None:
                    kept[custom_id] = line
        return kept

    def add(self, request: BatchRequest, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        """Write a result; it is on its way to the disk when this returns."""
        entry = {
            "id": f"vllm-{uuid.uuid4().hex}",
            "custom_id": request.custom_id,
            "response": response,
            "error": error,
        }
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()
        self.count += 1

    def publish(self) -> None:
        """Put the results in the output's place. Raises ConfigError where that cannot be written."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        try:
            self.partial.replace(self.output)
        except OSError as error:
            raise _cannot_write(self.output, error) from None

    def close(self) -> None:
        """Stop writing; the results so far stay for the next run, and nothing stays where there is none."""
        self._file.close()
        if not self.count:
            self.partial.unlink(missing_ok=True)


def _settled(line: bytes) -> str | None:
    """The custom_id of a whole line whose request was answered, or refused for good."""
    try:
        entry = msgspec.json.decode(line)
        status = entry["response"]["status_code"]
        custom_id = entry["custom_id"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return None
    return custom_id if line.endswith(b"\n") and isinstance(custom_id, str) and 200 <= status < 500 else None


def _cannot_write(output: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the results cannot be written to {output}: {error.strerror or error}",
        code="batch-output",
        origin="--output-file",
        fix="name a file in a folder that exists and can be written to",
    )


def is_url(name: str) -> bool:
    """Whether a file's name is an address on the web."""
    return urllib.parse.urlsplit(name).scheme in ("http", "https")


@contextmanager
def local_input(name: str, folder: str | None) -> Iterator[Path]:
    """The input as a file on this machine; one on the web is fetched into `folder` first. Raises ConfigError."""
    if not is_url(name):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"there is no file {path}", code="batch-input", origin="--input-file", fix="check the path"
            )
        yield path
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix="hardpoint-batch-", suffix=".jsonl") as kept:
        try:
            with urllib.request.urlopen(name, timeout=_TIMEOUT_S) as answer:
                shutil.copyfileobj(answer, kept, _BLOCK)
        except (OSError, ValueError) as error:
            raise _web_fault("fetched from", name, "--input-file", error) from None
        kept.flush()
        yield Path(kept.name)


def upload(results: Path, url: str) -> None:
    """PUT the results to an address. Raises ConfigError; the file stays."""
    with results.open("rb") as data:
        headers = {"Content-Type": "application/jsonl", "Content-Length": str(results.stat().st_size)}
        request = urllib.request.Request(url, data=data, headers=headers, method="PUT")
        try:
            urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            raise _web_fault(f"sent (they are in {results}) to", url, "--output-file", error) from None


def _web_fault(what: str, url: str, flag: str, error: Exception) -> ConfigError:
    # Signed addresses carry a secret in their query.
    shown = urllib.parse.urlsplit(url)._replace(query="", fragment="").geturl()
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return ConfigError(f"the file cannot be {what} {shown}: {reason}", code="batch-file", origin=flag, fix="check it")
