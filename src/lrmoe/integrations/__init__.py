"""Plug-ins for the frameworks people train with."""
