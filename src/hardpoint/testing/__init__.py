"""For authors of plugins: make a plugin from source text, and boot a role with it."""

from hardpoint.testing.plugins import Plugin, make_plugin
from hardpoint.testing.roles import BootReport, boot_in_child

__all__ = ["BootReport", "Plugin", "boot_in_child", "make_plugin"]
