"""The result as a folder anyone can load, its model card, and the way to a hub."""
