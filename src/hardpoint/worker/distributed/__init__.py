"""The ranks a model is split over."""
