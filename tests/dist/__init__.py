"""Tests on several gloo ranks."""
