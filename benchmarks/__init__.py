"""Programs that measure; see README.md."""
