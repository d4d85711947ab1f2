"""Measurements around steps: bytes held, messages, profiles, timelines on one clock."""
