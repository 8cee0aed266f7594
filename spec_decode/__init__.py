"""Speculative decoding drivers; empty until they land."""
