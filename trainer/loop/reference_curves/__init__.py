"""Curves that layouts with mathematics of their own are held to: simulated in one process of plain torch, without engines."""
