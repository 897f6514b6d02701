"""What a converted model's layers do with a text: the paper's figures, on any checkpoint."""
