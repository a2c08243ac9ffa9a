"""The check of one GPU: ``check.sh`` runs the parts, ``docs/gpu.md`` says what they measure."""
