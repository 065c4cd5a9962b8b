from hardpoint.testing.pytest_plugin import hardpoint_server, isolated_registries, make_plugin, tiny_model

__all__ = ["hardpoint_server", "isolated_registries", "make_plugin", "tiny_model"]
