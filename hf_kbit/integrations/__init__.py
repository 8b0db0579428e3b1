"""What connects the package to other libraries: a folder for each; ``hooks/table.py`` lists all that is hooked into."""
