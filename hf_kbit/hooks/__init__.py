"""What we replace in other libraries, or rely on in them: ``table.py`` lists all of it."""
