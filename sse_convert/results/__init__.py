"""What runs left on disk: collected, set side by side."""
