"""Retrieval in wordings that training never saw: two teachers, each asked in its own wording."""
