"""Metrics and statistics: stat loggers, Prometheus, the web layer's own figures."""
