"""The command line, one subcommand a file. Subcommands are imported only when they are used."""
