"""The operator in plain PyTorch: the definition, and forms of it that are fast enough to train with."""
