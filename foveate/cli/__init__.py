"""The command line: `foveate up`, `ask`, `chat`, `describe`, `contexts`, `version`."""
