"""Engines that take a step: one file each."""
