"""Scaling laws of loss and curvature from training runs over model and data sizes."""
