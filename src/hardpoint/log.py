"""Logging: one handler for our loggers and for those of loaded plugins, text or JSON lines."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
from functools import lru_cache
from typing import Any, cast

from hardpoint.env import envs
from hardpoint.errors import ConfigError

_FORMAT = "%(levelname)s %(asctime)s [%(role)s] %(message)s"
_DATE = "%m-%d %H:%M:%S"
_ROOTS = ("hardpoint", "vllm")
_role = "main"


class Logger(logging.Logger):
    """A logger that can also say a thing once per process."""

    def debug_once(self, message: str, *args: object) -> None:
        """Log at DEBUG the first time only."""
        _once(self, logging.DEBUG, message, args)

    def info_once(self, message: str, *args: object) -> None:
        """Log at INFO the first time only."""
        _once(self, logging.INFO, message, args)

    def warning_once(self, message: str, *args: object) -> None:
        """Log at WARNING the first time only."""
        _once(self, logging.WARNING, message, args)

    def error_once(self, message: str, *args: object) -> None:
        """Log at ERROR the first time only."""
        _once(self, logging.ERROR, message, args)


_seen: set[tuple[str, int, str, str]] = set()


def _once(logger: logging.Logger, level: int, message: str, args: tuple[object, ...]) -> None:
    key = (logger.name, level, message, repr(args))
    if key not in _seen:
        _seen.add(key)
        logger.log(level, message, *args, stacklevel=3)


def init_logger(name: str) -> Logger:
    """Return the logger `name` with the `*_once` methods."""
    logger = logging.getLogger(name)
    if not isinstance(logger, Logger):
        logger.__class__ = type("Logger", (Logger, type(logger)), {})
    return cast("Logger", logger)


class _Context(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.role = f"{_role} {os.getpid()}"
        return True


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname,
            "role": _role,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Text(logging.Formatter):
    COLOURS = {"DEBUG": "37", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "35"}

    def __init__(self, colour: bool) -> None:
        super().__init__(envs.VLLM_LOGGING_PREFIX + _FORMAT, _DATE)
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self._colour:
            return text
        return text.replace(record.levelname, f"\033[{self.COLOURS[record.levelname]}m{record.levelname}\033[0m", 1)


class _LateStream(logging.StreamHandler[Any]):
    """Writes to whatever sys.stdout/sys.stderr is at the time, so redirection works."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._name = name

    @property
    def stream(self) -> Any:
        return getattr(sys, self._name)


def _stream_name() -> str:
    return "stderr" if envs.VLLM_LOGGING_STREAM.endswith("stderr") else "stdout"


@lru_cache(maxsize=1)
def _handler() -> logging.Handler:
    return _LateStream(_stream_name())


def configure(role: str | None = None, *, level: str | None = None, formatter: str | None = None) -> None:
    """Attach our handler. Call once per process; later calls change role, level or format.

    What is None stays: the role as it is, level and format as the environment says.
    """
    global _role  # noqa: PLW0603 - one role per process
    _role = role or _role
    formatter = formatter or envs.HARDPOINT_LOGGING_FORMAT
    if not envs.VLLM_CONFIGURE_LOGGING:
        return
    path = envs.VLLM_LOGGING_CONFIG_PATH
    if path:
        _configure_from(path)
        return
    handler = _handler()
    stream = getattr(sys, _stream_name())
    is_terminal = stream is not None and stream.isatty()
    colour = envs.VLLM_LOGGING_COLOR == "1" or (envs.VLLM_LOGGING_COLOR == "auto" and is_terminal)
    handler.setFormatter(_JsonLines() if formatter == "json" else _Text(colour))
    if not handler.filters:
        handler.addFilter(_Context())
    for root in _ROOTS:
        attach(root, level or envs.VLLM_LOGGING_LEVEL)


def _configure_from(path: str) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            logging.config.dictConfig(json.load(file))
    except (OSError, ValueError, TypeError, AttributeError, ImportError, RecursionError) as problem:
        cause = getattr(problem, "strerror", None) or str(problem)
        raise ConfigError(
            f"the logging configuration {path!r} cannot be used: {cause}",
            code="config-logging",
            origin="--log-config-file, or VLLM_LOGGING_CONFIG_PATH",
            fix="name a JSON file with a dictionary for logging.config.dictConfig",
        ) from problem


def attach(root: str, level: str | int = "INFO") -> None:
    """Show records of logger `root` and below, e.g. those of a plugin's package."""
    logger = logging.getLogger(root)
    handler = _handler()
    if handler not in logger.handlers:
        logger.addHandler(handler)
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    logger.propagate = False
