"""Glue to other libraries, a file each."""
