"""A platform plugin: its function says whether the platform is there. It must not ask for the current platform."""

import os


def detect() -> str | None:
    """The path of the platform's class, or None where it does not apply. One at most may apply."""
    return "acme_platforms.platform.AcmePlatform" if os.environ.get("ACME_PLATFORM") == "1" else None
