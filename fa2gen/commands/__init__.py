"""The sub-commands of the ``fa2gen`` command line, one a module."""
