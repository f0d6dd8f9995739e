"""The command line: declares options, calls the library, prints what it returns."""
