"""Renewed certificates without a restart (`--enable-ssl-refresh`)."""

from __future__ import annotations

import asyncio
import os
import ssl

from hardpoint.front_end.server.settings import ServerSettings
from hardpoint.log import init_logger

logger = init_logger(__name__)

_LOOK_EVERY_S = 5.0


async def refresh_certificates(context: ssl.SSLContext, settings: ServerSettings) -> None:
    """Load certificate, key and CA file again when one changes; runs until cancelled.

    New connections get the new certificate. A file that cannot be loaded leaves the old one in use.
    """
    files = [path for path in (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs) if path]
    known = _stamps(files)
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        now = _stamps(files)
        if now == known:
            continue
        try:
            context.load_cert_chain(settings.ssl_certfile or "", settings.ssl_keyfile)
            if settings.ssl_ca_certs:
                context.load_verify_locations(settings.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            # Perhaps only one of the files is written yet: tried again at the next look.
            logger.warning("changed TLS files cannot be loaded yet: %s", error)
            continue
        known = now
        logger.info("TLS files changed and were loaded again")


def _stamps(files: list[str]) -> list[tuple[int, int] | None]:
    stamps: list[tuple[int, int] | None] = []
    for path in files:
        try:
            facts = os.stat(path)
        except OSError:
            stamps.append(None)
        else:
            stamps.append((facts.st_mtime_ns, facts.st_size))
    return stamps
