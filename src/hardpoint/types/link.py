"""Messages of the TCP link between a headless engine and its front end.

A message is one frame that says its kind, then its contents. They are maps, so that two versions
that must refuse each other can read enough of each other to say so.
"""

from __future__ import annotations

import enum

import msgspec

from hardpoint.types.messages import Ready


class LinkFrame(enum.Enum):
    """First frame of every message on the link."""

    HELLO = b"\x10"  # front end -> engine: LinkHello, once a second until it is answered
    WAIT = b"\x11"  # engine -> front end: LinkWait
    REFUSED = b"\x12"  # engine -> front end: StartFailed
    WELCOME = b"\x13"  # engine -> front end: LinkWelcome
    BEAT = b"\x14"  # both ways, no contents
    DATA = b"\x15"  # what would pass between the two on one machine: type byte and message, or outputs
    GOODBYE = b"\x16"  # both ways, and answered with the same; the engine's says why: StartFailed


class EngineFacts(msgspec.Struct, omit_defaults=True):
    """What an engine is and how it was started, in a form that can be compared.

    version  of Hardpoint
    model    the name it was given, for people
    config   digest of what the model's files say of its shape and vocabulary
    weights  digest of samples of its weight files; empty where they are not on the machine
    flags    digest of each engine flag that was given, by the flag
    """

    version: str
    model: str = ""
    config: str = ""
    weights: str = ""
    flags: dict[str, str] = {}


class LinkHello(msgspec.Struct, omit_defaults=True):  # front end -> engine
    """A front end asks to be served. `sender` is for people."""

    sender: str
    facts: EngineFacts


class LinkWait(msgspec.Struct, omit_defaults=True):  # engine -> front end
    """Not yet: `why` completes "the engine ...". `busy`: another front end is being served."""

    why: str
    busy: bool = False


class LinkWelcome(msgspec.Struct, omit_defaults=True):  # engine -> front end
    """From now on DATA passes. `ready` includes the ledger of all of the engine's processes."""

    ready: Ready
