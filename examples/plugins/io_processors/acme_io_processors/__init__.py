"""An IO-processor plugin: its function names the class, or gives None where it does not apply."""


def find_processor() -> str | None:
    """The path of the class; imported only if the user or the model asks for this plugin."""
    return "acme_io_processors.processor.AcmeProcessor"
