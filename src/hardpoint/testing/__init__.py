"""For authors of plugins: make a plugin from source text, and boot a role with it."""

from hardpoint.extensions.report import BootReport, boot_in_child
from hardpoint.testing.plugins import Plugin, make_plugin, plugin_environment

__all__ = ["BootReport", "Plugin", "boot_in_child", "make_plugin", "plugin_environment"]
