"""One file a command; each imports the library inside its function, so that `lowbit --help` stays quick."""
