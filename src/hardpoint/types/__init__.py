"""Plain data that crosses process lines or the public API. No behaviour that needs torch."""
