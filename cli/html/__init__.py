"""Pages as single HTML files."""
