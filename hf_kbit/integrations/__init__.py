"""What connects the package to other libraries: a folder for each; ``hooks/table.py`` lists what is hooked into."""
