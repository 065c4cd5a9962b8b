"""Model classes and what they are built with."""
