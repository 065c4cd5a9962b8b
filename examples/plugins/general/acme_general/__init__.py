"""A general plugin: its function runs once in every process of a server, before anything is built."""

import logging
from dataclasses import dataclass, field

from hardpoint.extensions.plugin_config import declare, get_plugin_config

# The versions of Hardpoint's contracts this is made for: outside them it is refused before it runs.
HARDPOINT_CONTRACTS = {"general": ">=1.0,<2"}

logger = logging.getLogger(__name__)


@declare("acme", flags=True)
@dataclass
class Settings:
    """What users may set: `--plugin-config acme.greeting=hi`, or `--acme-greeting hi`."""

    greeting: str = field(default="hello", metadata={"help": "what each process says at its start"})
    times: int = field(default=1, metadata={"help": "how often"})


def register() -> None:
    """Called without arguments; what it raises stops the process."""
    settings = get_plugin_config("acme", Settings)
    logger.info("acme says: %s", " ".join([settings.greeting] * settings.times))
